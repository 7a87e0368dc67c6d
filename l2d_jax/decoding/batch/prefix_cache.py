"""Keys and values of tokens that were read before, so that equal beginnings of prompts are read once.

Tokens are kept in blocks. A block belongs to its own tokens and to all tokens before it, so a prompt finds the longest
sequence of blocks with which it begins. Notable: the blocks lie in one array, allocated at the start, so memory never
grows; blocks are moved in and out by index, so there is one program for each size of a decoding state and none for each
length; on several devices, each holds a part of every block. Where all places are taken, the block that was unused for
the longest time makes room. As the blocks before it were used whenever it was, no block loses those before it.

Several threads may use a cache in turns, and none gives its turn to another between `find` and `load`, or in `keep`.
"""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.buckets import Programs, pausing
from l2d_jax.distributed.sharding import constrain
from l2d_jax.errors import require
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.llm import LLM

BLOCK = 16  # tokens
TOGETHER = 16  # blocks that one call of a program writes


class _Pool(NamedTuple):
    """The keys and values of all blocks."""

    k: Float[Array, "L blocks K size H"]
    v: Float[Array, "L blocks K size H"]

    def split(self) -> "_Pool":
        """The same, of which each device holds a part."""
        return _Pool(*(constrain(array, "layers", "parts", "kv_heads", "block", "head_dim") for array in self))


@dataclass(eq=False)
class _Block:
    """A block, which is the same only as itself: its tokens may follow others elsewhere."""

    place: int  # in the pool


_Key: TypeAlias = tuple[Hashable, tuple[int, ...]]  # of a block: the block before it, or the reader; its tokens


@dataclass
class CacheCounts:
    """What a cache has done so far."""

    found: int = 0  # tokens of prompts whose keys and values came from the cache
    read: int = 0  # tokens of prompts that were read
    evicted: int = 0  # blocks that made room for others


