"""Reports of a study, which compares models on the same held-out answers: tables, a figure and a page."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Interval, Len
from typing_extensions import TypedDict

from l2d_jax.errors import InputError
from l2d_jax.evaluation.strategies import Outcome
from l2d_jax.files import Positive, check, read_json
from l2d_jax.reports.corrections import corrections_section
from l2d_jax.reports.figures import draw_rates, saved_figure
from l2d_jax.reports.page import Section, interval, write_page
from l2d_jax.reports.strategies import strategies_section
from l2d_jax.statistics import BootstrapSums
from l2d_jax.storage import mirror
from l2d_jax.training.held_out.corrections import value_names

MEASURES = {"loss": "nats per token", "expected": "expected accuracy", "greedy": "greedy accuracy"}
HEADER = ("model", "trained", "solver", "evaluations", *MEASURES, "greedy, gain")
MODELS = "Teacher-forced, on held-out answers; 95 % intervals over examples. Gains are over the first model, paired."
DIFFERENCES = "Greedy accuracy of the row less that of the column, each at the largest budget of its first solver."
Measurements = Mapping[str, Mapping[str, Any]]  # [name of the model]: result of `read_measurements`
Finite = Annotated[float, Interval(ge=-1e12, le=1e12)]


class _Setting(TypedDict):
    key: str
    solver: str
    evaluations: Positive


class _Sums(TypedDict):
    counts: Annotated[list[Annotated[float, Interval(ge=1, le=1e12)]], Len(1)]  # tokens of each example
    sums: dict[str, list[Finite]]


class _Measured(TypedDict):
    about: dict[str, Any]
    trained: Annotated[int, Interval(ge=0, lt=2**50)]
    settings: Annotated[list[_Setting], Len(1)]
    tally: _Sums
    answers: list[Outcome]


def read_measurements(file: Path) -> dict[str, Any]:
    """Read what `study` has measured for a model; raises `InputError` for a damaged file."""
    remedy = "remove it to measure the model again"
    measured: dict[str, Any] = check(read_json(file), _Measured, file, remedy=remedy)
    counts, sums = measured["tally"]["counts"], measured["tally"]["sums"]
    names = [f"{measure}@{one['key']}" for one in measured["settings"] for measure in MEASURES]
    paths = [one["key"] for one in measured["settings"] if one["key"] != "1"]
    for name in [*names, "greedy@1", *(value_names(paths) if paths else ())]:
        if len(sums.get(name, ())) != len(counts):
            raise InputError(f"{file}: tally.sums must have {name} of {len(counts)} examples: {remedy}")
    return measured


def report_study(folder: Path, measured: Measurements) -> None:
    """Print the tables, and write a page with the tables and the figure."""
    tally = BootstrapSums.join({name: one["tally"] for name, one in measured.items()})
    names, file = list(measured), folder / "study.png"
    rows: list[tuple[str, ...]] = []
    for name, one in measured.items():
        for setting in one["settings"]:
            key = setting["key"]
            shown = [interval(tally.mean(f"{name}/{measure}@{key}")) for measure in MEASURES]
            gain = interval(tally.mean(f"{name}/greedy@{key}", minus=f"{names[0]}/greedy@1"), sign="+")
            trained, count = f"{one['trained']:,}", f"{setting['evaluations']:.4g}"
            rows.append((name, trained, setting["solver"], count, *shown, gain))
    largest = {name: f"{name}/greedy@{_settings(one)[-1]['key']}" for name, one in measured.items()}

    def difference(mine: str, its: str) -> str:
        return "" if mine == its else interval(tally.mean(largest[mine], minus=largest[its]), sign="+")

    differences = [(mine, *(difference(mine, its) for its in names)) for mine in names]
    _draw(tally, measured, file)
    sections = [Section("Models", MODELS, [file], [(HEADER, rows)]).printed()]
    sections.append(Section("Differences", DIFFERENCES, [], [(("", *names), differences)]).printed())
    if any(one["answers"] for one in measured.values()):
        sections.append(strategies_section({name: one["answers"] for name, one in measured.items()}, folder))
    for name, one in measured.items():
        budgets = {setting["key"]: setting["evaluations"] for setting in _settings(one)[1:]}
        if budgets:
            sections.append(corrections_section(tally, name, budgets, folder))
    write_page(folder / "study.html", f"Study {folder.name}", sections=sections)
    print(f"written to {mirror.shown_places(str(folder / 'study.html'))}")


def _draw(tally: BootstrapSums, measured: Measurements, file: Path) -> None:
    """Draw loss and accuracy against the budget: all models with their first solver, and the first path's solvers."""
    budgets = [setting["evaluations"] for one in measured.values() for setting in one["settings"]]
    ends = [min(budgets), max(budgets)]

    def draw(axes: Any, name: str, measure: str, solver: str | None = None) -> None:
        settings = _settings(measured[name], solver)
        rates = [tally.mean(f"{name}/{measure}@{setting['key']}") for setting in settings]
        if len(rates) > 1:
            draw_rates(axes, [setting["evaluations"] for setting in settings], rates, label=solver or name)
            return
        # A model without a path is a dashed constant, because it has no budget.
        [line] = axes.plot(ends, [rates[0][0]] * 2, linestyle="--", label=name)
        axes.fill_between(ends, *rates[0][1:], alpha=0.1, color=line.get_color())

    with saved_figure(3, file) as panels:
        losses, rates, solvers = panels
        for axes, measure in ((losses, "loss"), (rates, "greedy")):
            for name in measured:
                draw(axes, name, measure)
            axes.set(title="all models", ylabel=MEASURES[measure])
        if first := next((name for name, one in measured.items() if len(one["settings"]) > 1), None):
            for solver in _solvers(measured[first]):
                draw(solvers, first, "greedy", solver)
            solvers.set(title=first, ylabel=MEASURES["greedy"])
        for axes in panels:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
            axes.set(xlabel="evaluations of the path per token")


def _solvers(one: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(setting["solver"] for setting in one["settings"] if setting["solver"])) or [""]


def _settings(one: Mapping[str, Any], solver: str | None = None) -> list[Mapping[str, Any]]:
    """A model's settings with a solver (None: its first), sorted by budget; the first one is the language model."""
    solver = _solvers(one)[0] if solver is None else solver
    return [setting for setting in one["settings"] if setting["solver"] in ("", solver)]
