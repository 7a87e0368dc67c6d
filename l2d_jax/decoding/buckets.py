"""Pads prompts and answers to a few lengths, so that few programs are compiled."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from l2d_jax.distributed import sharding

SHORTEST_BUCKET = 32  # tokens
CHUNK = 8  # tokens between two pieces of a stream: an answer has room for a whole number of them


def answer_slots(tokens: int) -> int:
    """The slots of a cache for an answer of at most `tokens`."""
    return -(-tokens // CHUNK) * CHUNK


def pad(
    prompts: Sequence[Sequence[int]], *, length: int | None = None, shortest: int = SHORTEST_BUCKET
) -> tuple[Int[jax.Array, "B P"], Int[jax.Array, " B"]]:
    """Prompts as rows of `length` (None: of a bucket), padded on the right and spread over the mesh; their lengths."""
    length = length or round_up(max(map(len, prompts)), shortest=shortest)
    ids = np.zeros((len(prompts), length), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    return sharding.spread(ids), sharding.spread(np.array([len(prompt) for prompt in prompts], np.int32))


def positions(lengths: Int[jax.Array, " B"], slots: Int[jax.Array, " P"], *, prefix: int = 0) -> Int[jax.Array, "B P"]:
    """The positions of these slots of padded prompts behind a prefix; those of padding are -1."""
    return jnp.where(slots < lengths[:, None], prefix + slots, -1)


def round_up(length: int, *, shortest: int = SHORTEST_BUCKET) -> int:
    """The smallest bucket of at least `length` tokens; at most a third of it is padding.

    The buckets are 32, 48, 64, 96, 128, 192 and so on. They begin with `shortest`, a power of two.
    """
    power = max(shortest, 1 << (length - 1).bit_length())
    between = 3 * power // 4
    return between if between > shortest and length <= between else power
