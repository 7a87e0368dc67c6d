"""Decoding: a scan over tokens with a persistent cache, one pass of the frozen model and one ODE for each token.

Each sequence has its own key, folded with the number of the token, so its noise does not depend on the other sequences
of the batch.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from l2d_jax.decoding.bounded_scan import bounded_scan
from l2d_jax.decoding.buckets import Programs, compiled
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions, Tokens, sample_tokens, score_tokens
from l2d_jax.decoding.state import State
from l2d_jax.decoding.token_step import advance, refined_logits
from l2d_jax.model.l2d import Model


def decode_tokens(  # noqa: PLR0913 (how to decode, and how far)
    model: Model,
    state: State,
    *,
    settings: Refinement,
    sampling: SamplingOptions,
    stop_ids: Int[Array, " n"],
    steps: int,
    noise_samples: int = 1,
    labels: Int[Array, " B"] | None = None,
    limit: Int[Array, ""] | None = None,
) -> tuple[State, Tokens]:
    """Generate `steps` tokens per sequence. Sequences that have ended are filled with the first of the `stop_ids`.

    With a `limit`, only the first `limit` tokens are generated, and the others are zeros.
    A sequence ends at one of the `stop_ids`, or where a logit is NaN, which `State.broken` records.
    """
    chosen: dict[str, Any] = {"noise_samples": noise_samples, "draws": sampling.draws, "labels": labels}

    def step(carry: tuple[State, Array | None], _: None) -> tuple[tuple[State, Array | None], Tokens]:
        state, counts = carry
        final_keys, logits, taken = refined_logits(model, state, gate=sampling.gate, settings=settings, **chosen)
        is_bad = jnp.isnan(logits).any(axis=-1) & ~state.done
        sampled = sample_tokens(final_keys, logits, sampling, counts=counts)
        token = jnp.where(state.done | is_bad, stop_ids[0], sampled)
        done = state.done | is_bad | (token[:, None] == stop_ids).any(axis=-1)
        scores = score_tokens(token, logits) if sampling.is_scored else (None, None, None)
        new = Tokens(token, taken.evaluations, jnp.where(state.done, 0, 1 + taken.passes), *scores)
        state = dataclasses.replace(state, broken=state.broken | is_bad)
        return (advance(model.llm, state, token, done), sampling.count(counts, token)), new

    counts = sampling.start_counts(model.llm.architecture.vocab_size)
    (state, _), tokens = bounded_scan(step, (state, counts), length=steps, limit=limit)
    return state, jax.tree.map(lambda array: array.swapaxes(0, 1), tokens)


def token_decoder() -> Programs:
    """`decode_tokens`, compiled for the devices of the current mesh, or JAX's default devices. It donates the state."""
    return compiled(decode_tokens, static=("steps", "noise_samples"), donate="state")
