"""Means over tokens, their intervals over examples, and tallies that are joined."""

import numpy as np
import pytest

from l2d_jax.errors import InputError
from l2d_jax.training.bootstrap import BootstrapSums


def test_means_over_tokens() -> None:
    tally = BootstrapSums()
    tally.add(np.array([[1, 1, 0], [1, 0, 0]]), {"hit": [[1, 0, 9], [1, 9, 9]], "miss": [[0, 0, 9], [1, 9, 9]]})
    tally.add(np.array([[1, 1, 1], [0, 0, 0]]), {"hit": [[1, 1, 0], [9, 9, 9]], "miss": [[0, 0, 0], [9, 9, 9]]})
    mean, low, high = tally.mean("hit")
    assert mean == 4 / 6
    assert low <= mean <= high
    assert tally.mean("hit", minus="miss")[0] == 3 / 6
    assert tally.mean("hit", minus="hit") == (0.0, 0.0, 0.0)


def test_intervals_cover_the_truth_and_resample_whole_examples() -> None:
    """Examples of 20 equal tokens: the interval is that of 60 examples, not of 1200 tokens."""
    rng, widths, covered = np.random.default_rng(0), [], 0
    for _ in range(100):
        tally, values = BootstrapSums(), rng.normal(size=(60, 1)) + np.zeros((60, 20))
        tally.add(np.ones((60, 20)), {"x": values})
        mean, low, high = tally.mean("x")
        np.testing.assert_allclose(mean, values.mean())
        covered += low <= 0.0 <= high
        widths.append(high - low)
    assert 88 <= covered <= 100
    np.testing.assert_allclose(np.mean(widths), 2 * 1.96 / np.sqrt(60), rtol=0.1)


def test_a_pairs_difference_has_an_interval_of_its_own() -> None:
    rng = np.random.default_rng(0)
    shared, small = rng.normal(size=(50, 8)) * 5, rng.normal(size=(50, 8)) * 0.01
    tally = BootstrapSums()
    tally.add(np.ones((50, 8)), {"a": shared + 0.1 + small, "b": shared})
    mean, low, high = tally.mean("a", minus="b")
    assert 0.09 < low < mean < high < 0.11


def test_joined_tallies_compare_their_measures() -> None:
    parts = {}
    for name, shift in (("a", 0.0), ("b", 0.25)):
        tally = BootstrapSums()
        tally.add(np.ones((4, 2)), {"x": np.arange(8).reshape(4, 2) + shift})
        parts[name] = tally.to_dict()
    joined = BootstrapSums.join(parts)
    assert joined.mean("a/x")[0] == 3.5
    assert joined.mean("b/x", minus="a/x") == (0.25, 0.25, 0.25)
    parts["b"]["counts"][0] = 1.0
    with pytest.raises(InputError, match="b was measured on other examples than a: measure it anew"):
        BootstrapSums.join(parts)
