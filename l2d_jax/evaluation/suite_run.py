"""Answers a suite: the first problems of each task, an estimate of the time that the others take, then the others.

The estimate is measured on this machine: it is the time of the first problems, without tracing and compilation, times
the number of problems left. So it knows how long answers are, and what judging them takes. It is somewhat too long for
tasks with few first problems, at whose end some lanes are empty.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.evaluation.plan import TaskPlan
from l2d_jax.evaluation.results import RESULTS, Results, read_figures
from l2d_jax.evaluation.runner import evaluate_plan
from l2d_jax.evaluation.tasks.problem import Run
from l2d_jax.performance.timing import run_seconds

FEWEST = 4  # first problems of a task, if a batch holds fewer with all their samples
BAR = "{desc}: {percentage:3.0f}%|{bar}| {elapsed} so far, about {remaining} left{postfix}"


class PlanWork(NamedTuple):
    """A plan, and how to open its results, which only process 0 does."""

    plan: TaskPlan
    name: str  # of the folder of its results
    open_results: Callable[[], Results]

    @property
    def title(self) -> str:
        """The name of the task and of the folder, such as "gsm8k midpoint-15"."""
        return f"{self.plan.task.name} {self.name}"

    @property
    def whole(self) -> int:
        """The number of problems that the paper scores; where it is not known, those of the paper's split."""
        task = self.plan.task
        rows = task.rows[task.split] if task.size is None else task.size
        return rows if task.papers is None else task.papers

    @property
    def first(self) -> int:
        """The number of problems that are answered before the estimate: a batch of them."""
        return max(self.plan.protocol.batch_size // self.plan.protocol.samples, FEWEST)

    def remaining(self) -> tuple[int, bool]:
        """The number of problems without an answer, and whether figures of all problems have been written."""

        def look() -> list[int]:
            results = self.open_results()
            left = sum(one.problem.id not in results.samples for one in self.plan.problems)
            figures = read_figures(results.folder / RESULTS)
            return [left, figures is not None and figures["problems"] == len(self.plan.problems)]

        left, is_written = processes.decide(look)
        return int(left), left == 0 and bool(is_written)


class Measured(NamedTuple):
    """What the first problems of a plan have taken."""

    work: PlanWork
    left: int  # problems without an answer
    speed: dict[str, Any] | None  # as `evaluate_plan` returns it; None if nothing could be measured
    pace: float  # seconds a problem, without compilation; 0 if not measured


@dataclass(frozen=True)
class _Share:
    """Shows the progress of one plan on the bar of the suite, whose unit is a second of the estimate."""

    bar: Any
    pace: float

    def __enter__(self) -> "_Share":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, problems: int) -> None:
        """Count finished problems."""
        self.bar.update(problems * self.pace)

    def set_postfix_str(self, text: str) -> None:
        """Show a text behind the bar."""
        self.bar.set_postfix_str(text)


def answer_suite(
    loaded: LoadedModel,
    works: Sequence[PlanWork],
    show: Callable[[TaskPlan, dict[str, Any]], None],
    *,
    run: Run | None = None,
) -> list[InputError]:
    """Answer and score all problems of all plans; `show` gets each finished plan with its figures.

    A plan that is finished is left alone. If a plan raises `InputError`, as for logits that are not numbers, the others
    are still answered. Returns these errors.
    """
    failures: list[InputError] = []
    processes.print_once("the first problems of each task, whose time without compilation gives the estimate:")
    measured = [first for work in works if (first := _begin(loaded, work, run=run, failures=failures)) is not None]
    total = sum(one.left * one.pace for one in measured)
    whole = sum(one.work.whole * one.pace for one in measured)
    if measured:
        rest = f"about {duration(total)} left"
        processes.print_once(f"{rest}; the paper's whole splits would take about {duration(whole)}")
    with processes.progress_bar(total, "suite", bar_format=BAR) as bar:
        for done, one in enumerate(measured):
            bar.set_description(f"{one.work.title}, {done + 1} of {len(measured)}")
            share = _Share(bar, one.pace)
            plan, speed = one.work.plan, one.speed
            try:
                figures = evaluate_plan(loaded, plan, one.work.open_results, run=run, spent=speed, bar=share)
            except InputError as error:
                failures.append(error)
                continue
            bar.clear()
            show(plan, figures)
    return failures


def _begin(loaded: LoadedModel, work: PlanWork, *, run: Run | None, failures: list[InputError]) -> Measured | None:
    """Answer the first problems of a plan that have no answer yet; None if it is finished."""
    left, is_finished = work.remaining()
    if is_finished:
        processes.print_once(f"  {work.title}: finished before")
        return None
    if left == 0:
        return Measured(work, 0, None, 0.0)
    try:
        with run_seconds() as seconds:
            figures = evaluate_plan(loaded, work.plan, work.open_results, run=run, most=work.first)
    except InputError as error:
        failures.append(error)
        return Measured(work, work.remaining()[0], None, 0.0)
    speed: dict[str, Any] = figures["speed"]
    measured = Measured(work, left - int(speed["problems"]), speed, seconds[0] / speed["problems"])
    processes.print_once(_pace_line(measured))
    return measured


def _pace_line(one: Measured) -> str:
    """What the first problems of a plan took, and what the others and the paper's whole split will take."""
    assert one.speed is not None
    whole = one.work.whole
    rate = f"{one.speed['problems']} problems took {one.pace:.2f} s each"
    left = f"{one.left} are left, about {duration(one.left * one.pace)}"
    return f"  {one.work.title}: {rate}; {left}; the paper's {whole} would take {duration(whole * one.pace)}"


def duration(seconds: float | int) -> str:
    """A time in the unit that suits it.

    >>> duration(42.4), duration(600), duration(12_000)
    ('42 s', '10 min', '3 h 20 min')
    """
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 100 else f"{minutes // 60} h {minutes % 60} min"