class PrefixCache:
    """The latest blocks of tokens, of one or several models that read them."""

    def __init__(self, llm: LLM, *, size: int) -> None:
        """Allocate the cache; raises `InputError` if `size`, in bytes, does not hold a block."""
        self._block_bytes = BLOCK * llm.token_bytes
        self._count = size // self._block_bytes
        problem = f"a prefix cache of {size / 2**20:g} MiB does not hold {BLOCK} tokens"
        need = f"which take {self._block_bytes / 2**20:.3g} MiB here"
        require(self._count > 0, f"{problem}, {need}: make it larger, or 0 for none")
        a = llm.architecture
        shape = (a.num_hidden_layers, self._count, a.num_key_value_heads, BLOCK, a.head_dim)
        self._empty = partial(_empty_pool, shape=shape, dtype=llm.dtype)
        self._pool = self._empty()
        self._known: OrderedDict[_Key, _Block] = OrderedDict()  # the block that was used last comes last
        self.counts = CacheCounts()

    @property
    def size(self) -> int:
        """The bytes of all blocks."""
        return self._count * self._block_bytes

    @property
    def used_bytes(self) -> int:
        """The bytes of the blocks that are in use."""
        return len(self._known) * self._block_bytes

    def count(self, *, found: int, read: int) -> None:
        """Count the tokens of a prompt that came from the cache, and those that were read."""
        self.counts.found += found
        self.counts.read += read

    def clear(self) -> None:
        """Forget everything, for example after an error of a program, which may have left the pool without values."""
        self._known.clear()
        self._pool = self._empty()

    def find(self, reader: Hashable, ids: Sequence[int]) -> list[int]:
        """The places of the known blocks with which `ids` begin, as `reader` has read them."""
        return [self._known[key].place for key in self._chain(reader, ids)]

    def load(self, places: Sequence[int], *, tokens: int, slots: int) -> KVCache:
        """A cache of one row with `slots` slots, of which the first `tokens` are those of the blocks at `places`."""
        padded = np.zeros(-(-slots // BLOCK), np.int32)
        padded[: len(places)] = places
        with pausing(None):
            return _load(self._pool, jnp.asarray(padded), jnp.int32(tokens), slots=slots)

    def keep(self, reader: Hashable, ids: Sequence[int], cache: KVCache, *, row: int) -> None:
        """Keep the whole blocks of `ids`, whose keys and values are in a row of `cache`.

        If not all of them fit, the first ones are kept.
        """
        chain = self._chain(reader, ids)
        known = len(chain)
        parent = self._known[chain[-1]] if chain else reader
        for first in range(known * BLOCK, len(ids) - BLOCK + 1, BLOCK):
            place = self._make_place(newest=len(chain))
            if place is None:
                break
            key = parent, tuple(ids[first : first + BLOCK])
            parent = self._known[key] = _Block(place)
            chain.append(key)
        self._renew(chain)
        new = [self._known[key].place for key in chain[known:]]
        try:
            for first in range(0, len(new), TOGETHER):
                places = np.full(TOGETHER, self._count, np.int32)  # beyond the last place: dropped
                places[: len(new) - first] = new[first : first + TOGETHER]
                begin = jnp.int32((known + first) * BLOCK)
                with pausing(None):
                    self._pool = _store(self._pool, cache, jnp.int32(row), begin, jnp.asarray(places))
        except BaseException:
            self.clear()
            raise

    def _chain(self, reader: Hashable, ids: Sequence[int]) -> list[_Key]:
        """The known blocks with which `ids` begin; this counts as a use of them."""
        chain: list[_Key] = []
        parent: Hashable = reader
        for first in range(0, len(ids) - BLOCK + 1, BLOCK):
            key = parent, tuple(ids[first : first + BLOCK])
            if key not in self._known:
                break
            chain.append(key)
            parent = self._known[key]
        self._renew(chain)
        return chain

    def _renew(self, chain: Sequence[_Key]) -> None:
        """Make these blocks the ones that were used last; the first one is then the very last."""
        for key in reversed(chain):
            self._known.move_to_end(key)

    def _make_place(self, *, newest: int) -> int | None:
        """A place for another block, if need be that of the oldest; None if only the `newest` blocks are left."""
        if len(self._known) < self._count:
            return len(self._known)
        if newest == self._count:
            return None
        _, oldest = self._known.popitem(last=False)
        self.counts.evicted += 1
        return oldest.place


@partial(Programs, static=["shape", "dtype"])
def _empty_pool(*, shape: tuple[int, ...], dtype: Any) -> _Pool:
    return _Pool(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)).split()


@partial(Programs, static=["slots"])
def _load(pool: _Pool, places: Int[Array, " n"], tokens: Int[Array, ""], *, slots: int) -> KVCache:
    def join(blocks: Float[Array, "L blocks K size H"]) -> Float[Array, "L 1 K S H"]:
        found = blocks[:, places].swapaxes(1, 2)  # [L, K, blocks, size, H]
        found = found.reshape(*found.shape[:2], -1, found.shape[-1])[:, None, :, :slots]
        return constrain(found, "layers", "batch", "kv_heads", "length", "head_dim")

    at = jnp.arange(slots, dtype=jnp.int32)[None]
    return KVCache(join(pool.k), join(pool.v), jnp.where(at < tokens, at, -1), used=tokens, ring=slots)


@partial(Programs, donate_argnames="pool")
def _store(pool: _Pool, cache: KVCache, row: Int[Array, ""], begin: Int[Array, ""], places: Int[Array, " n"]) -> _Pool:
    """Put the tokens of a row from position `begin` on into the blocks at `places`."""
    positions = begin + jnp.arange(len(places) * BLOCK, dtype=jnp.int32)
    slots = jnp.argmax(cache.positions[row] == positions[:, None], axis=1)

    def put(blocks: Float[Array, "L blocks K size H"], read: Float[Array, "L B K S H"]) -> Array:
        new = read[:, row][:, :, slots]  # [L, K, tokens, H]
        new = new.reshape(*new.shape[:2], -1, BLOCK, new.shape[-1]).swapaxes(1, 2)
        return blocks.at[:, places].set(new, mode="drop")

    return _Pool(put(pool.k, cache.k), put(pool.v, cache.v)).split()
