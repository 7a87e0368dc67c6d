"""Reports of training: loss by t, and accuracy against the budget, teacher-forced and free-running."""

from pathlib import Path
from typing import Annotated, Any

from annotated_types import Len

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check
from l2d_jax.reports.figures import draw_rates, saved_figure
from l2d_jax.reports.page import Table, interval
from l2d_jax.training.metrics import read_metrics

BY_T = "validation/loss_by_t"  # key of the loss of a path in each bin of t
KINDS = {
    "expected": "expected: the true token's probability",
    "greedy": "greedy: it is the arg max",
    "exact": "exact: a free answer is right",
    "sampled": "the same, sampled at temperature 1",
}


def first_and_last(workdir: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last validation of a run; raises `InputError` if there is none."""
    records = [record for record in read_metrics(workdir) if "validation/loss" in record]
    require(records != [], f"workdir {workdir} has no validation in metrics.jsonl: train it first")
    first, last = records[0], records[-1]
    for record in (first, last):
        _check(record, workdir / "metrics.jsonl")
    if len(first[BY_T]) != len(last[BY_T]):
        raise InputError(f"the validations in {workdir / 'metrics.jsonl'} have other bins of t: remove the damaged one")
    return first, last


def _check(record: dict[str, Any], file: Path) -> None:
    record.setdefault(BY_T, [])  # absent if a language model was trained
    kinds: dict[str, Any] = {"validation/loss": float, BY_T: list[float]}
    for name in (f"validation/{kind}@{budget}" for kind in _kinds(record) for budget in budgets(record)):
        bounds, gain = (Annotated[list[float], Len(count, count)] for count in (2, 3))
        kinds |= {name: float, f"{name}_interval": bounds, f"{name}_gain": gain}
    for name, kind in kinds.items():
        check(record.get(name), kind, f"{file}: {shown(name)} of step {record['step']}", remedy="remove that line")


def _kinds(record: dict[str, Any]) -> list[str]:
    """The kinds of accuracy that were measured; the first two always exist."""
    first, second, *free = KINDS
    return [first, second, *(kind for kind in free if any(name.startswith(f"validation/{kind}@") for name in record))]


def loss_rows(before: dict[str, Any], after: dict[str, Any]) -> Table:
    """A table of the loss by t, in nats per token, before and after training; without a path, only the row "all"."""
    bins = len(before[BY_T])
    names = [*(f"{i / bins:.1f} - {(i + 1) / bins:.1f}" for i in range(bins)), "all"]
    losses = ([f"{loss:.3f}" for loss in (*one[BY_T], one["validation/loss"])] for one in (before, after))
    return ("t", "loss before", "loss after"), list(zip(names, *losses, strict=True))


def budget_rows(record: dict[str, Any]) -> Table:
    """A table of accuracy at each budget with 95 % intervals, and the paired gain over the smallest budget."""
    rows, kinds = [], _kinds(record)
    for budget in budgets(record):
        row = [str(budget)]
        for name in (f"validation/{kind}@{budget}" for kind in kinds):
            row += [interval((record[name], *record[f"{name}_interval"])), interval(record[f"{name}_gain"], sign="+")]
        rows.append(tuple(row))
    return ("budget", *(word for kind in kinds for word in (kind, "gain"))), rows


def budgets(record: dict[str, Any]) -> list[int]:
    """The budgets of a validation, in ascending order."""
    names = [name.removeprefix("validation/expected@") for name in record]
    return sorted(int(name) for name in names if name.isdecimal() and len(name) < 10)


def draw_training(before: dict[str, Any], after: dict[str, Any], file: Path) -> None:
    """Draw accuracy against the budget with intervals and, for a path, the loss by t before and after training."""
    bins, measured = len(before[BY_T]), budgets(after)
    places, middles = range(len(measured)), [(i + 0.5) / bins for i in range(bins)]  # evenly spaced: budgets double
    with saved_figure(2 if bins else 1, file) as [left, *others]:
        for kind in _kinds(after):
            names = [f"validation/{kind}@{budget}" for budget in measured]
            draw_rates(left, places, [(after[name], *after[f"{name}_interval"]) for name in names], label=KINDS[kind])
        left.set_xticks(places, [str(budget) for budget in measured])
        left.set(xlabel="evaluations of the path per token", ylabel="accuracy on held-out answers", title="Accuracy")
        for right in others:
            for record, label in ((before, "before training"), (after, f"after {after['step']} steps")):
                right.plot(middles, record[BY_T], marker="o", label=label)
            right.set(xlabel="t", ylabel="nats per token", title="Loss of one evaluation at t", ylim=(0, None))
