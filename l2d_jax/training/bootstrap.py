"""Sums by example of values measured at each token: means over tokens, with bootstrap intervals over examples."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from l2d_jax.errors import InputError

RESAMPLES = 1000  # bootstrap resamples of the examples


class BootstrapSums:
    """The sums of several measures by example, and the number of tokens of each example."""

    def __init__(self) -> None:
        self._sums: dict[str, list[np.ndarray]] = {}
        self._counts: list[np.ndarray] = []

    def add(self, weights: np.ndarray, values: Mapping[str, Any]) -> None:
        """Add a batch: `weights` and each value of shape [B, M]; rows of weight zero are padding."""
        real = weights.sum(axis=1) > 0
        self._counts.append(weights.sum(axis=1)[real])
        for name, value in values.items():
            sums = (np.asarray(value, np.float64) * weights).sum(axis=1)[real]
            self._sums.setdefault(name, []).append(sums)

    def mean(self, name: str, *, minus: str | None = None) -> tuple[float, float, float]:
        """Mean over tokens with the bounds of its 95 % interval; `minus` names a measure to subtract in pairs."""
        counts = np.concatenate(self._counts)
        sums = np.concatenate(self._sums[name])
        if minus is not None:
            sums = sums - np.concatenate(self._sums[minus])
        picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
        means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(sums.sum() / counts.sum()), float(low), float(high)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, which `join` reads."""
        sums = {name: np.concatenate(parts).tolist() for name, parts in self._sums.items()}
        return {"counts": np.concatenate(self._counts).tolist(), "sums": sums}

    @classmethod
    def join(cls, parts: Mapping[str, Mapping[str, Any]]) -> "BootstrapSums":
        """Join parts by name, as `name/measure`; raises `InputError` unless all are of the same examples."""
        joined, [(first, reference), *_] = cls(), list(parts.items())
        joined._counts = [np.asarray(reference["counts"])]
        for name, part in parts.items():
            if part["counts"] != reference["counts"]:
                raise InputError(f"{name} was measured on other examples than {first}: measure it anew")
            joined._sums |= {f"{name}/{key}": [np.asarray(sums)] for key, sums in part["sums"].items()}
        return joined
