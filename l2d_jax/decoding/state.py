"""The state of sequences that are being decoded, and operations on its rows and its cache."""

import dataclasses
from functools import partial

from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.buckets import Programs
from l2d_jax.model.kv_cache import KVCache


@nnx.dataclass
class State(nnx.Module):
    """Everything that the next token depends on."""

    cache: KVCache = nnx.data()
    hidden: Float[Array, "B D"] = nnx.data()  # last hidden state of the LM at the newest token
    inputs: Float[Array, "B D"] = nnx.data()  # embedding of the newest token
    positions: Int[Array, " B"] = nnx.data()  # position of the newest token
    keys: Key[Array, " B"] = nnx.data()  # one per sequence
    count: Int[Array, " B"] = nnx.data()  # tokens generated so far
    done: Bool[Array, " B"] = nnx.data()  # whether the sequence has ended
    broken: Bool[Array, " B"] = nnx.data()  # whether it ended because a logit was NaN


COLUMNS = ("hidden", "inputs", "positions", "keys", "count", "done", "broken")  # fields with a row per sequence


def resize(state: State, *, ring: int, slots: int) -> State:
    """The state with `ring` slots for new tokens and `slots` slots for prompts; unchanged if it has them already."""
    if (state.cache.ring, state.cache.positions.shape[1]) == (ring, ring + slots):
        return state
    return dataclasses.replace(state, cache=_resize_cache(state.cache, ring=ring, slots=slots))


_resize_cache = Programs(KVCache.resize, static=["ring", "slots"])


def select(state: State, rows: Int[Array, " rows"]) -> State:
    """The state of the sequences `rows`, in this order; a row may occur several times, or not at all."""
    cache = state.cache
    cache = dataclasses.replace(cache, k=cache.k[:, rows], v=cache.v[:, rows], positions=cache.positions[rows])
    return dataclasses.replace(state, cache=cache, **{name: getattr(state, name)[rows] for name in COLUMNS})


@Programs
def fan_out(state: State, rows: Int[Array, " B"], keys: Key[Array, " B"]) -> State:
    """Copies of sequences whose prompts have been read, each with a new key."""
    return dataclasses.replace(select(state, rows), keys=keys)


@partial(Programs, donate_argnames="state")
def refill(state: State, new: State, lanes: Int[Array, " rows"]) -> State:
    """Put each row of `new`, whose prompt has just been read, into the lane that `lanes` gives for it.

    A row whose lane is beyond the last one is dropped. The other lanes keep their sequences. Both caches have the same
    number of slots.
    """
    old, read = state.cache, new.cache
    k, v = (a.at[:, lanes].set(b, mode="drop") for a, b in ((old.k, read.k), (old.v, read.v)))
    places = old.positions.at[lanes].set(read.positions, mode="drop")
    cache = dataclasses.replace(old, k=k, v=v, positions=places)
    rows = {name: getattr(state, name).at[lanes].set(getattr(new, name), mode="drop") for name in COLUMNS}
    return dataclasses.replace(state, cache=cache, **rows)
