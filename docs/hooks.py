"""A hook of mkdocs: links to files outside of docs/ lead to the repository."""

import posixpath
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(\]\()((?:\.\./)+[^)\s#]*)(#[^)\s]*)?(\))")


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
