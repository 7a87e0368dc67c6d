"""Compiled programs are few, and those that go unused are dropped."""

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.decoding.buckets import LONG, PROGRAMS, SAMPLES, TOGETHER, Programs, is_long, sample_bucket


def live_programs() -> int:
    """Those that this process holds in the memory of its device."""
    gc.collect()
    return len(jax.devices()[0].client.live_executables())


def scale(numbers: Any, *, factor: int, offset: Any = None) -> Any:
    return factor * numbers if offset is None else factor * numbers + offset


def test_only_the_latest_programs_are_kept() -> None:
    programs = Programs(scale, static=["factor"])
    before = live_programs()
    for factor in range(PROGRAMS + 9):
        np.testing.assert_array_equal(programs(jnp.arange(3), factor=factor), factor * np.arange(3))
    assert programs.count == PROGRAMS
    assert live_programs() - before <= PROGRAMS + 2
    first = programs._program((jnp.arange(3),), {"factor": PROGRAMS})
    assert first is programs._program((jnp.ones(3, jnp.int32),), {"factor": PROGRAMS})
    del programs, first
    assert live_programs() - before <= 4


def test_programs_are_told_apart_by_all_that_shapes_them() -> None:
    programs = Programs(scale, static=["factor"])
    calls: list[dict[str, Any]] = [{"factor": 2}, {"factor": 3}, {"factor": 2, "offset": jnp.int32(1)}]
    for length in (2, 3):
        for options in calls:
            for numbers in (jnp.arange(length), jnp.arange(length, dtype=jnp.float32)):
                wanted = options["factor"] * np.arange(length) + int(options.get("offset", 0))
                np.testing.assert_array_equal(programs(numbers, **options), wanted)
    assert programs.count == 12


def test_buckets_of_noise_samples() -> None:
    assert [sample_bucket(draws) for draws in (1, 2, 3, 8, 9, 17, 129, 4096)] == [1, 2, 4, 8, 16, 128, 1024, 4096]
    assert all(bucket % TOGETHER == 0 for bucket in SAMPLES if bucket > TOGETHER)
    assert len({sample_bucket(draws) for draws in range(2, 22)}) <= 5
    assert SAMPLES[-1] == 4096  # the largest number that a config takes


@pytest.mark.parametrize("count", [2, 7, 300])
def test_a_noise_sample_is_the_same_in_each_bucket(count: int) -> None:
    """Which lets an answer depend on its draws alone, and not on those of its neighbours."""
    key = jax.random.key(5)
    whole, keys = jax.random.normal(key, (4096, 3)), jax.random.key_data(jax.random.split(key, 4096))
    np.testing.assert_array_equal(jax.random.normal(key, (count, 3)), whole[:count])
    np.testing.assert_array_equal(jax.random.key_data(jax.random.split(key, count)), keys[:count])


def test_what_takes_long_is_decoded_token_by_token() -> None:
    """By the bucket, so that a bucket has one number of tokens for each budget."""
    assert [is_long(budget, 1) for budget in (1, 15, LONG, LONG + 1)] == [False, False, False, True]
    assert [is_long(3, draws) for draws in range(1, 10)] == [False] * 4 + [True] * 5
