"""Tables as aligned text, and intervals as their cells."""

from collections.abc import Sequence

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]  # header and rows


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
