"""Compiles for a TPU without one: `python -m l2d_jax.compile --config qwen7b --topology v5e:16x16`.

The training step and decoding are compiled from shapes alone, on an ordinary machine with libtpu. The output says
whether they fit in the memory of each chip, what they compute and move, and how long the compiler estimates that they
take. All figures are per device: a chip, or half a chip of tpu7x. The time is that of computation alone, and holds if
collectives overlap with it. Compiling takes minutes. The result is kept, so the same command again answers at once.
`--search` compiles a few plans of the training step, from which "auto" in a config chooses.
"""

from l2d_jax import command_line, console
from l2d_jax.config import config_file
from l2d_jax.config.choices import tpu_names


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("compile", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    parser.add_argument(
        "--topology", required=True, help=f"a slice, such as v5e:16x16; the generations are {', '.join(tpu_names())}"
    )
    parser.add_argument("--slices", type="Slices", default=1, help="number of slices, joined by the slower network")
    parser.add_argument("--work", choices=["train", "decode", "both"], default="both", help="what to compile")
    parser.add_argument("--batch", type="Rows", default=8, help="decode: sequences at a time")
    parser.add_argument("--prompt", type="Tokens", default=512, help="decode: tokens of each prompt")
    passes = "decode: passes over the weights per token, if its evaluations go side by side"
    parser.add_argument("--passes", type="Passes", default=1.4, help=passes)
    parser.add_argument("--top", type="CountOrZero", default=0, help="number of costliest instructions to list")
    parser.add_argument("--search", action="store_true", help="find the fastest plan for the training step")
    parser.add_argument("--hlo", type=command_line.local_path, help="write the optimized programs into this folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main() -> int:
    """Parse the command line, compile what is not in the cache, and print; 1 if a program does not fit."""
    options, config = make_parser().parse_with_config()
    with console.starting():
        from l2d_jax.programs import compile as program
    return program.run(options, config)


if __name__ == "__main__":
    command_line.run(main)
