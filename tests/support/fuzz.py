"""Puts damaged files before the readers and judges what comes of each: see `OUTCOMES`."""

import contextlib
import io
import math
import random
import resource
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from l2d_jax.config.config_file import one_line
from l2d_jax.errors import InputError
from tests.support.mutations import Mutation, every_value

OUTCOMES = ("one clear line", "the same values", "declared", "WRONG")
LONGEST_LINE = 300  # characters
SECONDS, MEMORY = 5.0, 2**31  # that one case may take; bytes beyond those in use

Values = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """A kind of file: how a good one is written, damaged and read."""

    write: Callable[[Path], None]  # into an empty folder
    file: str  # the one of them that is damaged
    mutate: Mutation
    read: Callable[[Path], Values]  # by the product's own readers
    declared: Mapping[str, str] = field(default_factory=dict)  # the values that may differ, and why none can tell


def _differs(before: Values, after: Values) -> set[str]:
    return {name for name in before | after if repr(before.get(name)) != repr(after.get(name))}


def _is_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _lost(before: Values, after: Values) -> bool:
    """Whether records are gone and none is new: a line must say so, unless the end of the file was cut off."""
    old, new = ([repr(record) for record in values.get("records", [])] for values in (before, after))
    return bool(Counter(old) - Counter(new)) and not Counter(new) - Counter(old) and new != old[: len(new)]


class _TooSlowError(BaseException):
    pass


@contextlib.contextmanager
def _limits() -> Iterator[None]:
    """End what takes too long or too much memory by an exception, where it is Python that does."""

    def stop(*_: Any) -> None:
        raise _TooSlowError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = resource.getrlimit(resource.RLIMIT_AS)
    old = signal.signal(signal.SIGALRM, stop)
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY, before[1]))
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
        resource.setrlimit(resource.RLIMIT_AS, before)


def judge(kind: Kind, folder: Path, before: Values) -> tuple[str, str]:
    """One of `OUTCOMES` for the file as it now is, and what happened."""
    out, began = io.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stderr(out), contextlib.redirect_stdout(out), _limits():
            after = kind.read(folder)
    except InputError as error:
        line = one_line(error)
        if not line or len(line) > LONGEST_LINE:
            return "WRONG", f"a line of {len(line)} characters: {line[:600]}"
        return "one clear line", line
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        return "WRONG", f"{type(error).__name__}: {one_line(error)[:400]}"
    if time.monotonic() - began > SECONDS:
        return "WRONG", f"{time.monotonic() - began:.1f} s"
    changed, warnings = _differs(before, after), out.getvalue().splitlines()
    if not _is_finite(after):
        return "WRONG", "a value that is not finite"
    if not changed:
        return "the same values", ""
    if changed - kind.declared.keys():
        return "WRONG", f"other {', '.join(sorted(changed - kind.declared.keys()))}"
    if _lost(before, after):
        if not warnings or max(map(len, warnings)) > LONGEST_LINE:
            return "WRONG", f"records are lost, with the lines {warnings!r:.300}"
        return "one clear line", warnings[0]
    return "declared", f"other {', '.join(sorted(changed))}"


def run_all(kind: Kind, folder: Path) -> list[tuple[str, str, str]]:
    """What was done, outcome and what happened, for every value of a JSON file; a line must name it or its folder."""
    kind.write(folder)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    before, damaged, found = kind.read(folder), folder / kind.file, []
    for done, data in every_value(files[damaged]):
        for path, content in files.items():
            if not path.exists() or path.read_bytes() != content:
                path.write_bytes(content)
        damaged.write_bytes(data)
        outcome, text = judge(kind, folder, before)
        if outcome == OUTCOMES[0] and damaged.name not in text and damaged.parent.name not in text:
            outcome, text = "WRONG", f"a line that names neither {damaged.name} nor its folder: {text}"
        found.append((done, outcome, text))
    return found


def run(kind: Kind, folder: Path, *, cases: int, seed: int) -> list[tuple[int, str, str]]:
    """Number, outcome and what happened, of each case."""
    kind.write(folder)
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    before = kind.read(folder)
    found = []
    for case in range(cases):
        for path in folder.rglob("*"):
            if path.is_file() and path not in files:
                path.unlink()
        for path, data in files.items():
            if not path.exists() or path.read_bytes() != data:
                path.write_bytes(data)
        damaged = folder / kind.file
        damaged.write_bytes(kind.mutate(files[damaged], random.Random(f"{seed} {kind.file} {case}")))
        found.append((case, *judge(kind, folder, before)))
    return found
