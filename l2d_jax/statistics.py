"""Statistics of scores: pass@k, intervals, tables by subject, and means over tokens.

The unit is the problem, not the completion or the token, since those of one problem are not independent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from l2d_jax.errors import InputError, require
from l2d_jax.files import Count, Share

RESAMPLES = 2000  # of a bootstrap: bounds then vary by about a twentieth of the interval; half as many for tokens
CONFIDENCE = 0.95
BOUNDS = ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2)  # quantiles


class Rate(NamedTuple):
    """A mean over problems and the interval that holds it with 95 % confidence."""

    mean: Share
    low: Share
    high: Share
    problems: Count


def pass_at(k: int, *, samples: int, correct: int) -> float:
    """The probability that one of `k` samples is right: the unbiased estimate (Chen et al., 2021, equation 1).

    >>> pass_at(1, samples=4, correct=1), pass_at(4, samples=4, correct=1)
    (0.25, 1.0)
    """
    assert 1 <= k <= samples
    assert 0 <= correct <= samples
    return 1.0 - math.comb(samples - correct, k) / math.comb(samples, k)


def rate(values: Sequence[float]) -> Rate:
    """The mean of one value (0 to 1) per problem, and its 95 % interval; `InputError` for no problem.

    The interval is Wilson's where each value is 0 or 1, else the percentile interval of a bootstrap with a fixed seed.
    """
    require(len(values) > 0, "a rate needs at least one problem, got 0")
    scores = np.asarray(values, np.float64)
    if np.isin(scores, (0.0, 1.0)).all():
        from scipy.stats import binomtest  # here: its import takes a second

        test = binomtest(int(scores.sum()), len(scores))
        low, high = test.proportion_ci(confidence_level=CONFIDENCE, method="wilson")
    else:
        rng = np.random.default_rng(0)
        means = [scores[rng.integers(len(scores), size=len(scores))].mean() for _ in range(RESAMPLES)]
        low, high = np.quantile(means, BOUNDS)
    return Rate(float(scores.mean()), float(low), float(high), len(scores))


def mean_of_rates(rates: Sequence[Rate]) -> Rate:
    """The mean of rates over different problems, each rate with the same weight, and its 95 % interval.

    The distances of the rates to their bounds are added in squares, on each side (Zou and Donner, 2008: Construction of
    confidence limits about effect measures). Raises `InputError` for no rate.

    >>> mean_of_rates([Rate(0.5, 0.25, 0.5, 4), Rate(0.0, 0.0, 1.0, 2)])
    Rate(mean=0.25, low=0.125, high=0.75, problems=6)
    """
    require(len(rates) > 0, "a mean needs at least one rate, got 0")
    mean, count = sum(rate.mean for rate in rates) / len(rates), len(rates)
    below = math.hypot(*(rate.mean - rate.low for rate in rates)) / count
    above = math.hypot(*(rate.high - rate.mean for rate in rates)) / count
    return Rate(mean, max(0.0, mean - below), min(1.0, mean + above), sum(rate.problems for rate in rates))


def accuracy(scores: Mapping[str, Sequence[float]]) -> Rate:
    """The mean over problems of the share of right completions, from the scores (0 or 1) of each problem."""
    return rate([float(np.mean(values)) for values in scores.values()])


def pass_rates(scores: Mapping[str, Sequence[float]], ks: Sequence[int] = (1, 5, 10)) -> dict[int, Rate]:
    """pass@k for each k for which every problem has enough samples, from the scores (0 or 1) of each problem."""
    fewest = min(map(len, scores.values()), default=0)
    counts = [(len(values), int(sum(values))) for values in scores.values()]
    return {k: rate([pass_at(k, samples=n, correct=right) for n, right in counts]) for k in ks if k <= fewest}


def by_subject(scores: Mapping[str, Sequence[float]], subjects: Mapping[str, str | None]) -> dict[str, Rate]:
    """The accuracy in each subject, in alphabetical order; `subjects` maps each problem to its subject or None."""
    names = sorted({name for problem in scores if (name := subjects[problem]) is not None})
    return {name: accuracy({key: scores[key] for key in scores if subjects[key] == name}) for name in names}


class BootstrapSums:
    """The sums of several measures of tokens by example, which are resampled whole, and the numbers of tokens."""

    def __init__(self) -> None:
        self._counts = np.zeros(0)
        self._sums: dict[str, np.ndarray] = {}

    def add(self, weights: np.ndarray, values: Mapping[str, Any]) -> None:
        """Add a batch: `weights` and each value of shape [B, M]; rows of weight zero are padding."""
        real = weights.sum(axis=1) > 0
        self._counts = np.append(self._counts, weights.sum(axis=1)[real])
        for name, value in values.items():
            sums = (np.asarray(value, np.float64) * weights).sum(axis=1)[real]
            self._sums[name] = np.append(self._sums.get(name, ()), sums)

    def mean(self, name: str, *, minus: str | None = None) -> tuple[float, float, float]:
        """Mean over tokens with the bounds of its 95 % interval; `minus` names a measure to subtract in pairs."""
        counts, sums = self._counts, self._sums[name]
        if minus is not None:
            sums = sums - self._sums[minus]
        picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES // 2, len(counts)))
        low, high = np.quantile(sums[picks].sum(axis=1) / counts[picks].sum(axis=1), BOUNDS)
        return float(sums.sum() / counts.sum()), float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `join` reads."""
        return {"counts": self._counts.tolist(), "sums": {name: sums.tolist() for name, sums in self._sums.items()}}

    @classmethod
    def join(cls, parts: Mapping[str, Mapping[str, Any]]) -> "BootstrapSums":
        """Join parts by name, as `name/measure`; raises `InputError` unless all are of the same examples."""
        joined, [(first, reference), *_] = cls(), list(parts.items())
        joined._counts = np.asarray(reference["counts"])
        for name, part in parts.items():
            if part["counts"] != reference["counts"]:
                raise InputError(f"{name} was measured on other examples than {first}: measure it anew")
            joined._sums |= {f"{name}/{key}": np.asarray(sums) for key, sums in part["sums"].items()}
        return joined
