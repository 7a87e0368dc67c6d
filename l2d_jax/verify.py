"""Compares a model with numbers that others computed; exit status 1 if anything fails.

`python -m l2d_jax.verify --model DIR --reference FILE.npz`: with arrays recorded from the authors' release. One line
per array: name, largest difference, pass or FAIL. A run with a near tie, as the recording says, is not judged. With
`--dtype bfloat16` differences are relative to an array's largest entry, and judged where one evaluation decides them.

`python -m l2d_jax.verify --model DIR --against transformers`: the language model with transformers' own, on the same
weights, in float32; it needs torch. One line per row of tokens: largest difference of a logit and its bound, mean and
largest KL divergence over the positions, pass or FAIL. With `--dtype bfloat16|int8` ours is judged by the mean.

`python -m l2d_jax.verify --model DIR --against torch`: a path with itself in PyTorch, by the class that is published
with it, on the same noise in float32; it needs torch. One line per array: logits at several t, trajectories, answers.
Arrays beyond their bound come last, judged by ten times what PyTorch differs from itself in float64.
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
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="type of the weights in our model")
    tokens = f"tokens of a row, with --against; default: {VERIFIED_TOKENS}, or {VERIFIED_PATH_TOKENS} for a path"
    parser.add_argument("--tokens", type="Length", help=tokens)
    return parser


def main() -> int:
    """Parse the command line, print the table, and return 1 if a line fails."""
    options = make_parser().parse_args()
    if options.against is None:
        require(options.tokens is None, "--tokens goes with --against: a recording has its own tokens")
        require(options.dtype != "int8", "--dtype int8 goes with --against: a recording has no bounds for it")
    if options.against == "torch":
        require(options.dtype == "float32", "--against torch compares in float32: leave --dtype out")
    with console.starting():
        from l2d_jax.programs import verify
    return verify.run(options)


if __name__ == "__main__":
    command_line.run(main)
