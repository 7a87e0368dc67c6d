"""Measures the speed of training and decoding on this machine."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from l2d_jax.config.config_file import override_names
from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.refinement.solver import FIXED
from l2d_jax.decoding.requests import override_settings
from l2d_jax.distributed import runtime
from l2d_jax.errors import require
from l2d_jax.loading import find, load
from l2d_jax.performance.decoding_speed import measure_decoding
from l2d_jax.performance.trained_speed import measure_answers
from l2d_jax.performance.training_speed import measure_training
from l2d_jax.training.held_out.exact_match import MarkedProblems
from l2d_jax.training.plans import start_planned


def run(options: Namespace, config: Config) -> None:
    """Measure, and print the figures."""
    if options.work == "train":
        config, mesh, line = start_planned(config)
        figures = measure_training(config, mesh)
        lines = [line, *training_table(figures)]
    elif options.workdir is not None:
        figures = {"rows": _measure_trained(options)}
        lines = answers_table(figures["rows"])
    else:
        figures = _measure_random(options, config)
        lines = decoding_table(figures)
    print(json.dumps(figures) if options.json else "\n".join(lines))


def _measure_random(options: Namespace, config: Config) -> dict[str, Any]:
    method, budgets = config.train.method, options.budgets
    problem = f"decode measures evaluations of a path, and config.train.method {method!r} trains none"
    require(method == "l2d", f"{problem}: take 'l2d'")
    _check_overrides(options)
    rule = f"a time per evaluation needs a solver with fixed steps ({', '.join(FIXED)})"
    require(config.decode.solver in FIXED, f"{rule}, got {config.decode.solver}")
    require(len(set(budgets)) > 1, f"--budgets needs two or more for a slope, got {budgets}")
    for budget in budgets:
        FIXED[config.decode.solver].steps(budget)
    shape = {name: getattr(options, name) for name in ("batches", "budgets", "prompt", "new")}
    return measure_decoding(config, runtime.start_jax(config.mesh), **shape)


def _measure_trained(options: Namespace) -> list[dict[str, Any]]:
    """Measure how the newest checkpoint of a workdir answers held-out problems."""
    _check_overrides(options)
    folder = find(options.workdir)
    trained, base = folder.trained, folder.find_base()
    require(trained is not None, f"{options.workdir} is no workdir of training: it has no held-out problems")
    assert trained is not None
    words = require_tokenizer(base.tokenizer)
    settings = override_settings(folder.defaults, override_names(options.overrides, "decode"))
    problems = MarkedProblems.read(trained.data, words, count=max(options.batches), option="--batches")
    prompts = [prompt._replace(label=options.label) for prompt in problems.prompts]
    budgets = options.budgets
    for budget in budgets:
        check_settings(replace(settings, budget=budget, parallel="auto"), folder.path_config)
    runtime.start_jax(MeshConfig())
    loaded = replace(load(options.workdir), defaults=settings)
    return measure_answers(loaded, prompts, batches=options.batches, budgets=budgets, new=options.new)


def _check_overrides(options: Namespace) -> None:
    for name, option in {"budget": "--budgets", "max_new_tokens": "--new"}.items():
        is_given = name in override_names(options.overrides, "decode")
        require(not is_given, f"--config.decode.{name} changes nothing here: use {option}")


def _shares_of_lm(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The time of a token divided by that of the LM alone, which is a budget of 1 at the same batch size."""
    plain = {row["batch"]: row["seconds per token"] for row in rows if row["budget"] == 1}
    known = [plain.get(row["batch"]) for row in rows]
    return [f"{row['seconds per token'] / one:.2f}" if one else "-" for row, one in zip(rows, known, strict=True)]


def answers_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines with the time per token for each batch size, budget and order of evaluations."""
    lines = ["batch  budget  evaluations   milliseconds per token  of the LM's  passes  evaluations  tokens  differ"]
    for row, share in zip(rows, _shares_of_lm(rows), strict=True):
        line = f"{row['batch']:>5}  {row['budget']:>6}  {row['order']:<12}  {1000 * row['seconds per token']:>22.1f}"
        line += f"  {share:>11}  {row['passes per token']:>6.2f}  {row['evaluations per token']:>11.1f}"
        lines.append(f"{line}  {row['tokens']:>6}  {row['differ']:>6}")
    return lines


def training_table(figures: dict[str, Any]) -> list[str]:
    """Lines with the figures of a step, then the time of its parts."""
    lines = [f"{name:<36} {value:>12,.2f}" for name, value in figures.items() if name != "parts"]
    lines += ["", "part            seconds  of the step  share of the matrix product's rate"]
    peak, whole = 1e9 * figures["matrix product, GFLOP/s"], figures["seconds per step"]
    for name, part in figures["parts"].items():
        share = f"{part['FLOPs'] / part['seconds'] / peak:.0%}" if part["FLOPs"] else "-"
        lines.append(f"{name:<14} {part['seconds']:>8.3f}  {part['seconds'] / whole:>11.0%}  {share:>34}")
    return lines


def decoding_table(figures: dict[str, Any]) -> list[str]:
    """Lines with the speed for each batch size and budget, then the time of an evaluation for each batch size."""
    lines = ["batch  budget  evaluations   tokens per second  milliseconds per token  of the LM's  passes per token"]
    for row, share in zip(figures["rows"], _shares_of_lm(figures["rows"]), strict=True):
        line = f"{row['batch']:>5}  {row['budget']:>6}  {row['order']:<12}  {row['tokens per second']:>17.2f}"
        line += f"  {1000 * row['seconds per token']:>22.1f}  {share:>11}"
        lines.append(f"{line}  {row['passes per token']:>16.2f}")
    read, rate = figures["bytes per evaluation"] / 1e9, figures["read rate"] / 1e9
    lines += ["", f"an evaluation reads {read:.3f} GB of weights; the machine reads {rate:.1f} GB/s"]
    lines[-1] += f" ({figures['read rate of']})"
    for row in figures["batches"]:
        milliseconds, share = 1000 * row["seconds per evaluation"], 100 * row["share of the read rate"]
        lines.append(f"batch {row['batch']:>2}: {milliseconds:.1f} ms per evaluation, {share:.0f} % of that rate")
    return lines
