"""Decoding: one frozen pass and one ODE per token, in a scan over tokens with a persistent cache.

Each sequence has its own key, which is folded with the number of the token. So its noise does not depend on the other
sequences of the batch. The distribution of a token may be the mean over several noise samples, which is an unbiased
estimate of the model's probabilities; a single sample is not. The samples share the cache and the hidden state. Their
number is an argument of a program that is compiled for a bucket of numbers. A sample is the same in every bucket.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.buckets import TOGETHER, Programs, compiled, positions
from l2d_jax.decoding.refinement.refine import Cost, refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions, Tokens, entropy, sample_tokens, score_tokens, token_keys
from l2d_jax.model.context import Context
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM


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
    hidden, prompt = llm(tokens, positions(lengths, slots, prefix=_length(prefix)), before)
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
    capacity: int,
    prefix: KVCache | None = None,
) -> State:
    """The state after prompts have been read; `hidden` is the hidden state at the end of each."""
    cache = KVCache.empty(llm.architecture, len(lengths), capacity, dtype=llm.dtype, prefix=prefix)
    none = jnp.zeros(len(lengths), jnp.int32)
    return State(
        cache=cache.beside(prompts),
        hidden=hidden,
        inputs=llm.lookup(jnp.take_along_axis(tokens, (lengths - 1)[:, None], axis=1))[:, 0],
        positions=_length(prefix) + lengths - 1,
        keys=keys,
        count=none,
        done=none > 0,
        broken=none > 0,
    )


def _length(prefix: KVCache | None) -> int:
    return 0 if prefix is None else prefix.positions.shape[1]


def resize(state: State, *, ring: int, slots: int) -> State:
    """The state with `ring` slots for new tokens and `slots` slots for prompts; unchanged if it has them already."""
    if (state.cache.ring, state.cache.positions.shape[1]) == (ring, ring + slots):
        return state
    return dataclasses.replace(state, cache=_resize_cache(state.cache, ring=ring, slots=slots))


_resize_cache = Programs(KVCache.resize, static=["ring", "slots"])


@Programs
def read_piece(
    llm: LLM, read: KVCache, last: Float[Array, "B D"], tokens: Int[Array, "B n"], lengths: Int[Array, " B"]
) -> tuple[KVCache, Float[Array, "B D"]]:
    """Read the next tokens of prompts; returns the longer cache, and the hidden state at the end of each prompt.

    `read` is the cache of the tokens before. Its ring has a slot for each token of the padded prompts. `last` are the
    hidden states that the previous piece returned.
    """
    slots = read.used + jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, new = llm(tokens, positions(lengths, slots, prefix=_length(read.prefix)), read)
    is_end = slots == lengths[:, None] - 1
    ends = jnp.where(is_end[..., None], hidden, 0).sum(axis=1, dtype=hidden.dtype)
    return read.extend(new), jnp.where(is_end.any(axis=1)[:, None], ends, last)


@Programs
def read_prefix(llm: LLM, tokens: Int[Array, " S"]) -> KVCache:
    """The cache of the prefix that all prompts share, as one row."""
    return llm(tokens[None], jnp.arange(len(tokens), dtype=jnp.int32)[None])[1]


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


def decode_tokens(
    model: Model,
    state: State,
    *,
    settings: Refinement,
    sampling: SamplingOptions,
    stop_ids: Int[Array, " n"],
    steps: int,
    noise_samples: int = 1,
    labels: Int[Array, " B"] | None = None,
) -> tuple[State, Tokens]:
    """Generate `steps` tokens per sequence. Sequences that have ended are filled with the first of the `stop_ids`.

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
    (state, _), tokens = jax.lax.scan(step, (state, counts), None, length=steps)
    return state, jax.tree.map(lambda array: array.swapaxes(0, 1), tokens)


def token_decoder() -> Programs:
    """`decode_tokens`, compiled for the devices of the current mesh, or JAX's default devices. It donates the state."""
    return compiled(decode_tokens, static=("steps", "noise_samples"), donate="state")
