"""Self-contained HTML pages for reports (tables, and figures as SVG) and traces; and tables as text."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


class Section(NamedTuple):
    """A heading and a paragraph, followed by figures (written by `figures.saved_figure`) and tables."""

    title: str
    text: str
    figures: Sequence[Path]
    tables: Sequence[Table] = ()

    def printed(self) -> "Section":
        """Print the title and the tables, and return the section."""
        print("\n".join(["", self.title, *(text_table(*table) for table in self.tables)]))
        return self


def write_page(file: Path, title: str, *, template: str = "page.html", **content: Any) -> None:
    """Write a page from a template in this package and its content, such as `sections`."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["svg"] = _svg
    file.write_text(environment.get_template(template).render(title=title, **content), encoding="utf-8")


def _svg(file: Path) -> str:
    """The SVG of a figure, with ids that are unique within the page."""
    text = file.with_suffix(".svg").read_text()
    text = text[text.index("<svg") :]
    for name in sorted(set(re.findall(r'id="([^"]+)"', text)), key=len, reverse=True):
        text = re.sub(rf'(id="|"#|url\(#){re.escape(name)}(?=["\)])', rf"\g<1>{file.stem}-{name}", text)
    return text


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as text; columns are as wide as their widest cell, and aligned on the right."""
    lines = [header, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def interval(rate: Sequence[float], *, sign: str = "") -> str:
    """A mean with the bounds of its interval, as text; `sign` "+" shows the sign of a difference."""
    mean, low, high = rate
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
