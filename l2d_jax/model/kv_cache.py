"""The KV cache of the LM: decoding extends it, and the diffusion path reads it."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from l2d_jax.distributed import sharding
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.attention import Part, causal_mask

SLOTS = 3  # axis of the slots: a head's keys lie next to each other, as attention reads them
UNROLLED = 16  # rows that a TPU writes in one step of a loop


class LayerCache(NamedTuple):
    """What the attention of one layer reads; with a leading axis L, of all layers, for a scan over them."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S H"]
    prefix: tuple[Float[Array, "*L K P H"], Float[Array, "*L K P H"]] | None  # keys and values that all rows share

    def others(self, q_positions: Int[Array, "B T"], window: Int[Array, ""] | None) -> tuple[Part, ...]:
        """What attention reads in addition to `k` and `v`: the prefix, masked by what the queries see."""
        if self.prefix is None:
            return ()
        before = jnp.arange(self.prefix[0].shape[1], dtype=jnp.int32)[None]
        return ((*self.prefix, None if window is None else causal_mask(q_positions, before, window)),)


@nnx.dataclass
class KVCache(nnx.Module):
    """Keys (already rotated) and values of the LM, with the position of each slot."""

    k: Float[Array, "L B K S H"] = nnx.data()
    v: Float[Array, "L B K S H"] = nnx.data()
    positions: Int[Array, "B S"] = nnx.data()  # position of the token in each slot; -1: the slot is empty
    used: Int[Array, ""] = nnx.data()  # number of tokens that `extend` has written, the same for all rows
    segments: Int[Array, "B S"] | None = nnx.data(default=None)  # sequence of each slot; None: one sequence per row
    prefix: "KVCache | None" = nnx.data(default=None)  # one full row: the tokens before those of every row
    ring: int = nnx.static(default=0)  # size of the ring: the first slots, which `extend` fills in a cycle
    by_position: bool = nnx.static(default=False)  # whether `extend` writes each token into the slot of its position

    @classmethod
    def empty(
        cls, architecture: Architecture, batch: int, slots: int, *, dtype: Any, prefix: "KVCache | None" = None
    ) -> "KVCache":
        """An empty cache; all its `slots` belong to the ring."""
        a = architecture
        shape = (a.num_hidden_layers, batch, a.num_key_value_heads, slots, a.head_dim)
        zeros, positions = jnp.zeros(shape, dtype), jnp.full((batch, slots), -1, jnp.int32)
        return cls(k=zeros, v=zeros, positions=positions, used=jnp.int32(0), prefix=prefix, ring=slots)

    def beside(self, new: "KVCache") -> "KVCache":
        """Append slots that hold the tokens of `new`."""
        k, v = (jnp.concatenate(pair, axis=SLOTS) for pair in ((self.k, new.k), (self.v, new.v)))
        return dataclasses.replace(self, k=k, v=v, positions=jnp.concatenate((self.positions, new.positions), axis=1))

    def extend(self, new: "KVCache") -> "KVCache":
        """Write the tokens of `new` into the next slots of the ring; each row must hold one sequence."""
        assert self.segments is None
        assert new.segments is None
        if self.by_position:
            return self.put(new, new.positions[:, 0])
        slot = self.used % self.ring

        def write(old: Array, update: Array, axis: int) -> Array:
            return jax.lax.dynamic_update_slice_in_dim(old, update, slot, axis)

        k, v = (write(old, update, SLOTS) for old, update in ((self.k, new.k), (self.v, new.v)))
        positions = write(self.positions, new.positions, 1)
        return dataclasses.replace(self, k=k, v=v, positions=positions, used=self.used + new.used)

    def put(self, new: "KVCache", slots: Int[Array, " B"]) -> "KVCache":
        """Write the one token of each row of `new` into a slot of that row; a slot beyond the last is dropped."""
        assert new.positions.shape[1] == 1
        write = _write_in_turn if sharding.platform() == "tpu" else _scatter
        k, v = write(self.k, new.k, slots), write(self.v, new.v, slots)
        positions = self.positions.at[jnp.arange(len(slots)), slots].set(new.positions[:, 0], mode="drop")
        return dataclasses.replace(self, k=k, v=v, positions=positions)

    def resize(self, ring: int, slots: int) -> "KVCache":
        """Change the size of the ring, which must not shrink, and the number of slots after it to `slots`.

        Slots that disappear must be empty.
        """
        kept = min(slots, self.positions.shape[1] - self.ring)

        def move(array: Array, axis: int, empty: int) -> Array:
            written = jax.lax.slice_in_dim(array, 0, self.ring, axis=axis)
            if ring > self.ring:  # rotate the oldest token to the front, so that the new slots are written next
                written = jnp.roll(written, -self.used, axis=axis)
            read = jax.lax.slice_in_dim(array, self.ring, self.ring + kept, axis=axis)

            def extend(part: Array, size: int) -> Array:
                shape = [*part.shape[:axis], size - part.shape[axis], *part.shape[axis + 1 :]]
                return jnp.concatenate([part, jnp.full(shape, empty, part.dtype)], axis=axis)

            return jnp.concatenate([extend(written, ring), extend(read, slots)], axis=axis)

        k, v, positions = move(self.k, SLOTS, 0), move(self.v, SLOTS, 0), move(self.positions, 1, -1)
        used = self.used if ring == self.ring else jnp.int32(self.ring)
        return dataclasses.replace(self, k=k, v=v, positions=positions, used=used, ring=ring)

    def layers(self) -> LayerCache:
        """The keys and values that a scan over layers reads, one layer at a time."""
        return LayerCache(self.k, self.v, None if self.prefix is None else (self.prefix.k[:, 0], self.prefix.v[:, 0]))


def _scatter(old: Float[Array, "L B K S H"], new: Float[Array, "L B K 1 H"], slots: Int[Array, " B"]) -> Array:
    """Write one token of each row into its slot."""
    rows = jnp.arange(len(slots))
    return old.at[:, rows, :, slots].set(jnp.moveaxis(new[..., 0, :], 1, 0), mode="drop")


def _write_in_turn(old: Float[Array, "L B K S H"], new: Float[Array, "L B K 1 H"], slots: Int[Array, " B"]) -> Array:
    """`_scatter`, row after row on each device: a TPU scatters slowly, and copies a cache that it rewrites in parts."""

    def local(old: Array, new: Array, slots: Array) -> Array:
        def write(row: Array, old: Array) -> Array:
            place = (0, row, 0, jnp.minimum(slots[row], old.shape[SLOTS] - 1), 0)
            there = jax.lax.dynamic_slice(old, place, (len(old), 1, *new.shape[2:]))
            one = jax.lax.dynamic_slice_in_dim(new, row, 1, axis=1)
            one = jnp.where(slots[row] < old.shape[SLOTS], one, there)
            return jax.lax.dynamic_update_slice(old, one, place)

        return jax.lax.fori_loop(0, len(slots), write, old, unroll=min(len(slots), UNROLLED))

    mesh = jax.sharding.get_abstract_mesh()
    if mesh.size <= 1:
        return local(old, new, slots)
    rows, heads = sharding.partition(("batch", "kv_heads"), old.shape[1:SLOTS], mesh)
    spec = PartitionSpec(None, rows, heads)
    run = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec, PartitionSpec(rows)), out_specs=spec, check_vma=False)
    return run(old, new, slots)
