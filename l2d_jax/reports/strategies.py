"""A section of a study's report on free-running accuracy against the cost of an answer: a table and a figure."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import ticker

from l2d_jax.evaluation.strategies import Outcome
from l2d_jax.reports.figures import draw_rates, saved_figure
from l2d_jax.reports.page import Section, Table, interval
from l2d_jax.statistics import BootstrapSums, rate

TITLE = "Answers given freely"
ABOUT = (
    "Problems are answered from the prompt alone, and the final numbers are compared; 95 % intervals over problems. "
    "A strategy is greedy at a budget of evaluations per token, the majority of sampled answers, or a beam search. "
    "Compute is counted for the answers as they were given; seconds are those of this machine. Gains are paired "
    "differences from the first row."
)
STYLES = {"greedy": "-", "majority": "--", "beams": ":"}


def strategies_section(answers: Mapping[str, Sequence[Outcome]], folder: Path) -> Section:
    """The section on the strategies of each model; prints the table and writes the figure."""
    file = folder / "answers.png"
    with saved_figure(2, file) as panels:  # a colour for each model, a style for each kind
        for axes, measure, label in zip(panels, ("flops", "seconds"), ("FLOP", "seconds"), strict=True):
            for number, (model, found) in enumerate(answers.items()):
                for kind, style in STYLES.items():
                    points = sorted((getattr(one, measure), _rate(one)) for one in found if one.kind == kind)
                    if points:
                        name = model if kind == "greedy" else f"{model}, {kind}"
                        draw_rates(axes, *zip(*points, strict=True), label=name, color=f"C{number}", linestyle=style)
            axes.set(xlabel=f"{label} per answer", ylabel="exact match", xscale="log")
            axes.minorticks_off()
            axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
            axes.xaxis.set_major_formatter(ticker.EngFormatter())
    return Section(TITLE, ABOUT, [file], [_table(answers)]).printed()


def _table(answers: Mapping[str, Sequence[Outcome]]) -> Table:
    rows: list[tuple[str, ...]] = []
    first, *_ = (one.right for found in answers.values() for one in found)
    for model, found in answers.items():
        for one in found:
            sums = BootstrapSums()
            sums.add(np.ones((len(first), 1)), {"own": np.c_[one.right], "first": np.c_[first]})
            shown = (interval(_rate(one)), interval(sums.mean("own", minus="first"), sign="+"))
            cost = (f"{one.tokens:.1f}", f"{one.flops / 1e12:.3g}", f"{one.seconds:.3g}")
            tries = "" if one.kind == "greedy" else f" of {one.tries}"
            rows.append((model, f"{one.kind}{tries} at {one.budget}", *shown, *cost))
    return ("model", "strategy", "exact match", "gain", "tokens", "TFLOP per answer", "seconds"), rows


def _rate(one: Outcome) -> tuple[float, float, float]:
    return rate([float(value) for value in one.right])[:3]
