"""The state of a stream of tokens, and operations on it between passes.

Sequences advance independently: the tokens of each fill the slots of the cache's ring in order, from slot 0 on.
"""

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Int

from l2d_jax.decoding.buckets import Programs
from l2d_jax.decoding.state import State, refill, resize
from l2d_jax.model.kv_cache import SLOTS, KVCache
from l2d_jax.model.llm import LLM


@nnx.dataclass
class Stream(nnx.Module):
    """Everything that the next pass depends on."""

    state: State = nnx.data()  # at the newest token that the LM has read
    next: Int[Array, " B"] = nnx.data()  # the token after it; a guess while it is being checked
    is_checked: Bool[Array, " B"] = nnx.data()  # whether `next` is a guess; if not, it is known but not read
    is_plain: Bool[Array, " B"] = nnx.data()  # whether the LM alone decides `next`
    settled: Int[Array, " B"] = nnx.data()  # number of leading evaluations whose estimates are final
    estimates: Int[Array, "B n"] = nnx.data()  # tokens; those beyond the settled ones are guesses
    read: Int[Array, " B"] = nnx.data()  # number of tokens in the ring
    passes: Int[Array, " B"] = nnx.data()  # passes since the last emitted token


COLUMNS = tuple(field.name for field in dataclasses.fields(Stream) if field.name != "state")


def blank(state: State, *, size: int) -> Stream:
    """A stream of rows without answers, with room for `size` evaluations of a token."""
    none = jnp.zeros_like(state.count)
    return Stream(
        state=dataclasses.replace(state, cache=dataclasses.replace(state.cache, used=jnp.int32(0))),
        next=none,
        is_checked=none == 0,
        is_plain=none > 0,
        settled=none,
        estimates=jnp.zeros((len(none), size), jnp.int32),
        read=none,
        passes=none,
    )


def ring(state: State | Stream) -> int:
    """The number of slots for new tokens."""
    return state.state.cache.ring if isinstance(state, Stream) else state.cache.ring


def fit(state: State | Stream, *, ring: int, slots: int) -> State | Stream:
    """Change the numbers of slots, as `state.resize` does."""
    if not isinstance(state, Stream):
        return resize(state, ring=ring, slots=slots)
    resized = resize(state.state, ring=ring, slots=slots)
    # Tokens keep their slots in the ring.
    cache = dataclasses.replace(resized.cache, used=jnp.zeros_like(resized.cache.used))
    return dataclasses.replace(state, state=dataclasses.replace(resized, cache=cache))


def make_room(stream: Stream, size: int) -> Stream:
    """The stream with places for at least `size` evaluations of a token; those in use are kept."""
    before = stream.estimates.shape[1]
    if size == before:
        return stream
    widened = jnp.pad(stream.estimates, ((0, 0), (0, max(0, size - before))), mode="edge")[:, :size]
    return dataclasses.replace(stream, estimates=widened)


def put(state: State | Stream, new: State | Stream, lanes: Int[Array, " rows"]) -> State | Stream:
    """Put each row of `new` into a lane, as `state.refill` does; `state` is donated."""
    if not isinstance(state, Stream):
        return refill(state, new, lanes)
    assert isinstance(new, Stream)
    refilled = {}
    new = make_room(new, state.estimates.shape[1])
    for name in COLUMNS:
        refilled[name] = getattr(state, name).at[lanes].set(getattr(new, name), mode="drop")
    return dataclasses.replace(state, state=refill(state.state, new.state, lanes), **refilled)


def end(state: State | Stream, done: Bool[Array, " B"]) -> State | Stream:
    """Mark the sequences `done` as ended, and all others as running."""
    if isinstance(state, Stream):
        return dataclasses.replace(state, state=dataclasses.replace(state.state, done=done))
    return dataclasses.replace(state, done=done)


@Programs
def leave_stream(llm: LLM, stream: Stream) -> State:
    """Leave the stream: the state with which `decode_tokens` continues. Known but unread tokens are read."""
    state, cache = stream.state, stream.state.cache
    following = state.positions + 1
    hidden, new = llm(stream.next[:, None], following[:, None], cache)
    is_read = ~stream.is_checked & ~state.done
    cache = write(cache, new, stream.read, is_read)
    read = stream.read + is_read
    order = (jnp.arange(cache.ring) + read[:, None]) % cache.ring  # the newest token of each sequence comes last

    def align(array: Array, axis: int) -> Array:
        ring, rest = jnp.split(array, [cache.ring], axis=axis)
        index = order if axis == 1 else order[None, :, None, :, None]
        return jnp.concatenate([jnp.take_along_axis(ring, index, axis=axis), rest], axis=axis)

    k, v, positions = align(cache.k, SLOTS), align(cache.v, SLOTS), align(cache.positions, 1)
    return dataclasses.replace(
        state,
        cache=dataclasses.replace(cache, k=k, v=v, positions=positions, used=jnp.int32(0)),
        hidden=jnp.where(is_read[:, None], hidden[:, 0], state.hidden),
        inputs=jnp.where(is_read[:, None], llm.lookup(stream.next[:, None])[:, 0], state.inputs),
        positions=jnp.where(is_read, following, state.positions),
    )


def write(cache: KVCache, new: KVCache, read: Int[Array, " B"], is_kept: Bool[Array, " B"]) -> KVCache:
    """Write one new token of each sequence, if it is kept, into the slot after the `read` ones that the ring has."""
    slots = new.positions[:, 0] if cache.by_position else read % cache.ring
    nowhere = cache.positions.shape[1]  # a slot beyond the last
    return cache.put(new, jnp.where(is_kept, slots, nowhere))
