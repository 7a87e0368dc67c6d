"""The results of the frozen pass that the diffusion path and the LM head need."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.data.batch import Batch
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.llm import LLM


class Context(NamedTuple):
    """What M diffusion tokens read from the frozen pass, and their positions and classes.

    A diffusion token has the position of a token of the LM. Without `positions`, each slot of the cache has M / S
    diffusion tokens, next to each other; attention has a faster kernel for that case.
    """

    hidden: Float[Array, "B M D"]  # last hidden state of the LM at that position
    cache: KVCache  # holds the LM's keys and values at least up to these positions
    positions: Int[Array, "B M"] | None  # position of each diffusion token; None: those of the slots of the cache
    labels: Int[Array, "#B #M"] | None = None  # classes for guidance; None: the null class
    segments: Int[Array, "B M"] | None = None  # examples of a packed row
    inputs: Float[Array, "B M D"] | None = None  # the LM's embedding of that token, where an anchored path starts


def token_positions(batch: Batch) -> Int[Array, "B T"]:
    """The position of each token within its example."""
    positions = jnp.broadcast_to(jnp.arange(batch.tokens.shape[1], dtype=jnp.int32), batch.tokens.shape)
    if batch.segments is None:
        return positions
    begins = jnp.diff(batch.segments, axis=1, prepend=-1) != 0
    return positions - jax.lax.cummax(jnp.where(begins, positions, 0), axis=1)


def read_context(llm: LLM, batch: Batch, *, remat: Callable[..., Any] | None = None) -> Context:
    """Run the model that reads the context over a batch; `remat` as for `LLM.__call__`, if this model is trained."""
    positions = token_positions(batch)
    hidden, cache = llm(batch.tokens, positions, segments=batch.segments, remat=remat)
    inputs = llm.lookup(batch.tokens)
    if batch.queries is None:
        copies = batch.targets.shape[1] // batch.tokens.shape[1]
        hidden, inputs, positions = (jnp.repeat(array, copies, axis=1) for array in (hidden, inputs, positions))
    else:
        positions = jnp.take_along_axis(positions, batch.queries, axis=1)
        hidden, inputs = (jnp.take_along_axis(array, batch.queries[..., None], axis=1) for array in (hidden, inputs))
    return Context(hidden, cache, positions, segments=batch.query_segments, inputs=inputs)
