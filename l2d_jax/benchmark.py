"""Measures speed on this machine: `python -m l2d_jax.benchmark train|decode --config configs/smollm2_135m.py`.

Weights and tokens are random, in the config's architecture, so that nothing is downloaded. `train` takes the batch from
the config, and compares its rate with that of a matrix product of the same type in the same run. `decode` takes solver
and noise samples from the config, and compares the time of an evaluation with the time to read its weights.
"""

import json
from typing import Any

from l2d_jax import command_line
from l2d_jax.config import config_file
from l2d_jax.config.config_file import override_names
from l2d_jax.decoding.solver import FIXED
from l2d_jax.distributed import runtime
from l2d_jax.errors import require
from l2d_jax.performance.decoding_speed import measure_decoding
from l2d_jax.performance.training_speed import measure_training
from l2d_jax.training.plans import start_planned


def main() -> None:
    """Parse the command line, measure, and print the figures."""
    parser = command_line.Parser(prog="python -m l2d_jax.benchmark", description=__doc__)
    parser.add_argument("work", choices=["train", "decode"], help="what to measure")
    parser.add_argument("--config", default="configs/smollm2_135m.py", help=config_file.CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batches", type="Rows", nargs="+", default=[1, 4, 16], help="decode: sequences at a time")
    parser.add_argument("--budgets", type="Budget", nargs="+", default=[1, 7, 15], help="decode: evaluations a token")
    parser.add_argument("--prompt", type="Tokens", default=64, help="decode: tokens of each prompt, not timed")
    parser.add_argument("--new", type="Tokens", default=16, help="decode: tokens that are generated and timed")
    options, config = parser.parse_with_config()
    if options.work == "train":
        config, mesh, line = start_planned(config)
        figures = measure_training(config, mesh)
        lines = [line, *training_table(figures)]
    else:
        method, budgets = config.train.method, options.budgets
        problem = f"decode measures evaluations of a path, and config.train.method {method!r} trains none"
        require(method == "l2d", f"{problem}: take 'l2d'")
        for name, option in {"budget": "--budgets", "max_new_tokens": "--new"}.items():
            is_given = name in override_names(options.overrides, "decode")
            require(not is_given, f"--config.decode.{name} changes nothing here: use {option}")
        rule = f"a time per evaluation needs a solver with fixed steps ({', '.join(FIXED)})"
        require(config.decode.solver in FIXED, f"{rule}, got {config.decode.solver}")
        require(len(set(budgets)) > 1, f"--budgets needs two or more for a slope, got {budgets}")
        for budget in budgets:
            FIXED[config.decode.solver].steps(budget)
        shape = {name: getattr(options, name) for name in ("batches", "budgets", "prompt", "new")}
        figures = measure_decoding(config, runtime.start_jax(config.mesh), **shape)
        lines = decoding_table(figures)
    print(json.dumps(figures) if options.json else "\n".join(lines))


def training_table(figures: dict[str, Any]) -> list[str]:
    """Lines with the figures of a whole step, then the time of its parts."""
    lines = [f"{name:<36} {value:>12,.2f}" for name, value in figures.items() if name != "parts"]
    lines += ["", "part            seconds  of the step  share of the matrix product's rate"]
    peak, whole = 1e9 * figures["matrix product, GFLOP/s"], figures["seconds per step"]
    for name, part in figures["parts"].items():
        share = f"{part['FLOPs'] / part['seconds'] / peak:.0%}" if part["FLOPs"] else "-"
        lines.append(f"{name:<14} {part['seconds']:>8.3f}  {part['seconds'] / whole:>11.0%}  {share:>34}")
    return lines


def decoding_table(figures: dict[str, Any]) -> list[str]:
    """Lines with the speed by batch size and budget, then the time of an evaluation by batch size."""
    lines = ["batch  budget  tokens per second  milliseconds per token"]
    for row in figures["rows"]:
        line = f"{row['batch']:>5}  {row['budget']:>6}  {row['tokens per second']:>17.2f}"
        lines.append(f"{line}  {1000 * row['seconds per token']:>22.1f}")
    read, rate = figures["bytes per evaluation"] / 1e9, figures["read rate"] / 1e9
    lines += ["", f"an evaluation reads {read:.3f} GB of weights; the machine reads {rate:.1f} GB/s"]
    lines[-1] += f" ({figures['read rate of']})"
    for row in figures["batches"]:
        milliseconds, share = 1000 * row["seconds per evaluation"], 100 * row["share of the read rate"]
        lines.append(f"batch {row['batch']:>2}: {milliseconds:.1f} ms per evaluation, {share:.0f} % of that rate")
    return lines


if __name__ == "__main__":
    command_line.run(main)
