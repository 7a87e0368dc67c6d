"""Trains a diffusion path: `python -m l2d_jax.train --config configs/smollm2_135m.py --workdir DIR`.

With `--config.train.method=lora` or `full` it trains the language model itself, for comparison. The same command again
resumes from the newest checkpoint. Only the trained weights, their optimizer state and the step are saved: a frozen
model is read from where it came from, and the order of the data is a function of the step.
"""

import contextlib

from l2d_jax import command_line
from l2d_jax.config import config_file
from l2d_jax.errors import require
from l2d_jax.performance.costs import cost_table, variant_table
from l2d_jax.training import run
from l2d_jax.training.plans import start_planned
from l2d_jax.training.preemption import STOPPED
from l2d_jax.weights import base_model


def main() -> int | None:
    """Parse the command line, then train or, with `--dry_run`, say what training would take."""
    parser = command_line.Parser(prog="python -m l2d_jax.train", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    folder = command_line.folder_or_bucket
    parser.add_argument("--workdir", type=folder, help="where config, checkpoints and metrics go")
    parser.add_argument("--dry_run", action="store_true", help="print parameters, memory and FLOPs; no weights needed")
    listing = "list the variants of the config file, with their trainable parameters; overrides do not count"
    parser.add_argument("--variants", action="store_true", help=listing)
    parser.add_argument("--preflight", action="store_true", help="check hosts, workdir, base and disks; train nothing")
    options, config = parser.parse_with_config()
    if options.variants:
        print(variant_table(options.config))
        return 0
    if options.dry_run:
        config, mesh, line = start_planned(config)
        print(cost_table(config, base_model.read_architecture(config.model), mesh))
        print(line.replace("plan: ", "plan  ", 1))  # like the rows of the table
        return 0
    if options.preflight and options.workdir is not None:
        with contextlib.ExitStack() as held:
            run.prepare(config, options.workdir, held, show=lambda line: print(line, flush=True))
        return 0
    require(options.workdir is not None, "--workdir is missing: name a folder for config, checkpoints and metrics")
    return 0 if run.train(config, options.workdir) else STOPPED


if __name__ == "__main__":
    command_line.run(main)
