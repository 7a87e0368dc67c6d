"""A section of a study's report on what refinement does to tokens: tables and a figure."""

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from l2d_jax.reports.figures import saved_figure
from l2d_jax.reports.page import Section, Table
from l2d_jax.statistics import BootstrapSums
from l2d_jax.training.held_out.corrections import BINS, bin_names, by_bin, gates

LABELS = ("entropy of the LM, nats", "tokens of the answer before")  # for `BINS`
TITLE = "What refinement does to tokens"
ABOUT = (
    "In percent of all tokens, teacher-forced. Corrected: the most likely token is wrong at a budget of 1 and right at "
    "the larger budget. Broken: the reverse. Rows are bins of the language model's entropy, in nats, or of the number "
    "of answer tokens before the token. Below: accuracy if a gate on the entropy refines only some tokens. The oracle "
    "refines exactly the tokens that are corrected: no gate can do better."
)


def corrections_section(sums: BootstrapSums, model: str, budgets: Mapping[str, float], folder: Path) -> Section:
    """The section on one model; `budgets` maps names of settings to budgets. Prints tables, draws into `folder`."""
    prefix, title, file = f"{model}/", f"{TITLE}: {model}", folder / f"{model}-corrections.png"
    last, evaluations = list(budgets.items())[-1]
    tables: list[Any] = [_corrections(sums, kind, budgets, prefix) for kind in BINS]
    ways = gates(by_bin(sums, "entropy", last, prefix=prefix))
    gated = [(one.name, f"{one.refined * evaluations:.2f}", f"{one.accuracy:.3f}") for one in ways]
    tables.append((("refined tokens", "evaluations per token", "greedy accuracy"), gated))
    with saved_figure(3, file) as [*places, right]:
        for axes, kind, label in zip(places, BINS, LABELS, strict=True):
            bins, names = by_bin(sums, kind, last, prefix=prefix), bin_names(kind)
            axes.bar(names, [100 * one.corrected for one in bins], label="corrected")
            axes.bar(names, [-100 * one.broken for one in bins], label="broken")
            axes.tick_params(axis="x", rotation=45)
            axes.set(xlabel=label, ylabel="% of all tokens")
        for found, label in ((ways[:-1], "gate on the entropy"), (ways[-1:], "oracle")):
            spent = [one.refined * evaluations for one in found]
            right.plot(spent, [one.accuracy for one in found], marker="o", label=label)
        right.set(xlabel="evaluations per token", ylabel="greedy accuracy")
    return Section(title, ABOUT, [file], tables).printed()


def _corrections(sums: BootstrapSums, kind: str, budgets: Mapping[str, float], prefix: str) -> Table:
    """A table with a row for each bin of "entropy" or "position" and one for all tokens; two columns per budget."""
    pairs = ((f"corrected at {evaluations:.4g}", f"broken at {evaluations:.4g}") for evaluations in budgets.values())
    found = [by_bin(sums, kind, setting, prefix=prefix) for setting in budgets]
    rows = []
    for index, name in enumerate([*bin_names(kind), "all"]):
        chosen = slice(None) if name == "all" else slice(index, index + 1)
        (tokens, right, *_), *_ = parts = [tuple(map(sum, zip(*bins[chosen], strict=True))) for bins in found]
        shares = (tokens, right, *itertools.chain(*(part[2:] for part in parts)))
        rows.append((name, *(f"{100 * share:.1f}" for share in shares)))
    return (kind, "tokens", "right at 1", *itertools.chain(*pairs)), rows
