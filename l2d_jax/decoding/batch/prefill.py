"""Reads prompts with the language model: at once, in pieces, or after a prefix that all of them share."""

import dataclasses
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from l2d_jax.decoding.buckets import Programs, positions
from l2d_jax.decoding.state import State
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.llm import LLM


@partial(Programs, static=["capacity"])
def prefill(
    llm: LLM,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    *,
    capacity: int,
    prefix: KVCache | None = None,
) -> State:
    """Read prompts, padded on the right, into a cache with `capacity` further slots for new tokens.

    The tokens of the `prefix` come before every prompt.
    """
    before = None
    if prefix is not None:  # without slots: they would be constants of the program, which XLA folds for seconds
        before = KVCache.empty(llm.architecture, len(lengths), 0, dtype=llm.dtype, prefix=prefix)
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, prompt = llm(tokens, positions(lengths, slots, prefix=prefix_length(prefix)), before)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    return start(llm, prompt, last, tokens, lengths, keys, capacity=capacity, prefix=prefix)


@partial(Programs, static=["capacity"])
def start(
    llm: LLM,
    prompts: KVCache,
    hidden: Float[Array, "B D"],
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    *,
    capacity: int | None,
    prefix: KVCache | None = None,
) -> State:
    """The state after prompts have been read; `hidden` is the hidden state at the end of each.

    There are `capacity` further slots for new tokens. None: each takes the slot of its position, among the prompt's.
    """
    if capacity is None:
        cache = dataclasses.replace(prompts, by_position=True)
    else:
        cache = KVCache.empty(llm.architecture, len(lengths), capacity, dtype=llm.dtype, prefix=prefix).beside(prompts)
    none = jnp.zeros(len(lengths), jnp.int32)
    return State(
        cache=cache,
        hidden=hidden,
        inputs=llm.lookup(jnp.take_along_axis(tokens, (lengths - 1)[:, None], axis=1))[:, 0],
        positions=prefix_length(prefix) + lengths - 1,
        keys=keys,
        count=none,
        done=none > 0,
        broken=none > 0,
    )


@Programs
def read_piece(
    llm: LLM, read: KVCache, last: Float[Array, "B D"], tokens: Int[Array, "B n"], lengths: Int[Array, " B"]
) -> tuple[KVCache, Float[Array, "B D"]]:
    """Read the next tokens of prompts; returns the longer cache, and the hidden state at the end of each prompt.

    `read` is the cache of the tokens before. Its ring has a slot for each token of the padded prompts. `last` are the
    hidden states that the previous piece returned.
    """
    slots = read.used + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, new = llm(tokens, positions(lengths, slots, prefix=prefix_length(read.prefix)), read)
    is_end = slots == lengths[:, None] - 1
    ends = jnp.where(is_end[..., None], hidden, 0).sum(axis=1, dtype=hidden.dtype)
    return read.extend(new), jnp.where(is_end.any(axis=1)[:, None], ends, last)


@Programs
def read_prefix(llm: LLM, tokens: Int[Array, " S"]) -> KVCache:
    """The cache of the prefix that all prompts share, as one row."""
    return llm(tokens[None], jnp.arange(len(tokens), dtype=jnp.int32)[None])[1]


def prefix_length(prefix: KVCache | None) -> int:
    """The number of tokens before those of every prompt."""
    return 0 if prefix is None else prefix.positions.shape[1]
