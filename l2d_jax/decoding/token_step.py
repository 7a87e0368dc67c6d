"""One token of each sequence: its logits after the whole budget, and the language model's pass on the chosen token.

The distribution of a token may be the mean over several noise samples, which is an unbiased estimate of the model's
probabilities; a single sample is not. The samples share the cache and the hidden state. Their number is an argument of
a program that is compiled for a bucket of numbers. A sample is the same in every bucket.
"""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.buckets import TOGETHER
from l2d_jax.decoding.refinement.refine import Cost, refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import entropy, token_keys
from l2d_jax.decoding.state import State
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM


def next_logits(
    model: Model,
    state: State,
    noise: Float[Array, "B samples C"],
    *,
    settings: Refinement,
    keys: Key[Array, "B samples"],
    labels: Int[Array, " B"] | None = None,
    draws: Int[Array, "#B"] | None = None,
) -> tuple[Float[Array, "B V"], Cost]:
    """Logits of the next token after the whole budget, and what the path spent on them.

    With several noise samples, they are the logarithms of the mean probabilities over the first `draws` samples (None:
    over all). The logits of at most `TOGETHER` samples are in memory at once; larger numbers are multiples of it.
    """
    count = noise.shape[1]
    width = min(count, TOGETHER)

    def some(first: int | Array) -> tuple[Array, Cost]:
        """Hidden states of `width` samples from `first` on, and the cost of each."""
        some_noise, some_keys = noise, keys
        if width < count:
            some_noise, some_keys = (jax.lax.dynamic_slice_in_dim(a, first, width, axis=1) for a in (noise, keys))

        def spread(array: Array) -> Array:
            return jnp.broadcast_to(array[:, None], (len(noise), width, *array.shape[1:]))

        hidden, inputs, at = map(spread, (state.hidden, state.inputs, state.positions))
        context = Context(hidden, state.cache, at, None if labels is None else spread(labels), inputs=inputs)
        return refine(model, context, some_noise, settings=settings, keys=some_keys)

    if count == 1:
        hidden, taken = some(0)
        return model.llm.logits(hidden[:, 0]), jax.tree.map(lambda column: column[:, 0], taken)
    draws = jnp.full(len(noise), count) if draws is None else jnp.broadcast_to(draws, len(noise))

    def add(number: int | Array, sums: tuple[Array, Cost]) -> tuple[Array, Cost]:
        hidden, taken = some(number * width)
        is_drawn = number * width + jnp.arange(width) < draws[:, None]
        log_probs = jnp.where(is_drawn[..., None], jax.nn.log_softmax(model.llm.logits(hidden)), -jnp.inf)
        total = jnp.logaddexp(sums[0], jax.nn.logsumexp(log_probs, axis=1))
        evaluations, passes = (jnp.where(is_drawn, column, 0) for column in taken)
        return total, Cost(sums[1].evaluations + evaluations.sum(axis=1), sums[1].passes + passes.max(axis=1))

    none = jnp.zeros_like(draws)
    nothing = jnp.full((len(noise), model.llm.architecture.vocab_size), -jnp.inf), Cost(none, none)
    groups = -(-draws.max() // width)
    total, taken = add(0, nothing) if count == width else jax.lax.fori_loop(0, groups, add, nothing)
    return total - jnp.log(draws)[:, None], taken


def refined_logits(
    model: Model,
    state: State,
    *,
    gate: Float[Array, "#B"],
    settings: Refinement,
    noise_samples: int = 1,
    draws: Int[Array, "#B"] | None = None,
    labels: Int[Array, " B"] | None = None,
) -> tuple[Key[Array, " B"], Float[Array, "B V"], Cost]:
    """Keys for sampling the next token, its logits, and what the path spent on them.

    Where the entropy of the LM's logits is below the gate, the LM's logits are returned and nothing is evaluated.
    The noise follows from the keys and the number of the token. If all sequences skip a token, nothing is integrated.
    Without a gate, the LM's logits are not computed. Only the first `draws` noise samples count (None: all).
    """
    width = 1 if model.path is None else model.path.config.width
    noise_keys, velocity_keys, final_keys = token_keys(state.keys, state.count)
    noise = jax.vmap(lambda key: jax.random.normal(key, (noise_samples, width), jnp.float32))(noise_keys)
    keys = velocity_keys[:, None]
    if noise_samples > 1:
        keys = jax.vmap(lambda key: jax.random.split(key, noise_samples))(velocity_keys)
    none = jnp.zeros_like(state.count)

    def look() -> tuple[Array, Array]:
        return (plain := model.llm.logits(state.hidden)), entropy(plain) < gate

    blank = jnp.zeros((len(none), model.llm.architecture.vocab_size), jnp.float32)
    plain, is_sure = jax.lax.cond((gate > 0).any(), look, lambda: (blank, none > 0))
    is_spared = is_sure | state.done
    if settings.stages is not None:
        stages = dataclasses.replace(settings.stages, count=jnp.where(is_spared, 0, settings.stages.count))
        settings = dataclasses.replace(settings, stages=stages)
    refined = partial(next_logits, model, state, noise, settings=settings, keys=keys, labels=labels, draws=draws)
    logits, taken = jax.lax.cond(is_spared.all(), lambda: (plain, Cost(none, none)), refined)
    return final_keys, jnp.where(is_sure[:, None], plain, logits), jax.tree.map(partial(jnp.where, is_spared, 0), taken)


def advance(llm: LLM, state: State, tokens: Int[Array, " B"], done: Bool[Array, " B"]) -> State:
    """Feed one chosen token per sequence to the LM."""
    following = state.positions + 1
    hidden, new = llm(tokens[:, None], following[:, None], state.cache)
    return dataclasses.replace(
        state,
        cache=state.cache.extend(new),
        hidden=hidden[:, 0],
        inputs=llm.lookup(tokens[:, None])[:, 0],
        positions=following,
        count=state.count + 1,
        done=done,
    )
