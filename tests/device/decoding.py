"""Measures decoding as `l2d benchmark decode` does, with random weights: first one batch size, last the others."""

from typing import Any

from l2d_jax.config.config_file import read_config, split_overrides
from l2d_jax.config.schema import Config
from l2d_jax.distributed.runtime import start_jax
from l2d_jax.performance.decoding_speed import measure_decoding
from tests.device.options import Options
from tests.device.table import LEFT_OUT, Rows


def configure(options: Options) -> Config:
    """The config whose architecture is measured, with the sizes of the options and random weights."""
    sizes = {"data.max_length": options.length, "data.answer_length": None, "train.batch_size": options.rows}
    fixed = {"model.name": "random", "model.dtype": options.dtype, "train.method": "l2d"}
    return read_config(options.config, fixed | sizes | split_overrides(list(options.overrides)))


def run(rows: Rows, options: Options) -> None:
    """Rows for each batch size, budget and order of evaluations, and for an evaluation."""
    config = configure(options)
    mesh = start_jax(config.mesh)
    shape = f"{options.config}, {config.model.dtype}"
    batches = options.batches[:1] if rows.part == "decoding" else options.batches[1:]
    if not batches:
        rows.add("-", "--batches names one size only", status=LEFT_OUT)
    for batch in batches:
        with rows.guard(f"{shape}, batch {batch}"):
            sizes: Any = {"budgets": options.budgets, "prompt": options.prompt, "new": options.new}
            figures = measure_decoding(config, mesh, batches=[batch], **sizes)
            plain = next((row["seconds per token"] for row in figures["rows"] if row["budget"] == 1), None)
            for row in figures["rows"]:
                seconds, budget = row["seconds per token"], row["budget"]
                text = f"{1000 * seconds:.2f} ms/token, {row['tokens per second']:,.1f} tokens/s"
                text += f", {row['passes per token']:.2f} passes/token" if budget > 1 else ""
                beside = "" if plain is None or budget == 1 else f"{seconds / plain:.2f} x budget 1 at this batch"
                what = f"{shape}, batch {batch}, budget {budget}, {row['order']}"
                rows.add(what, text, beside or f"{options.new} tokens, prompts of {options.prompt} not timed", **row)
            [slope] = figures["batches"]
            share, rate = slope["share of the read rate"], figures["read rate"]
            text = f"{1000 * slope['seconds per evaluation']:.2f} ms per evaluation, one by one"
            read = figures["bytes per evaluation"] / 1e9
            beside = f"reads {read:.2f} GB, {share:.0%} of {rate / 1e9:,.0f} GB/s ({figures['read rate of']})"
            rows.add(f"{shape}, batch {batch}, slope", text, beside, **slope, rate=rate)
