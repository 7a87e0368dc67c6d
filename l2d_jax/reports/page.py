"""HTML pages that load no other file: of reports, with tables and the figures as SVG, and of traces; tables as text."""

import html
import re
from collections.abc import Sequence
from pathlib import Path
from string import Template

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows

PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; } h2 { font-size: 1.1rem; margin-top: 2.5rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin-bottom: 1.5rem; }
th, td { padding: .25rem .7rem; text-align: right; white-space: nowrap; border-bottom: 1px solid #7a7a7a50; }
th:first-child, td:first-child, .text { text-align: left; }
svg { width: 100%; min-width: 36rem; height: auto; }
p { max-width: 44rem; }
$style
</style>
<h1>$title</h1>
$body
</html>
""")


def section(title: str, text: str, *parts: Path | Table) -> str:
    """A heading, a paragraph, and below it the figures of files, and tables."""
    shown = (figure(part) if isinstance(part, Path) else html_table(*part) for part in parts)
    return "\n".join([f"<h2>{html.escape(title)}</h2>", f"<p>{html.escape(text)}</p>", *shown])


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls within the page where the page is narrow."""
    is_text = [any(row[column][:1].isalpha() for row in rows) for column in range(len(header))]

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = [' class="text"' if is_left else "" for is_left in is_text]
        inner = (f"<{tag}{kind}>{html.escape(cell)}</{tag}>" for cell, kind in zip(cells, kinds, strict=True))
        return f"<tr>{''.join(inner)}</tr>"

    body = "\n".join([line(header, "th"), *(line(row, "td") for row in rows)])
    return f'<div class="wide"><table>\n{body}\n</table></div>'


def figure(file: Path) -> str:
    """The SVG of a figure that `figures.saved_figure` wrote, with ids that are unique within the page."""
    text = file.with_suffix(".svg").read_text()
    text = text[text.index("<svg") :]
    names = set(re.findall(r'id="([^"]+)"', text))
    for name in sorted(names, key=len, reverse=True):
        text = re.sub(rf'(id="|"#|url\(#){re.escape(name)}(?=["\)])', rf"\g<1>{file.stem}-{name}", text)
    return f'<div class="wide">{text}</div>'


def write_page(file: Path, title: str, sections: Sequence[str], *, style: str = "") -> None:
    """Write a page with these sections; `style` adds rules to its style sheet."""
    text = PAGE.substitute(title=html.escape(title), style=style, body="\n".join(sections))
    file.write_text(text, encoding="utf-8")


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell, aligned on the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in (header, *rows)
    )


def interval(rate: Sequence[float], *, sign: str = "") -> str:
    """The text of a mean with the bounds of its interval; `sign` "+" shows the sign of a difference."""
    mean, low, high = rate
    return f"{mean:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
