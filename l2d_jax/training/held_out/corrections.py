"""What a budget above 1 changes: which predictions of the language model it corrects, and which it breaks.

Tokens are sorted by the entropy of the language model alone and by their place in the answer. From these sums, `gates`
computes the accuracy that remains with a gate on the entropy (`config.decode.gate`), and with an oracle.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from l2d_jax.statistics import BootstrapSums

ENTROPIES = (0.001, 0.01, 0.1, 0.3, 1.0, 2.0)  # nats: lower ends of all bins except the first
BINS = {"entropy": ENTROPIES, "position": (1, 4, 16, 64)}  # position: number of answer tokens before the token


class Corrections(NamedTuple):
    """Shares of all tokens: those in a bin, those the language model gets right, those the path corrects or breaks."""

    tokens: float
    right: float
    corrected: float
    broken: float


class Gate(NamedTuple):
    """The accuracy if only some tokens are refined, and the share of tokens that are refined."""

    name: str
    refined: float
    accuracy: float


def token_values(
    scores: Mapping[str, Mapping[str, Float[np.ndarray, "B M"]]], weights: Float[np.ndarray, "B M"]
) -> dict[str, Float[np.ndarray, "B M"]]:
    """Values for `BootstrapSums`, from "greedy" and "entropy" at each setting; setting "1" is the language model.

    For each bin: `tokens/bin` and `right/bin` of the language model; for each other setting `corrected@name/bin` and
    `broken@name/bin`.
    """
    plain = scores["1"]
    places = {"entropy": plain["entropy"], "position": np.cumsum(weights > 0, axis=1) - 1}
    values: dict[str, np.ndarray] = {}
    for kind, edges in BINS.items():
        found = np.digitize(places[kind], edges)
        for index in range(len(edges) + 1):
            name, is_in = f"{kind}{index}", (found == index).astype(np.float64)
            values |= {f"tokens/{name}": is_in, f"right/{name}": is_in * plain["greedy"]}
            for setting in scores.keys() - {"1"}:
                greedy = scores[setting]["greedy"]
                values[f"corrected@{setting}/{name}"] = is_in * greedy * (1 - plain["greedy"])
                values[f"broken@{setting}/{name}"] = is_in * (1 - greedy) * plain["greedy"]
    return values


def value_names(settings: Iterable[str]) -> list[str]:
    """The names that `token_values` gives for these settings, which exclude the language model."""
    kinds = ["tokens", "right", *(f"{kind}@{setting}" for setting in settings for kind in ("corrected", "broken"))]
    bins = [f"{name}{index}" for name, edges in BINS.items() for index in range(len(edges) + 1)]
    return [f"{kind}/{name}" for kind in kinds for name in bins]


def by_bin(sums: BootstrapSums, kind: str, setting: str, *, prefix: str = "") -> list[Corrections]:
    """The corrections in each bin of "entropy" or "position"; names of the sums start with `prefix`."""
    bins = [f"{kind}{index}" for index in range(len(BINS[kind]) + 1)]
    names = ("tokens", "right", f"corrected@{setting}", f"broken@{setting}")
    return [Corrections(*(sums.mean(f"{prefix}{name}/{at}")[0] for name in names)) for at in bins]


def bin_names(kind: str) -> list[str]:
    """The range of each bin, as text."""
    edges = [f"{edge:g}" for edge in BINS[kind]]
    return [f"< {edges[0]}", *(f"{low} to {high}" for low, high in itertools.pairwise(edges)), f">= {edges[-1]}"]


def gates(bins: Sequence[Corrections]) -> list[Gate]:
    """Accuracies of refining no token, tokens from each entropy bin on, all tokens, and tokens that an oracle picks."""
    right, corrected = (sum(getattr(one, name) for one in bins) for name in ("right", "corrected"))
    found = [Gate("none", 0.0, right)]
    for start in range(len(bins) - 1, -1, -1):
        refined = bins[start:]
        gain = sum(one.corrected - one.broken for one in refined)
        name = f"entropy >= {ENTROPIES[start - 1]:g}" if start else "all"
        found.append(Gate(name, sum(one.tokens for one in refined), right + gain))
    return [*found, Gate("oracle", corrected, right + corrected)]
