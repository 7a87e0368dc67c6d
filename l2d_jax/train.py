"""Trains a diffusion path: `python -m l2d_jax.train --config smollm2_135m --workdir DIR`.

With `--config.train.method=lora` or `full` it trains the language model itself, for comparison. The same command again
resumes from the newest checkpoint. A checkpoint has the trained weights, their optimizer state and the step. The frozen
model is read from its source again, and the order of the data is a function of the step.
"""

from l2d_jax import command_line, console
from l2d_jax.config import config_file
from l2d_jax.errors import require


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("train", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    folder = command_line.folder_or_bucket
    parser.add_argument("--workdir", type=folder, help="folder for config, checkpoints and metrics")
    parser.add_argument("--dry_run", action="store_true", help="print parameters, memory and FLOPs; no weights needed")
    listing = "list the variants of the config, with their trainable parameters; overrides are ignored"
    parser.add_argument("--variants", action="store_true", help=listing)
    parser.add_argument(
        "--preflight",
        action="store_true",
        help="check the hosts, the workdir, the base model and the disks, and train nothing",
    )
    return parser


def main() -> int | None:
    """Parse the command line, then train or, with `--dry_run`, say what training would take."""
    options, config = make_parser().parse_with_config()
    is_asked = options.variants or options.dry_run
    rule = "--workdir is missing: name a folder for config, checkpoints and metrics"
    require(is_asked or options.workdir is not None, rule)
    with console.starting():
        from l2d_jax.programs import train
    return train.run(options, config)


if __name__ == "__main__":
    command_line.run(main)
