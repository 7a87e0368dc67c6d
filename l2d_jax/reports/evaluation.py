"""Reports of evaluations: finished evaluations, and a table of their accuracy and cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from typing_extensions import TypedDict

from l2d_jax.errors import InputError
from l2d_jax.evaluation.results import KINDS, RESULTS, accuracy_interval, read_figures
from l2d_jax.files import NotNegative, Positive, Share, check, read_json
from l2d_jax.reports.page import Table, interval

WITHIN = "within.json"  # file in a task's folder, written by `sweep`: accuracy by t within a diffusion
COSTS = {"evaluations per token": "evaluations", "passes per token": "passes"}  # in results; in the table
BESIDE_COUNTS = ("trained parameters", "evaluations per token")  # numbers that rows of others may have
HEADER = ("task", "evaluation", *KINDS, "pass@10", *COSTS, "problems")


class _Within(TypedDict):
    t: list[Share]
    greedy: list[Share]
    expected: list[Share]
    evaluations: NotRequired[list[Positive]]
    solver: NotRequired[str]


class Evaluation(NamedTuple):
    """A finished evaluation."""

    task: str
    name: str  # name of its folder
    budget: int  # evaluations of the path per token
    run: Mapping[str, Any]  # settings
    figures: Mapping[str, Any]  # results


def collect(folder: Path) -> list[Evaluation]:
    """The finished evaluations in an `eval` folder, sorted by task, solver and budget.

    Raises `InputError` for a damaged file.
    """
    evaluations = []
    for file in sorted(folder.glob(f"*/*/{RESULTS}")):
        if found := read_figures(file):
            run, name = found["run"], file.parent.name
            evaluations.append(Evaluation(run["task"], name, int(run["decode"]["budget"]), run, found))
    return sorted(evaluations, key=lambda one: (one.task, one.run["decode"]["solver"], one.budget, one.name))


def collect_within(folder: Path) -> dict[str, dict[str, Any]]:
    """What `sweep` measured within a diffusion, keyed by task; raises `InputError` for a damaged file."""
    remedy, found = "remove it, and give the same command of sweep again", {}
    for file in sorted(folder.glob(f"*/{WITHIN}")):
        within = found[file.parent.name] = check(read_json(file), _Within, file, remedy=remedy)
        if not len(within["t"]) == len(within["greedy"]) == len(within["expected"]):
            raise InputError(f"{file}: t, greedy and expected must have as many values each: {remedy}")
    return found


def read_beside(file: Path | None) -> dict[str, dict[str, float]]:
    """Read rows of others: a JSON object of labels, each with accuracies (0 to 1); raises `InputError`.

    The keys of a row are tasks, categories of the suites, "mean", and `BESIDE_COUNTS`. `null`: not known.
    """
    rows, remedy = {} if file is None else read_json(file), "give each label its accuracies from 0 to 1, by task"
    found: dict[str, dict[str, float | None]] = check(rows, dict[str, dict[str, float | None]], file, remedy=remedy)
    known = {label: {key: value for key, value in row.items() if value is not None} for label, row in found.items()}
    shares = {label: {key: row[key] for key in row if key not in BESIDE_COUNTS} for label, row in known.items()}
    check(shares, dict[str, dict[str, Share]], file, remedy=remedy)
    counts = {label: {key: row[key] for key in row if key in BESIDE_COUNTS} for label, row in known.items()}
    check(counts, dict[str, dict[str, NotNegative]], file, remedy="give counts of 0 or more")
    return known


def task_rows(evaluations: Sequence[Evaluation], beside: Mapping[str, Mapping[str, float]]) -> Table:
    """A table of accuracy with 95 % intervals, and of what a token costs.

    Rows of `beside` come last in each task, and empty columns are dropped.
    """
    rows: list[tuple[str, ...]] = []
    for task in dict.fromkeys(one.task for one in evaluations):
        for one in evaluations:
            if one.task == task:
                shown = [interval(accuracy_interval(one.figures, kind)) for kind in KINDS]
                passed = one.figures["strict"]["pass"].get("10")
                at_ten = "" if passed is None else f"{passed['mean']:.3f}"
                costs = [_cost(one.figures.get(name)) for name in COSTS]
                rows.append((task, one.name, *shown, at_ten, *costs, str(one.figures["problems"])))
        none = [""] * (len(HEADER) - 3)
        rows += [(task, label, f"{row[task]:.3f}", *none) for label, row in beside.items() if task in row]
    header, *filled = zip(*(column for column in zip(HEADER, *rows, strict=True) if any(column[1:])), strict=True)
    return header, filled


def _cost(count: float | None) -> str:
    """A mean count per token; empty where no token was generated, or an earlier version did not count."""
    return "" if count is None else f"{count:.2f}"
