"""Where the wall time of a run goes: to its steps, or to waiting for data, saving and validating."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
PARTS = ("data", "save", "validation")  # all other time is that of the steps


class Stopwatch:
    """Counts seconds from its making on, and those of them within each part."""

    def __init__(self) -> None:
        self._began = self._lap = time.perf_counter()
        self._total, self._in_lap = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time within as that of a part."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._add(part, time.perf_counter() - began)

    def waiting(self, items: Iterator[T]) -> Iterator[T]:
        """Hand on items, and count the time that each is waited for as that of the data."""
        while True:
            with self.during("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap, by part and in "step"; they begin anew."""
        now = time.perf_counter()
        seconds = {"step": now - self._lap - sum(self._in_lap.values()), **self._in_lap}
        self._lap, self._in_lap = now, dict.fromkeys(PARTS, 0.0)
        return {f"seconds/{name}": value for name, value in seconds.items()}

    def summary(self) -> str:
        """The share of the steps in the time until now (the goodput), and those of the parts."""
        whole = time.perf_counter() - self._began
        shares = {"steps": whole - sum(self._total.values()), **self._total}
        return f"{whole:.0f} s: " + ", ".join(f"{name} {share / whole:.1%}" for name, share in shares.items())

    def _add(self, part: str, seconds: float) -> None:
        self._total[part] += seconds
        self._in_lap[part] += seconds
