"""What evaluations have found: a table, and figures of accuracy against the budget, t and the strength of guidance."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from l2d_jax.errors import InputError
from l2d_jax.evaluation.results import KINDS, RESULTS, accuracy_interval
from l2d_jax.files import read_json
from l2d_jax.reports.figures import draw_rates, new_figure, save_figure
from l2d_jax.reports.tables import Table, interval

WITHIN = "within.json"  # of a task's folder: what happens within one diffusion (`sweep` writes it)


class Evaluation(NamedTuple):
    """One finished evaluation."""

    task: str
    name: str  # of its folder
    run: Mapping[str, Any]  # how it was done
    figures: Mapping[str, Any]  # what was found

    @property
    def budget(self) -> int:
        """Evaluations of the path per token."""
        return int(self.run["decode"]["budget"])

    def rate(self, kind: str) -> tuple[float, float, float]:
        """The mean with the bounds of its interval."""
        return accuracy_interval(self.figures, kind)


def collect(folder: Path) -> list[Evaluation]:
    """The finished evaluations below an `eval` folder, by task, solver and budget."""
    found = []
    for file in sorted(folder.glob(f"*/*/{RESULTS}")):
        figures = read_json(file)
        if "problems" in figures:
            found.append(Evaluation(figures["run"]["task"], file.parent.name, figures["run"], figures))
    return sorted(found, key=lambda one: (one.task, one.run["decode"]["solver"], one.budget, one.name))


def collect_within(folder: Path) -> dict[str, dict[str, Any]]:
    """What happens within one diffusion, by task."""
    return {file.parent.name: read_json(file) for file in sorted(folder.glob(f"*/{WITHIN}"))}


def read_beside(file: Path | None) -> dict[str, dict[str, float]]:
    """Rows of others, such as the paper's: a JSON object of labels, each with a share from 0 to 1 by task."""
    rows = {} if file is None else read_json(file)
    for label, row in rows.items():
        if not isinstance(row, dict) or not all(isinstance(v, int | float) and 0 <= v <= 1 for v in row.values()):
            raise InputError(f"{file}: {label!r} must have a share from 0 to 1 for each task, got {row!r:.80}")
    return rows


HEADER = ("task", "evaluation", *KINDS, "pass@10", "problems")


def task_rows(evaluations: Sequence[Evaluation], beside: Mapping[str, Mapping[str, float]]) -> Table:
    """Header and rows of accuracy with 95 % intervals, without columns that no row fills.

    `beside` comes after the evaluations of each task, labelled.
    """
    rows: list[tuple[str, ...]] = []
    for task in dict.fromkeys(one.task for one in evaluations):
        for one in evaluations:
            if one.task == task:
                shown = [interval(one.rate(kind)) for kind in KINDS]
                passed = one.figures["strict"]["pass"].get("10")
                at_ten = "" if passed is None else f"{passed['mean']:.3f}"
                rows.append((task, one.name, *shown, at_ten, str(one.figures["problems"])))
        rows += [(task, label, f"{row[task]:.3f}", "", "", "") for label, row in beside.items() if task in row]
    header, *filled = zip(*(column for column in zip(HEADER, *rows, strict=True) if any(column[1:])), strict=True)
    return header, filled


def draw_budgets(evaluations: Sequence[Evaluation], file: Path) -> bool:
    """Accuracy against the budget, a line for each task and way of asking; whether there was anything to draw."""
    series: dict[tuple[str, str], dict[int, Evaluation]] = {}
    for one in evaluations:
        own = one.name.replace(f"-{one.budget}", "", 1)
        series.setdefault((one.task, own), {})[one.budget] = one
    lines = {key: line for key, line in series.items() if len(line) > 1}
    if not lines:
        return False
    budgets = sorted({budget for line in lines.values() for budget in line})
    figure, panels = new_figure(len(KINDS))
    for axes, kind in zip(panels, KINDS, strict=True):
        for (task, own), line in lines.items():
            places = [budgets.index(budget) for budget in sorted(line)]
            rates = [line[budget].rate(kind) for budget in sorted(line)]
            draw_rates(axes, places, rates, label=f"{task}, {own}")
        axes.set_xticks(range(len(budgets)), [str(budget) for budget in budgets])
        axes.set(xlabel="evaluations of the path per token", ylabel=f"{kind} accuracy", ylim=(0, None))
        axes.legend()
    save_figure(figure, file)
    return True


def draw_within(within: Mapping[str, Mapping[str, Any]], file: Path) -> bool:
    """Accuracy of right answers' tokens against t in one run, and an adaptive solver's evaluations by task."""
    if not within:
        return False
    figure, [left, right] = new_figure(2)
    for task, found in within.items():
        left.plot(found["t"], found["greedy"], marker="o", label=f"{task}, greedy")
        left.plot(found["t"], found["expected"], marker=".", linestyle="--", label=f"{task}, expected")
    left.set(xlabel="t within one diffusion", ylabel="accuracy on right answers", ylim=(0, 1))
    left.legend()
    counts = {task: found["evaluations"] for task, found in within.items() if found.get("evaluations")}
    if counts:
        right.boxplot(list(counts.values()), tick_labels=list(counts), showmeans=True)
    solver = next((found["solver"] for found in within.values() if "solver" in found), "adaptive solver")
    right.set(ylabel=f"evaluations per token, {solver}", ylim=(0, None))
    save_figure(figure, file)
    return True


def draw_guidance(evaluations: Sequence[Evaluation], file: Path) -> bool:
    """Accuracy against the strength of guidance, of evaluations with a label."""
    series: dict[str, dict[float, Evaluation]] = {}
    for one in evaluations:
        if one.run["asking"]["label"] is not None:
            series.setdefault(one.task, {})[one.run["decode"]["guidance"]] = one
    lines = {task: line for task, line in series.items() if len(line) > 1}
    if not lines:
        return False
    figure, [axes] = new_figure(1)
    for task, line in lines.items():
        strengths = sorted(line)
        draw_rates(axes, strengths, [line[strength].rate("strict") for strength in strengths], label=task)
    axes.set(xlabel="strength of guidance", ylabel="strict accuracy", ylim=(0, None))
    axes.legend()
    save_figure(figure, file)
    return True
