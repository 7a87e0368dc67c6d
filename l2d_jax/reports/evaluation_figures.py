"""Figures of evaluations: accuracy against budget, end of the diffusion, t and guidance strength."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from l2d_jax import statistics
from l2d_jax.evaluation.results import KINDS, accuracy_interval
from l2d_jax.files import package_table
from l2d_jax.reports.evaluation import Evaluation
from l2d_jax.reports.figures import draw_rates, saved_figure

TASK_TABLE, GENERAL = "evaluation/tasks/tasks.toml", "general_qa"  # the table of tasks, and a task's usual category
CATEGORY_NAMES = {"math": "Mathematics", "coding": "Coding", GENERAL: "General knowledge"}  # the paper's names

Rate = tuple[float, float, float]  # an accuracy and the bounds of its interval
Series = dict[tuple[str, str], dict[int | float, Evaluation]]  # [task, protocol][point]
Lines = dict[tuple[str, str], dict[int | float, Rate]]  # [task or category, protocol][point]


def draw_budgets(evaluations: Sequence[Evaluation], file: Path) -> bool:
    """Draw accuracy against the budget, with a line for each task and protocol; False if nothing has two budgets."""
    series: Series = {}
    for one in evaluations:
        series.setdefault((one.task, one.name.replace(f"-{one.budget}", "", 1)), {})[one.budget] = one
    lines = [(f"{kind} accuracy", _rates(series, kind)) for kind in KINDS]
    return _draw_lines(lines, "evaluations of the path per token (budget)", file, is_even=True)


def draw_ends(evaluations: Sequence[Evaluation], file: Path) -> bool:
    """Draw accuracy of free answers against the t at which the ODE stops; False if nothing stops at two.

    A budget of 1 under the same protocol, which is the language model alone, is the point at t = 0.
    """
    series: Series = {}
    for one in evaluations:
        end = one.run["decode"].get("end", 1.0)
        series.setdefault((one.task, one.name.replace(f"-end_{end:g}", "", 1)), {})[end] = one
    series = {key: line for key, line in series.items() if len(line) > 1}
    plain = {(one.task, one.name): one for one in evaluations if one.budget == 1}
    for (task, protocol), line in series.items():
        budget = next(iter(line.values())).budget
        if (alone := plain.get((task, protocol.replace(f"-{budget}", "-1", 1)))) is not None:
            line[0.0] = alone
    lines = [(f"{kind} accuracy of free answers", _rates(series, kind)) for kind in KINDS]
    return _draw_lines(lines, "t at which the diffusion stops (0: the language model)", file)


def draw_guidance(evaluations: Sequence[Evaluation], file: Path) -> bool:
    """Draw accuracy against guidance strength, by task and by category; False if no task has two strengths.

    Evaluations by search, and those that chose options on held-out problems, are not points of these lines.
    """
    series: Series = {}
    for one in evaluations:
        if one.run["asking"]["label"] is not None and one.run.keys().isdisjoint(("search", "tune")):
            strength = one.run["decode"]["guidance"]
            protocol = re.sub(rf"(-label[^-]*)-{strength:g}(?=-|$)", r"\1", one.name)
            series.setdefault((one.task, "" if protocol == one.name else protocol), {})[strength] = one
    rates = _rates(series, "strict")
    lines = [("strict accuracy, by task", rates), ("strict accuracy, by category", _category_means(rates))]
    return _draw_lines(lines, "strength of guidance w", file)


def _rates(series: Series, kind: str) -> Lines:
    """The accuracy at each point of each series."""
    return {
        key: {point: accuracy_interval(one.figures, kind) for point, one in line.items()}
        for key, line in series.items()
    }


def _category_means(lines: Lines) -> Lines:
    """For each category of tasks, the mean of its tasks at the points that all of them have."""
    categories = {name: entry.get("category", GENERAL) for name, entry in package_table(TASK_TABLE).items()}
    groups: dict[tuple[str, str], list[tuple[str, dict[int | float, Rate]]]] = {}
    for (task, protocol), line in lines.items():
        if task in categories:
            groups.setdefault((CATEGORY_NAMES[categories[task]], protocol), []).append((task, line))
    means: Lines = {}
    for (category, protocol), members in groups.items():
        points = set.intersection(*(set(line) for _, line in members))
        name = f"{category} ({', '.join(task for task, _ in members)})"
        means[name, protocol] = {point: _mean([line[point] for _, line in members]) for point in sorted(points)}
    return means


def _mean(rates: Sequence[Rate]) -> Rate:
    """The mean of independent rates, with its interval, as in the table of a suite."""
    return statistics.mean_of_rates([statistics.Rate(*rate, problems=0) for rate in rates])[:3]


def _draw_lines(panels: Sequence[tuple[str, Lines]], xlabel: str, file: Path, *, is_even: bool = False) -> bool:
    """Draw a panel for each label of an axis, with a line for each series of at least two points.

    Returns False if there is no line. Points are evenly spaced if `is_even`. A protocol that all lines share is the
    title.
    """
    drawn = [(ylabel, {key: line for key, line in lines.items() if len(line) > 1}) for ylabel, lines in panels]
    drawn = [(ylabel, lines) for ylabel, lines in drawn if lines]
    points = sorted({point for _, lines in drawn for line in lines.values() for point in line})
    if not drawn:
        return False
    protocols = {protocol for _, lines in drawn for _, protocol in lines}
    title = protocols.pop() if len(protocols) == 1 else ""
    with saved_figure(len(drawn), file) as axes:
        for panel, (ylabel, lines) in zip(axes, drawn, strict=True):
            for key, line in lines.items():
                places = [points.index(point) if is_even else point for point in sorted(line)]
                label = ", ".join(part for part in key if part and part != title)
                draw_rates(panel, places, [line[point] for point in sorted(line)], label=label)
            if is_even:
                panel.set_xticks(range(len(points)), [str(point) for point in points])
            panel.set(xlabel=xlabel, ylabel=ylabel, ylim=(0, None), title=title)
    return True


def draw_within(within: Mapping[str, Mapping[str, Any]], file: Path) -> bool:
    """Draw accuracy on right answers against t, and an adaptive solver's evaluations by task; False without data."""
    if not within:
        return False
    with saved_figure(2, file) as [left, right]:
        for number, (task, measured) in enumerate(within.items()):
            left.plot(measured["t"], measured["greedy"], marker="o", color=f"C{number}", label=task)
            left.plot(measured["t"], measured["expected"], marker=".", linestyle="--", color=f"C{number}")
        left.set(xlabel="t within one diffusion", ylabel="accuracy, teacher-forced", ylim=(0, 1))
        left.set_title("solid: greedy, dashed: expected")
        counts = {task: measured["evaluations"] for task, measured in within.items() if measured.get("evaluations")}
        if counts:
            right.boxplot(list(counts.values()), tick_labels=list(counts), showmeans=True)
        solver = next((measured["solver"] for measured in within.values() if "solver" in measured), "adaptive solver")
        right.tick_params(axis="x", rotation=30 if len(counts) > 6 else 0)
        right.set(xlabel="task", ylabel=f"evaluations per token, {solver}", ylim=(0, None))
    return True
