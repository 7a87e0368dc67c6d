"""Rows of the table of a device check, written as they are found: a part that is ended early keeps its first rows."""

import json
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

OK, FAILED, LEFT_OUT, MEASURED = "ok", "FAILED", "left out", "measured"  # statuses of a row
REFUSED = "no GPU"  # what the first part says in place of versions
LONGEST = {"what": 54, "result": 64, "beside": 104}  # characters of a column; what is longer is cut


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    part: str
    what: str
    result: str
    beside: str = ""  # what the result is divided by or compared with
    status: str = MEASURED
    figures: dict[str, Any] = field(default_factory=dict)  # the numbers of the result, for programs


@dataclass(frozen=True)
class Rows:
    """The rows of a part, which go to a file, one JSON object a line."""

    part: str
    file: Path

    def add(self, what: str, result: str, beside: str = "", *, status: str = MEASURED, **figures: Any) -> None:
        """Append a row."""
        line = json.dumps(asdict(Row(self.part, what, result, beside, status, figures)))
        with self.file.open("a") as file:
            file.write(line + "\n")

    def judge(self, what: str, value: float, bound: float, *, unit: str = "", beside: str) -> None:
        """Append the row of a value that must not exceed its bound; NaN exceeds every bound."""
        status = OK if value <= bound else FAILED
        text = f"{value:.3g}{unit}, at most {bound:.3g}{unit}"
        self.add(what, text, beside, status=status, value=value, bound=bound)

    @contextmanager
    def guard(self, what: str) -> Iterator[None]:
        """Turn an exception of the block into a failed row; the log has where it was raised."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(what, one_line(error), status=FAILED)


def one_line(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def read_rows(file: Path) -> list[Row]:
    """The rows of a file; none if it is not there. A last line that was cut off is left out."""
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def render(rows: Sequence[Row]) -> str:
    """The table as text, with a line of dashes before each part."""
    names = ("part", "what", "result", "status", "divided by, or compared with")
    cells = [names]
    for row in rows:
        what, result, beside = _cut(row)
        cells.append((row.part, what, result, row.status, beside))
    widths = [max(len(cell[column]) for cell in cells) for column in range(len(names))]
    lines, before = list[str](), ""
    for cell in cells:
        if cell[0] != before and lines:
            lines.append("-" * (sum(widths) + 2 * len(widths) - 2))
        shown = ("" if cell[0] == before else cell[0], *cell[1:])
        lines.append("  ".join(f"{text:<{width}}" for text, width in zip(shown, widths, strict=True)).rstrip())
        before = cell[0]
    return "\n".join(lines)


def _cut(row: Row) -> Iterable[str]:
    for name, length in LONGEST.items():
        text = " ".join(getattr(row, name).split())
        yield text if len(text) <= length else text[: length - 4] + " ..."
