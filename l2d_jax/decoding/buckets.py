"""Pads prompts to a few lengths, so that few programs are compiled."""

from collections.abc import Sequence

import jax
import numpy as np

from l2d_jax.distributed import sharding

SHORTEST_BUCKET = 64  # tokens that prompts are padded to, or more


def pad(prompts: Sequence[Sequence[int]], *, shortest: int = SHORTEST_BUCKET) -> tuple[jax.Array, jax.Array]:
    """Prompts padded on the right to a length bucket, so that few lengths are ever compiled, spread over the mesh."""
    length = bucket(max(map(len, prompts)), shortest=shortest)
    ids = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return sharding.spread(ids), sharding.spread(np.array([len(prompt) for prompt in prompts], np.int32))


def bucket(length: int, *, shortest: int = SHORTEST_BUCKET) -> int:
    """The least of 64, 96, 128, 192, 256, 384 … that is at least `length`: a third is padding at most.

    They begin with `shortest`, a power of two.
    """
    power = shortest
    while power < length:
        power *= 2
    between = 3 * power // 4
    return between if between > shortest and length <= between else power
