"""Where the time of a run goes: its start and its parts."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
PARTS = ("data", "save", "validation")  # parts of a run's time; the rest belongs to the steps


class StartWatch:
    """Counts the seconds from its creation to the first step, divided into parts."""

    def __init__(self) -> None:
        self._last, self._seconds = time.perf_counter(), dict[str, float]()

    def ended(self, part: str) -> None:
        """Count the time since the end of the previous part as that of `part`."""
        now = time.perf_counter()
        self._last, self._seconds[part] = now, now - self._last

    def summary(self) -> str:
        """The seconds until now and those of each part, as text."""
        parts = ", ".join(f"{part} {seconds:.1f}" for part, seconds in self._seconds.items())
        return f"first step after {sum(self._seconds.values()):.1f} s: {parts}"


class Stopwatch:
    """Counts the seconds since its creation, and how many of them belong to each part."""

    def __init__(self) -> None:
        self._began = self._lap = time.perf_counter()
        self._total, self._in_lap = dict.fromkeys(PARTS, 0.0), dict.fromkeys(PARTS, 0.0)

    @contextmanager
    def during(self, part: str) -> Iterator[None]:
        """Count the time within this context as that of `part`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            seconds = time.perf_counter() - began
            self._total[part] += seconds
            self._in_lap[part] += seconds

    def waiting(self, items: Iterator[T]) -> Iterator[T]:
        """Yield the items, and count the time spent waiting for each as that of the part "data"."""
        while True:
            with self.during("data"):
                item = next(items, None)
            if item is None:
                return
            yield item

    def lap(self) -> dict[str, float]:
        """The seconds since the last lap, by part and for "step"; then start counting from zero."""
        now = time.perf_counter()
        seconds = {"step": now - self._lap - sum(self._in_lap.values()), **self._in_lap}
        self._lap, self._in_lap = now, dict.fromkeys(PARTS, 0.0)
        return {f"seconds/{name}": value for name, value in seconds.items()}

    def summary(self) -> str:
        """The share of time spent in steps (the goodput), and in each part, as text."""
        whole = time.perf_counter() - self._began
        shares = {"steps": whole - sum(self._total.values()), **self._total}
        return f"{whole:.0f} s: " + ", ".join(f"{name} {share / whole:.1%}" for name, share in shares.items())
