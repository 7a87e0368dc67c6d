"""Rows by hand, alone and packed, with a place for every position or for the answers alone."""

import numpy as np
import pytest

from l2d_jax.config.schema import DataConfig
from l2d_jax.data.batch import Batch, count_text, stack

ONE = {"tokens": [1, 2, 3, 4], "context": 2, "class": 1}
TWO = {"tokens": [5, 6, 7, 8, 9], "context": 4, "class": 2}


def rows(batch: Batch) -> dict[str, list[list[int]]]:
    return {name: array.tolist() for name, array in batch._asdict().items() if array is not None}


def test_one_example_a_row() -> None:
    config = DataConfig(max_length=5, answer_length=3)
    batch = stack([[ONE], [TWO], []], config, padding=0)
    assert rows(batch) == {
        "tokens": [[1, 2, 3, 0, 0], [5, 6, 7, 8, 0], [0, 0, 0, 0, 0]],
        "queries": [[1, 2, 2], [3, 3, 3], [0, 1, 2]],
        "targets": [[3, 4, 0], [9, 0, 0], [0, 0, 0]],
        "weights": [[1, 1, 0], [1, 0, 0], [0, 0, 0]],
        "classes": [1, 2, 0],
    }
    assert count_text(batch) == 3 + 4


def test_two_examples_in_a_row() -> None:
    batch = stack([[ONE, TWO], [TWO]], DataConfig(max_length=8, answer_length=4, packing=True), padding=0)
    assert rows(batch) == {
        "tokens": [[1, 2, 3, 5, 6, 7, 8, 0], [5, 6, 7, 8, 0, 0, 0, 0]],
        "queries": [[1, 2, 6, 6], [3, 3, 3, 3]],
        "targets": [[3, 4, 9, 0], [9, 0, 0, 0]],
        "weights": [[1, 1, 1, 0], [1, 0, 0, 0]],
        "classes": [[1, 1, 2, 0], [2, 0, 0, 0]],
        "segments": [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 1, 1, 0, 0, 0, 0]],
    }
    np.testing.assert_array_equal(batch.query_segments, [[1, 1, 2, 2], [1, 1, 1, 1]])
    assert count_text(batch) == 3 + 4 + 4


@pytest.mark.parametrize("is_packed", [False, True])
def test_every_position_has_a_place(is_packed: bool) -> None:
    batch = stack([[ONE]], DataConfig(max_length=5, packing=is_packed), padding=0)
    found = rows(batch)
    assert batch.queries is None
    assert found["targets"] == [[0, 3, 4, 0, 0]]
    assert found["weights"] == [[0, 1, 1, 0, 0]]
    assert found["classes"] == ([[0, 1, 1, 0, 0]] if is_packed else [1])


def test_a_working_stands_beside_its_targets() -> None:
    """Shorter ones are followed by the answer; of longer ones evenly spaced steps are taken."""
    one, two = {**ONE, "working": [7, 8, 5, 6]}, {**TWO, "working": []}
    batch = stack([[one], [two]], DataConfig(max_length=5, answer_length=2, working=3), padding=0)
    assert rows(batch)["working"] == [[[7, 5, 3], [8, 6, 4]], [[9, 9, 9], [0, 0, 0]]]
    packed = stack([[two, one]], DataConfig(max_length=8, answer_length=4, packing=True, working=3), padding=0)
    assert rows(packed)["working"] == [[[9, 9, 9], [7, 5, 3], [8, 6, 4], [0, 0, 0]]]
    few = stack([[one]], DataConfig(max_length=5, answer_length=2, working=1), padding=0)
    assert rows(few)["working"] == [[[7], [8]]]
    assert rows(batch.repeat(2))["working"][0] == [[7, 5, 3], [7, 5, 3], [8, 6, 4], [8, 6, 4]]
