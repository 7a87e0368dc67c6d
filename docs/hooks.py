"""Hooks of mkdocs: links to files outside of docs/, and a navigation of the pages that exist."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]*)(#[^)\s]*)?(\))")


def on_config(config: Any) -> Any:
    """Leave out the entries of `nav` without a file; tests/test_docs.py checks that every page has an entry."""
    config.nav = _existing(config.nav, Path(config.docs_dir))
    return config


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Point each relative link that leaves docs/ at the file in the repository, which has to exist."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def point(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[2]))
        if target.startswith("docs/"):
            return link[0]
        if not (ROOT / target).exists():
            return link[0]  # which mkdocs reports
        kind = "tree" if (ROOT / target).is_dir() else "blob"
        return f"{link[1]}{config.repo_url.rstrip('/')}/{kind}/main/{target}{link[3] or ''}{link[4]}"

    return LINK.sub(point, markdown)


def _existing(entries: list[Any], folder: Path) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        [(title, value)] = entry.items()
        if isinstance(value, str):
            found += [entry] if (folder / value).exists() else []
        elif inside := _existing(value, folder):
            found.append({title: inside})
    return found
