"""Compares a model with the numbers of another implementation. The exit status is 1 if a comparison fails.

`python -m l2d_jax.verify --model DIR --reference FILE.npz` compares with arrays recorded from the authors' release. It
prints a line per array: its name, the largest difference, and pass or FAIL. A run that met a near tie, as the recording
says, is not judged. With `--dtype bfloat16` differences are relative to the largest entry of an array, and only arrays
that one evaluation decides are judged.

`python -m l2d_jax.verify --model DIR --against transformers` compares the language model with that of transformers, on
the same weights in float32; it needs torch. It prints a line per row of tokens: the largest difference of a logit and
its bound, the mean and largest KL divergence over the positions, and pass or FAIL. With `--dtype bfloat16|int8` our
model is judged by the mean divergence.

`python -m l2d_jax.verify --model DIR --against torch` compares a path with the PyTorch class that is published with it,
on the same noise in float32; it needs torch. It prints a line per array: logits at several t, trajectories, answers.
Arrays beyond their bound come last. They are judged by ten times the difference of PyTorch from itself in float64.
"""

from l2d_jax import command_line, console
from l2d_jax.config.choices import DTYPES, VERIFIED_PATH_TOKENS, VERIFIED_TOKENS
from l2d_jax.errors import require


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("verify", description=__doc__)
    model = "a model folder, workdir or published folder; a plain model by hub id or GGUF file"
    parser.add_argument("--model", type=command_line.model_name, required=True, help=model)
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--reference", type=command_line.local_path, help="arrays recorded from the authors' release")
    against = "compare the language model with transformers' own, or the path with its class in PyTorch"
    other.add_argument("--against", choices=["transformers", "torch"], help=against)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of our weights and products")
    tokens = f"tokens per row, with --against; None: {VERIFIED_TOKENS}, or {VERIFIED_PATH_TOKENS} for a path"
    parser.add_argument("--tokens", type="Length", help=tokens)
    return parser


def main() -> int:
    """Parse the command line, print the table, and return 1 if a line fails."""
    options = make_parser().parse_args()
    if options.against is None:
        require(options.tokens is None, "--tokens goes with --against: a recording has fixed tokens")
        require(options.dtype != "int8", "--dtype int8 goes with --against: a recording has no bounds for it")
    if options.against == "torch":
        require(options.dtype == "float32", "--against torch compares in float32: leave --dtype out")
    with console.starting():
        from l2d_jax.programs import verify
    return verify.run(options)


if __name__ == "__main__":
    command_line.run(main)
