"""Measures a step of training as `l2d benchmark train` does, with random weights and tokens."""

from dataclasses import replace

from l2d_jax.performance.training_speed import measure_training
from l2d_jax.training.plans import start_planned
from tests.device.decoding import configure
from tests.device.options import Options
from tests.device.table import Rows


def run(rows: Rows, options: Options) -> None:
    """Rows for the step, and for its parts."""
    config = configure(options)
    remat = "products" if config.train.remat == "auto" else config.train.remat
    accumulation = 1 if config.train.accumulation == "auto" else config.train.accumulation
    config = replace(config, train=replace(config.train, remat=remat, accumulation=accumulation))
    config, mesh, _ = start_planned(config)
    figures = measure_training(config, mesh)
    name = f"{options.config}, {config.model.dtype}, {options.rows} x {options.length} tokens"
    speed, peak = figures["tokens per second"], figures["matrix product, GFLOP/s"]
    numbers = {name: value for name, value in figures.items() if name != "parts"}
    text = f"{speed:,.0f} tokens/s, {figures['seconds per step']:.3f} s per step"
    rows.add(name, text, f"remat {remat}, {accumulation} micro-batch(es), AdamW", **numbers)
    useful, share = figures["useful GFLOP/s"], figures["share of the matrix product's rate"]
    beside = f"{share:.0%} of {peak / 1e3:,.3g}, the rate of matrix products in the same minutes"
    rows.add("useful operations", f"{useful / 1e3:,.3g} TFLOP/s", beside, share=share)
    for part, figure in figures["parts"].items():
        seconds, flops = figure["seconds"], figure["FLOPs"]
        beside = f"{seconds / figures['seconds per step']:.0%} of the step"
        beside += (
            f"; {flops / seconds / 1e9 / peak:.0%} of the rate of matrix products" if flops and seconds > 0 else ""
        )
        rows.add(part, f"{1000 * seconds:,.1f} ms", beside, **figure)
