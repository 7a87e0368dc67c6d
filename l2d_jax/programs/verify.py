"""Compares a model with numbers from other implementations, one line per array."""

from argparse import Namespace
from collections.abc import Iterator

import jax

from l2d_jax.loading import load
from l2d_jax.parity import against_release
from l2d_jax.parity.against_torch import compare_paths
from l2d_jax.parity.against_transformers import DIVERGENCE, compare
from l2d_jax.parity.recording import Check, Recording

Line = tuple[str, bool | None]  # what to print, and whether it passes (None: not judged)
VERDICTS = {True: "pass", False: "FAIL", None: "(not judged)"}


def run(options: Namespace) -> int:
    """Print a line for each comparison; returns 1 if one fails."""
    noun, judged = "arrays", []
    with jax.default_matmul_precision("highest"):
        if options.against == "transformers":
            noun, lines = "rows", against_transformers(options.model, options.tokens, options.dtype)
        elif options.against == "torch":
            lines = map(line, compare_paths(options.model, length=options.tokens))
        else:
            recording = Recording.open(options.reference)
            lines = map(line, against_release.checks(load(options.model, dtype=options.dtype).model, recording))
        for text, passed in lines:
            print(f"{text}  {VERDICTS[passed]}", flush=True)
            judged += [] if passed is None else [passed]
    print(f"{sum(judged)} of {len(judged)} {noun} pass")
    return int(not all(judged))


def line(check: Check) -> Line:
    """The line for one array."""
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
