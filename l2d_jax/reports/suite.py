"""The table of a suite: scores of tasks, means of the paper's categories with 95 % intervals, and costs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from typing_extensions import TypedDict

from l2d_jax.config.ranges import CountOrZero
from l2d_jax.evaluation.suite import SUITE, averages, complete_averages, suite_scores, task_categories
from l2d_jax.files import check, read_json, write_whole
from l2d_jax.reports.evaluation import BESIDE_COUNTS, Evaluation, collect
from l2d_jax.reports.page import Section, Table, interval
from l2d_jax.statistics import Rate
from l2d_jax.storage import mirror

TRAINED, EVALUATIONS = BESIDE_COUNTS
COUNTS = {TRAINED: "trained", EVALUATIONS: "evaluations", "passes per token": "passes", "seconds": "seconds"}
TITLE = "The paper's tasks"
TEXT = (
    "Strict scores with 95 % intervals. The score of programs is pass@1, estimated from all samples of a problem. A "
    "mean gives each task the same weight. The last mean is over the six tasks of the paper's main table. Evaluations "
    "and passes are per token, averaged over tasks. Seconds are for all problems, at the rate of the run that finished "
    "a task. Trained parameters are those that an answer uses: none at a budget of 1."
)


class SuiteRow(NamedTuple):
    """The evaluations of one name in a results folder."""

    model: str  # name of the workdir or folder
    evaluation: str  # name of the evaluations' folders, such as "midpoint-15"
    scores: Mapping[str, Rate]  # of tasks, categories and "mean"
    counts: Mapping[str, float | int | None]  # by the keys of COUNTS; None: not known
    pass_at_10: Mapping[str, float]  # of the tasks that have ten samples of each problem


_Suite = TypedDict("_Suite", {"trained parameters": dict[str, CountOrZero | None]})


def suite_rows(folder: Path, model: str, *, trained: Mapping[str, int | None] | None = None) -> list[SuiteRow]:
    """The rows of a results folder: one for each name of evaluations with at least one complete category.

    `trained` is the number of trained parameters that each name uses; None: the numbers in `suite.json`. Raises
    `InputError` for a damaged file.
    """
    trained = _read_trained(folder / SUITE) if trained is None else trained
    order = [task for tasks in task_categories().values() for task in tasks]
    named: dict[str, list[Evaluation]] = {}
    for one in collect(folder):
        if one.task in order:
            named.setdefault(one.name, []).append(one)
    rows = []
    for name, found in named.items():
        tasks = sorted(found, key=lambda one: order.index(one.task))
        scores = suite_scores({one.task: Rate(**one.figures["strict"]["accuracy"]) for one in tasks})
        if len(scores) == len(tasks):  # no mean
            continue
        counts = {kind: _mean([one.figures.get(kind) for one in tasks]) for kind in (EVALUATIONS, "passes per token")}
        seconds = [_seconds(one.figures) for one in tasks]
        total = None if None in seconds else sum(filter(None, seconds))
        passed = {one.task: one.figures["strict"]["pass"].get("10") for one in tasks}
        at_ten = {task: float(rate["mean"]) for task, rate in passed.items() if rate is not None}
        rows.append(SuiteRow(model, name, scores, {TRAINED: trained.get(name), **counts, "seconds": total}, at_ten))
    return rows


def write_suite(folder: Path, model: str, suite: str, trained: Mapping[str, int | None]) -> list[SuiteRow]:
    """Write the table of a results folder as `suite.json`, and return its rows.

    `trained` is the number of trained parameters that each name of evaluations uses. Numbers of earlier commands stay.
    """
    known = _read_trained(folder / SUITE) | dict(trained)
    file, rows = folder / SUITE, suite_rows(folder, model, trained=known)
    listed = [
        {"model": row.model, "evaluation": row.evaluation, **row.counts}
        | {"scores": {name: rate._asdict() for name, rate in row.scores.items()}, "pass@10": row.pass_at_10}
        for row in rows
    ]
    write_whole(file, json.dumps({"suite": suite, TRAINED: known, "rows": listed}, indent=2) + "\n")
    mirror.publish(file)
    return rows


def suite_section(rows: Sequence[SuiteRow], beside: Mapping[str, Mapping[str, float]]) -> Section | None:
    """The section with two tables, of means and costs and of tasks; None if there is no row.

    Rows of `beside` come last. Their means come from the file, or else from their tasks.
    """
    if not rows:
        return None
    means = [*averages()]
    evaluated = {name for row in rows for name in row.scores}
    tasks = [task for category in task_categories().values() for task in category if task in evaluated]
    others = {label: _with_means(row) for label, row in beside.items()}
    tables = []
    for names, counts in ((means, COUNTS), (tasks, {})):
        header = ("model", "evaluation", *names, *counts.values())
        lines = [_line(row, names, counts) for row in rows]
        for label, row in others.items():
            scores = [f"{row[name]:.3f}" if name in row else "" for name in names]
            if any(scores):
                lines.append((label, "", *scores, *(_count(kind, row.get(kind)) for kind in counts)))
        tables.append(_filled(header, lines))
    return Section(TITLE, TEXT, [], tables)


def _line(row: SuiteRow, names: Sequence[str], counts: Mapping[str, str]) -> tuple[str, ...]:
    scores = [interval(row.scores[name][:3]) if name in row.scores else "" for name in names]
    return (row.model, row.evaluation, *scores, *(_count(kind, row.counts.get(kind)) for kind in counts))


def _filled(header: tuple[str, ...], lines: list[tuple[str, ...]]) -> Table:
    """A table without its empty columns."""
    columns = [column for column in zip(header, *lines, strict=True) if any(column[1:])]
    first, *rest = zip(*columns, strict=True)
    return first, rest


def _with_means(row: Mapping[str, float]) -> dict[str, float]:
    """A row of others with the means that follow from its tasks, where it gives none."""
    means = complete_averages(row)
    return {name: sum(row[task] for task in tasks) / len(tasks) for name, tasks in means.items()} | dict(row)


def _count(kind: str, count: float | int | None) -> str:
    if count is None:
        return ""
    return f"{count:,.0f}" if kind in (TRAINED, "seconds") else f"{count:.2f}"


def _mean(counts: Sequence[float | None]) -> float | None:
    """The mean of the counts that are known, or None."""
    known = [count for count in counts if count is not None]
    return sum(known) / len(known) if known else None


def _seconds(figures: Mapping[str, Any]) -> float | None:
    """The seconds of all problems of an evaluation, at the rate of its last run; None if that answered none."""
    speed = figures.get("speed") or {}
    answered = speed.get("problems") or 0
    return float(speed["seconds"]) / answered * figures["problems"] if answered else None


def _read_trained(file: Path) -> dict[str, int | None]:
    if not file.exists():
        return {}
    found = check(read_json(file), _Suite, file, remedy="remove it, and give the command of evaluate again")
    return dict(found[TRAINED])
