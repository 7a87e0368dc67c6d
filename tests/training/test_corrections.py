"""What refinement does to tokens: shares by entropy and position, and what gates leave of them."""

import numpy as np
import pytest

from l2d_jax.statistics import BootstrapSums
from l2d_jax.training.held_out.corrections import BINS, bin_names, by_bin, gates, token_values, value_names

# Two answers of three and two tokens, and a position of padding; the path corrects one token and breaks another.
WEIGHTS = np.array([[1.0, 1.0, 1.0], [0.0, 1.0, 1.0]])
ENTROPY = np.array([[0.0, 0.2, 3.0], [9.0, 0.2, 1.5]])
LM = np.array([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
PATH = np.array([[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]])


@pytest.fixture
def sums():
    scores = {"1": {"greedy": LM, "entropy": ENTROPY}, "3": {"greedy": PATH, "entropy": ENTROPY}}
    values, sums = token_values(scores, WEIGHTS), BootstrapSums()
    assert sorted(values) == sorted(value_names(["3"]))
    sums.add(WEIGHTS, values)
    return sums


def test_each_token_is_in_one_bin_of_each_kind(sums):
    entropy, position = (by_bin(sums, kind, "3") for kind in BINS)
    assert [len(bins) for bins in (entropy, position)] == [len(bin_names(kind)) for kind in BINS]
    for bins in (entropy, position):
        assert [sum(column) for column in zip(*bins, strict=True)] == pytest.approx([1.0, 0.4, 0.2, 0.2])
    shown = dict(zip(bin_names("entropy"), entropy, strict=True))
    assert shown["< 0.001"] == pytest.approx((0.2, 0.2, 0.0, 0.0))
    assert shown["0.1 to 0.3"] == pytest.approx((0.4, 0.2, 0.0, 0.2))
    assert shown[">= 2"] == pytest.approx((0.2, 0.0, 0.2, 0.0))
    first, second, *_ = position  # padding before an answer is no position of it
    assert first == pytest.approx((0.4, 0.2, 0.0, 0.0))
    assert second == pytest.approx((0.6, 0.2, 0.2, 0.2))


def test_gates(sums):
    none, *gated, every, oracle = gates(by_bin(sums, "entropy", "3"))
    assert (none.refined, none.accuracy) == (0.0, pytest.approx(0.4))
    assert every == ("all", pytest.approx(1.0), pytest.approx(0.4))  # one corrected, one broken
    best = {gate.name: gate for gate in gated}["entropy >= 2"]  # which leaves out what is broken
    assert (best.refined, best.accuracy) == (pytest.approx(0.2), pytest.approx(0.6))
    assert (oracle.refined, oracle.accuracy) == (pytest.approx(0.2), pytest.approx(0.6))
    assert [gate.refined for gate in gated] == sorted(gate.refined for gate in gated)
