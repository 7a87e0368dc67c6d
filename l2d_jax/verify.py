"""Compares a model with numbers that others computed; exit status 1 if anything fails.

`python -m l2d_jax.verify --model DIR --reference FILE.npz`: with arrays recorded from the authors' release. One line
per array: name, largest difference, pass or FAIL. A run that met a near tie, by the word of the recording, is not
judged. With `--dtype bfloat16` differences are relative to an array's largest entry, and judged where one evaluation
decides them.

`python -m l2d_jax.verify --model DIR --against transformers`: the language model with transformers' own, on the same
weights, in float32; it needs torch. One line per row of tokens: largest difference of a logit and its bound, mean and
largest KL divergence over the positions, pass or FAIL. With `--dtype bfloat16|int8` ours is judged by the mean.

`python -m l2d_jax.verify --model DIR --against torch`: a path with itself in PyTorch, by the class that is published
with it, on the same noise in float32; it needs torch. One line per array: logits at several t, trajectories, answers.
Arrays beyond their bound come last, judged by ten times what PyTorch differs from itself in float64.
"""

from collections.abc import Iterator

import jax

from l2d_jax import command_line
from l2d_jax.errors import require
from l2d_jax.loading import load
from l2d_jax.parity import against_release
from l2d_jax.parity.against_torch import ROW, compare_paths
from l2d_jax.parity.against_transformers import DIVERGENCE, LENGTH, compare
from l2d_jax.parity.recording import Check, Recording

Line = tuple[str, bool | None]  # what to print, and whether it passes (None: not judged)
VERDICTS = {True: "pass", False: "FAIL", None: "(not judged)"}


def main() -> int:
    """Parse the command line, print the table, and return 1 if a line fails."""
    parser = command_line.Parser(prog="python -m l2d_jax.verify", description=__doc__)
    model = "a model folder, workdir or published folder; a plain model by hub id or GGUF file"
    parser.add_argument("--model", type=command_line.model_name, required=True, help=model)
    other = parser.add_mutually_exclusive_group(required=True)
    other.add_argument("--reference", type=command_line.local_path, help="arrays recorded from the authors' release")
    against = "compare the language model with transformers' own, or the path with its class in PyTorch"
    other.add_argument("--against", choices=["transformers", "torch"], help=against)
    types = ["float32", "bfloat16", "int8"]
    parser.add_argument("--dtype", choices=types, default="float32", help="of our model; float32")
    tokens = f"a row, with --against; {LENGTH}, or {ROW} of a path, if the model has the room"
    parser.add_argument("--tokens", type="Length", help=tokens)
    options = parser.parse_args()
    noun, judged = "arrays", []
    with jax.default_matmul_precision("highest"):
        if options.against == "transformers":
            noun, lines = "rows", against_transformers(options.model, options.tokens, options.dtype)
        elif options.against == "torch":
            require(options.dtype == "float32", "--against torch compares in float32: leave --dtype out")
            lines = map(line, compare_paths(options.model, length=options.tokens))
        else:
            require(options.tokens is None, "--tokens goes with --against: a recording has its own tokens")
            require(options.dtype != "int8", "--dtype int8 goes with --against: a recording has no bounds for it")
            recording = Recording.open(options.reference)
            lines = map(line, against_release.checks(load(options.model, dtype=options.dtype).model, recording))
        for text, passed in lines:
            print(f"{text}  {VERDICTS[passed]}", flush=True)
            judged += [] if passed is None else [passed]
    print(f"{sum(judged)} of {len(judged)} {noun} pass")
    return int(not all(judged))


def line(check: Check) -> Line:
    """The line of one array."""
    kind = "relative" if check.relative else "absolute"
    return f"{check.name:<64} {check.difference():9.2e} {kind}", check.passed() if check.judged else None


def against_transformers(model: str, length: int | None, dtype: str) -> Iterator[Line]:
    """One line per row of tokens."""
    for row in compare(model, length=length, dtype=dtype):
        mean, largest = row.divergence.mean(), row.divergence.max()
        if row.is_coarse:
            agreement = f"same arg max at {100 * row.agreement:.1f} %"
            rest = f"  KL {mean:9.2e} of at most {DIVERGENCE} nats in the mean  {agreement}"
        else:
            rounding = f"  (transformers from its own float64: {row.rounding:.2e})" if row.rounding else ""
            rest = f" of at most {row.bound:.2e}  KL {mean:9.2e} mean, {largest:9.2e} at most{rounding}"
        yield f"{row.name:<10} {row.difference:9.2e}{rest}", row.passed()


if __name__ == "__main__":
    command_line.run(main)
