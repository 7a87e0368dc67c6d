"""The KV cache: where tokens are written."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.distributed import sharding
from l2d_jax.model.kv_cache import KVCache


def filled(slots: int, *, first: int, ring: int) -> KVCache:
    """A cache of three rows, whose entries all differ."""
    shape = (2, 3, 2, slots, 4)
    k = first + jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    positions = first + jnp.arange(3 * slots, dtype=jnp.int32).reshape(3, slots)
    return KVCache(k, -k, positions, used=jnp.int32(0), ring=ring)


def test_each_row_has_a_slot_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TPU rewrites the ring, other devices scatter; a slot beyond the last is dropped."""
    old, new, slots = filled(8, first=0, ring=5), filled(1, first=1000, ring=1), [4, 8, 0]
    want = [np.array(array) for array in (old.k, old.v, old.positions)]
    for row in (0, 2):
        want[0][:, row, :, slots[row]], want[1][:, row, :, slots[row]] = new.k[:, row, :, 0], new.v[:, row, :, 0]
        want[2][row, slots[row]] = new.positions[row, 0]
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(sharding, "platform", lambda platform=platform: platform)
        found = old.put(new, jnp.array(slots))
        for array, wanted in zip((found.k, found.v, found.positions), want, strict=True):
            np.testing.assert_array_equal(array, wanted)


def test_a_slot_of_a_position_may_be_behind_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    old = dataclasses.replace(filled(8, first=0, ring=5), by_position=True)
    found = old.put(filled(1, first=1000, ring=1), jnp.array([6, 7, 8]))
    assert found.positions[:, 5:].tolist() == [[5, 1000, 7], [13, 14, 1001], [21, 22, 23]]
