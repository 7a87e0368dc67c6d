"""Tokenises, packs and shards examples once: `python -m l2d_jax.prepare --config FILE --out DIR`.

`python -m l2d_jax.train` with the same config and `--config.data.prepared=DIR` then reads the same examples in the same
order, and neither downloads nor tokenises the source. After an interruption the same command resumes with the next
shard. It also repairs a damaged folder. No weights are downloaded, and no device is used.
"""

import os

from l2d_jax import command_line, console
from l2d_jax.config import config_file
from l2d_jax.errors import require


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("prepare", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    parser.add_argument("--out", type=command_line.folder_or_bucket, required=True, help="folder for the examples")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--processes", type="Count", default=cores, help="processes that tokenise (default: all cores)")
    return parser


def main() -> None:
    """Parse the command line, prepare what training with the config reads, and say what it takes."""
    options, config = make_parser().parse_with_config()
    require(config.data.prepared is None, "config.data.prepared names examples that are prepared already: leave it out")
    with console.starting():
        from l2d_jax.programs import prepare
    prepare.run(options, config)


if __name__ == "__main__":
    command_line.run(main)
