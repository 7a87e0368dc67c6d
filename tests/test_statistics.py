"""Statistics of scores, against their definitions."""

import itertools
import math

import numpy as np
import pytest

from l2d_jax.errors import InputError
from l2d_jax.statistics import BootstrapSums, accuracy, by_subject, pass_at, pass_rates, rate


@pytest.mark.parametrize("samples", range(1, 8))
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(samples: int) -> None:
    for correct in range(samples + 1):
        scores = [1] * correct + [0] * (samples - correct)
        for k in range(1, samples + 1):
            draws = list(itertools.combinations(scores, k))
            expected = sum(any(draw) for draw in draws) / len(draws)
            assert pass_at(k, samples=samples, correct=correct) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("correct", "total"), [(0, 5), (5, 5), (1, 1), (40, 100), (517, 1319)])
def test_the_interval_of_a_share_is_wilson_s(correct: int, total: int) -> None:
    z, share = 1.959963984540054, correct / total
    middle = (share + z * z / (2 * total)) / (1 + z * z / total)
    half = z / (1 + z * z / total) * math.sqrt(share * (1 - share) / total + z * z / (4 * total * total))
    found = rate([1.0] * correct + [0.0] * (total - correct))
    assert (found.mean, found.problems) == (share, total)
    assert (found.low, found.high) == pytest.approx((middle - half, middle + half), abs=1e-9)


def test_the_interval_of_other_means_is_a_bootstrap_s() -> None:
    values = np.random.default_rng(1).uniform(size=400).tolist()
    found = rate(values)
    error = 1.96 * np.std(values) / math.sqrt(len(values))  # the normal approximation, close for so many
    assert (found.low, found.high) == pytest.approx((found.mean - error, found.mean + error), abs=error / 8)
    assert rate(values) == found


def test_rates_of_several_samples() -> None:
    scores = {"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0, 0.0], "c": [1.0, 1.0, 1.0], "d": [0.0, 1.0]}
    rates = pass_rates(scores, ks=(1, 2, 3, 10))
    assert rates.keys() == {1, 2}  # d has two alone
    assert rates[1].mean == pytest.approx((1 / 3 + 0 + 1 + 1 / 2) / 4)
    assert rates[2].mean == pytest.approx((2 / 3 + 0 + 1 + 1) / 4)
    assert accuracy(scores).mean == pytest.approx(rates[1].mean)
    assert pass_rates({"a": [1.0], "b": [0.0]})[1] == rate([1.0, 0.0])
    assert pass_rates({}) == {}


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"a rate needs at least one problem, got 0"):
        accuracy({})


def test_subjects_have_a_row_each() -> None:
    scores = {"1": [1.0], "2": [0.0], "3": [1.0], "4": [0.0]}
    table = by_subject(scores, {"1": "law", "2": "art", "3": "law", "4": None})
    assert {name: (row.mean, row.problems) for name, row in table.items()} == {"art": (0.0, 1), "law": (1.0, 2)}
    assert list(table) == ["art", "law"]
    assert tuple(table["law"]) == pytest.approx((1.0, 0.342, 1.0, 2), abs=5e-4)
    assert table["art"]._asdict()["problems"] == 1


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
