"""Where the time of a run goes: stopwatches for its start and its parts, and traces of `config.profile.steps`.

Each host writes `<workdir>/profile/plugins/profile/steps_10_12/<host>.xplane.pb`, where the profile plugin looks:
`tensorboard --logdir <workdir>/profile`.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import jax

from l2d_jax.config.schema import ProfileConfig
from l2d_jax.distributed import processes
from l2d_jax.errors import require

T = TypeVar("T")
PARTS = ("data", "save", "validation")  # parts of a run's time; the rest belongs to the steps
Step: TypeAlias = Callable[..., tuple[Any, Any]]  # (state, ...) -> (state, metrics), as `step.make_step` makes it


def check_steps(config: ProfileConfig, steps: int) -> None:
    """Raise `InputError` if a traced step is after the run's last step."""
    problem = f"config.profile.steps {config.steps} goes beyond the run's {steps} steps"
    require(config.steps is None or _traced(config.steps)[-1] <= steps, f"{problem}: choose earlier ones")


def trace_steps(run_step: Step, config: ProfileConfig, workdir: Path, *, start: int) -> Step:
    """Wrap `run_step` so that it traces the steps of `config`, unless the first of them compiles or is over.

    Steps are counted from `start`, after which the run continues.
    """
    if config.steps is None:
        return run_step
    traced = _traced(config.steps)
    if traced[0] <= start + 1:
        first = f"step {start + 2} is the first that can be traced from here"
        processes.print_once(f"no trace of the steps {config.steps}: {first}")
        return run_step
    numbers = count(start + 1)
    options = jax.profiler.ProfileOptions()
    options.session_id = f"steps_{traced[0]}_{traced[-1]}"  # one folder for all hosts, whatever their clocks say
    options.python_tracer_level = 0  # millions of Python calls would slow and hide the rest

    def run(*arguments: Any) -> tuple[Any, Any]:
        step = next(numbers)
        if step == traced[0]:
            jax.block_until_ready(arguments)  # earlier steps may still be running
            jax.profiler.start_trace(workdir / "profile", profiler_options=options)
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            results = run_step(*arguments)
        if step == traced[-1]:
            jax.block_until_ready(results)
            jax.profiler.stop_trace()
            shown = f"tensorboard --logdir {workdir / 'profile'}"
            processes.print_once(f"trace of steps {traced[0]} to {traced[-1]}: {shown}")
        return results

    return run


def _traced(steps: str) -> range:
    return range(*map(int, steps.split(":")))


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
