"""How models compare on the same held-out answers: tables, a figure and a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from l2d_jax.reports import page
from l2d_jax.reports.figures import draw_rates, new_figure, save_figure
from l2d_jax.reports.tables import interval, text_table
from l2d_jax.training.bootstrap import Tally

MEASURES = {"loss": "nats per token", "expected": "expected accuracy", "greedy": "greedy accuracy"}
HEADER = ("model", "trained", "solver", "evaluations", *MEASURES, "greedy, gain")
MODELS = "Teacher-forced, on held-out answers; 95 % intervals over examples. Gains are over the first model, paired."
DIFFERENCES = "Greedy accuracy of the row less that of the column, each at the largest budget of its first solver."
Found = Mapping[str, Mapping[str, Any]]  # by the name of the model, as `study` writes it


def report_study(folder: Path, found: Found) -> None:
    """Print the tables, and write them with the figure as a page."""
    tally = Tally.join({name: one["tally"] for name, one in found.items()})
    rows, names = rows_of(tally, found), list(found)
    differences = [(name, *(_difference(tally, found, name, other) for other in names)) for name in names]
    print(text_table(HEADER, rows))
    print(f"\n{DIFFERENCES}\n{text_table(('', *names), differences)}")
    _draw(tally, found, folder / "study.png")
    parts = [page.figure(folder / "study.png"), page.html_table(HEADER, rows)]
    sections = [
        page.section("Models", MODELS, *parts),
        page.section("Differences", DIFFERENCES, page.html_table(("", *names), differences)),
    ]
    page.write_page(folder / "study.html", f"Study {folder.name}", sections)
    print(f"written to {folder / 'study.html'}")


def rows_of(tally: Tally, found: Found) -> list[tuple[str, ...]]:
    """A row for each model at each setting."""
    first, rows = next(iter(found)), []
    for name, one in found.items():
        for setting in one["settings"]:
            key = setting["key"]
            shown = [interval(tally.mean(f"{name}/{measure}@{key}")) for measure in MEASURES]
            gain = interval(tally.mean(f"{name}/greedy@{key}", minus=f"{first}/greedy@1"), sign="+")
            trained, count = f"{one['trained']:,}", f"{setting['evaluations']:.4g}"
            rows.append((name, trained, setting["solver"], count, *shown, gain))
    return rows


def _draw(tally: Tally, found: Found, file: Path) -> None:
    """Loss and accuracy of all models with their first solver against the budget, and of the first path's solvers."""
    figure, [losses, rates, solvers] = new_figure(3)
    budgets = sorted({setting["evaluations"] for one in found.values() for setting in one["settings"]})
    for axes, measure in ((losses, "loss"), (rates, "greedy")):
        for name, one in found.items():
            _draw_line(axes, tally, name, measure, _settings(one, _solvers(one)[0]), budgets, label=name)
        axes.set(title="all models", ylabel=MEASURES[measure])
    paths = [name for name, one in found.items() if len(one["settings"]) > 1]
    if paths:
        name, one = paths[0], found[paths[0]]
        for solver in _solvers(one):
            _draw_line(solvers, tally, name, "greedy", _settings(one, solver), budgets, label=solver)
        solvers.set(title=name, ylabel=MEASURES["greedy"])
    for axes in (losses, rates, solvers):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set(xlabel="evaluations of the path per token")
        if axes.has_data():
            axes.legend()
    save_figure(figure, file)


def _draw_line(axes: Any, tally: Tally, name: str, measure: str, settings: Any, budgets: Any, *, label: str) -> None:
    """A model's line; one without a path is the same at every budget, dashed."""
    found = [tally.mean(f"{name}/{measure}@{setting['key']}") for setting in settings]
    if len(found) > 1:
        draw_rates(axes, [setting["evaluations"] for setting in settings], found, label=label)
        return
    [line] = axes.plot([budgets[0], budgets[-1]], [found[0][0]] * 2, linestyle="--", label=label)
    axes.fill_between([budgets[0], budgets[-1]], *found[0][1:], alpha=0.1, color=line.get_color())


def _solvers(one: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(setting["solver"] for setting in one["settings"] if setting["solver"])) or [""]


def _settings(one: Mapping[str, Any], solver: str) -> list[Mapping[str, Any]]:
    """A model's settings with a solver, by their budgets; the language model alone, a budget of 1, is the first."""
    return [setting for setting in one["settings"] if setting["solver"] in ("", solver)]


def _difference(tally: Tally, found: Found, name: str, other: str) -> str:
    if name == other:
        return ""
    largest = (_settings(found[model], _solvers(found[model])[0])[-1]["key"] for model in (name, other))
    mine, its = (f"{model}/greedy@{key}" for model, key in zip((name, other), largest, strict=True))
    return interval(tally.mean(mine, minus=its), sign="+")
