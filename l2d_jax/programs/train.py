"""Trains, or says what training would need."""

import contextlib
from argparse import Namespace

from l2d_jax.config.schema import Config
from l2d_jax.performance.costs import cost_table, variant_table
from l2d_jax.training import run as training
from l2d_jax.training.plans import start_planned
from l2d_jax.training.preemption import STOPPED
from l2d_jax.weights import base_model


def run(options: Namespace, config: Config) -> int:
    """Train, or do what an option such as `--dry_run` requests; returns the exit status."""
    if options.variants:
        print(variant_table(options.config))
        return 0
    if options.dry_run:
        config, mesh, line = start_planned(config)
        print(cost_table(config, base_model.read_architecture(config.model), mesh))
        print(line.replace("plan: ", "plan  ", 1))  # like the rows of the table
        return 0
    if options.preflight:
        with contextlib.ExitStack() as held:
            training.prepare(config, options.workdir, held, show=lambda line: print(line, flush=True))
        return 0
    return 0 if training.train(config, options.workdir) else STOPPED
