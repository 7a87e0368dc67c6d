"""Begins a stream: the first evaluation of the first token shares the pass that reads the prompt.

Where it cannot, since a prompt is read in pieces or several answers share it, the first token is guessed to be the
language model's.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.batch.prefill import prefill, prefix_length, start
from l2d_jax.decoding.buckets import Programs, positions
from l2d_jax.decoding.parallel.stream_state import Stream, blank
from l2d_jax.decoding.refinement.estimates import evaluation_keys
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions, entropy, sample_tokens, token_keys
from l2d_jax.decoding.state import State
from l2d_jax.model import diffusion
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.joint_pass import DiffusionRows, joint_pass
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model


@partial(Programs, static=["capacity", "size"])
def read_and_enter(  # noqa: PLR0913 (what `prefill` takes, and how the first token begins)
    model: Model,
    tokens: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    keys: Key[Array, " B"],
    *,
    settings: Refinement,
    sampling: SamplingOptions,
    capacity: int,
    size: int,
    prefix: KVCache | None = None,
) -> Stream:
    """Read prompts as `prefill.prefill` does, and evaluate the path for the first token in the same pass.

    The stream has room for `size` evaluations of a token.
    """
    llm, path = model.llm, model.path
    assert path is not None
    if not path.is_anchored:
        state = prefill(llm, tokens, lengths, keys, capacity=capacity, prefix=prefix)
        return _enter(model, state, llm.logits(state.hidden), settings, sampling, size=size, is_known=True)
    before = prefix_length(prefix)
    cache = KVCache.empty(llm.architecture, len(lengths), 0, dtype=llm.dtype, prefix=prefix)
    at = positions(lengths, jnp.arange(tokens.shape[1], dtype=jnp.int32), prefix=before)
    t, x = jnp.zeros((len(lengths), 1)), first_noise(path, token_keys(keys, jnp.zeros_like(lengths))[0])[:, None]
    inputs = llm.lookup(jnp.take_along_axis(tokens, (lengths - 1)[:, None], axis=1))
    conditions = None if settings.table is None else settings.table.at(t, None)
    rows = DiffusionRows(x, t, (before + lengths - 1)[:, None], inputs, conditions)
    made = joint_pass(model, tokens, at, rows, cache)
    last = jnp.take_along_axis(made.hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    state = start(llm, made.new, last, tokens, lengths, keys, capacity=capacity, prefix=prefix)
    corrected = rows.correct(path, last[:, None], made.features)[:, 0]
    return _enter(model, state, llm.logits(corrected), settings, sampling, size=size, is_known=True)


@partial(Programs, static=["size"])
def enter(model: Model, state: State, *, settings: Refinement, sampling: SamplingOptions, size: int) -> Stream:
    """Start a stream after prompts have been read, with room for `size` evaluations of a token.

    The first estimate is guessed to be the LM's. For a released path, which corrects nothing at t = 0, it is.
    """
    assert model.path is not None
    logits, is_known = model.llm.logits(state.hidden), not model.path.is_anchored
    return _enter(model, state, logits, settings, sampling, size=size, is_known=is_known)


def _enter(
    model: Model,
    state: State,
    logits: Float[Array, "B V"],
    settings: Refinement,
    sampling: SamplingOptions,
    *,
    size: int,
    is_known: bool,
) -> Stream:
    """The stream whose first evaluation has these logits; `is_known`: they are those of the path."""
    count = jnp.zeros(1, jnp.int32) if settings.stages is None else settings.stages.count  # None: all budgets are 1
    t = jnp.zeros((len(logits), 1))
    _, velocity_keys, final_keys = token_keys(state.keys, state.count)
    temperature = settings.row_temperatures(t)[:, 0]
    first = diffusion.sample_rows(evaluation_keys(velocity_keys[:, None], t)[:, 0], logits, temperature)
    first = first.astype(jnp.int32)
    is_plain, plain = find_plain(model, state.hidden, logits, count, sampling)
    guess = sample_tokens(final_keys, jnp.where(is_plain[:, None], plain, logits), without_penalties(sampling))
    return dataclasses.replace(
        blank(state, size=size),
        next=guess,
        is_plain=is_plain,
        settled=jnp.minimum(count, (is_known & ~jnp.isnan(logits[:, 0])).astype(jnp.int32)),
        estimates=jnp.broadcast_to(first[:, None], (len(logits), size)),
    )


def find_plain(
    model: Model,
    hidden: Float[Array, "B D"],
    begun: Float[Array, "B V"],
    count: Int[Array, "#B"],
    sampling: SamplingOptions,
) -> tuple[Bool[Array, " B"], Float[Array, "B V"]]:
    """Whether the next token is the LM's, by budget or gate, and the LM's logits where it may be.

    `begun` are the logits of the first evaluation: of a released path, the LM's.
    """
    path, none = model.path, jnp.broadcast_to(count == 0, hidden.shape[:1])
    assert path is not None

    def look() -> tuple[Array, Array]:
        plain = model.llm.logits(hidden) if path.is_anchored else begun
        return none | (entropy(plain) < sampling.gate), plain

    return jax.lax.cond((sampling.gate > 0).any() | none.any(), look, lambda: (none, begun))


def first_noise(path: DiffusionPath, keys: Key[Array, " B"]) -> Float[Array, "B C"]:
    """x_0, as `token_step.refined_logits` draws it for one noise sample."""
    noise = jax.vmap(lambda key: jax.random.normal(key, (1, path.config.width), jnp.float32))(keys)
    return path.config.sigma * noise[:, 0]


def without_penalties(sampling: SamplingOptions) -> SamplingOptions:
    """The options for a guess: penalties would need the counts of all tokens before it."""
    return dataclasses.replace(sampling, penalties=None)
