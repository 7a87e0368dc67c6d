"""Measures speed on this machine: `python -m l2d_jax.benchmark train|decode --config smollm2_135m`.

Weights and tokens are random, so nothing is downloaded. The config gives the architecture. `train` takes the batch from
the config, and compares the rate with that of a matrix product of the same type. `decode` takes solver and noise
samples from the config. It times evaluations one by one, side by side and as a stream, and compares the time of an
evaluation with the time to read its weights.
"""

from l2d_jax import command_line, console
from l2d_jax.config import config_file
from l2d_jax.errors import require


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("benchmark", description=__doc__)
    parser.add_argument("work", choices=["train", "decode"], help="what to measure")
    parser.add_argument("--config", default="smollm2_135m", help=config_file.CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--batches", type="Rows", nargs="+", default=[1, 4, 16], help="decode: sequences at a time")
    parser.add_argument("--budgets", type="Budget", nargs="+", default=[1, 7, 15], help="decode: evaluations per token")
    parser.add_argument("--prompt", type="Tokens", default=64, help="decode: tokens of each prompt, not timed")
    parser.add_argument("--new", type="Tokens", default=16, help="decode: tokens that are generated and timed")
    workdir = "decode: a trained path, which answers held-out problems, instead of random weights"
    parser.add_argument("--workdir", type=command_line.folder_or_bucket, help=workdir)
    parser.add_argument("--label", type="Label", help="decode: class of the held-out problems, for guidance")
    return parser


def main() -> None:
    """Parse the command line, measure, and print the figures."""
    options, rest = make_parser().parse_known_args()
    options.overrides = config_file.split_overrides(rest)
    is_trained = options.work == "decode" and options.workdir is not None
    others = [name for name in options.overrides if is_trained and not name.startswith("decode.")]
    require(not others, f"--config.{', '.join(others)} changes nothing: a workdir has its own. Leave it out")
    # The options of decoding are checked with the path of the workdir.
    config = config_file.read_config(options.config, {} if is_trained else options.overrides)
    require(is_trained or options.workdir is None, "--workdir is of decode: leave it out")
    require(is_trained or options.label is None, "--label is of decode with a --workdir: leave it out")
    with console.starting():
        from l2d_jax.programs import benchmark
    benchmark.run(options, config)


if __name__ == "__main__":
    command_line.run(main)
