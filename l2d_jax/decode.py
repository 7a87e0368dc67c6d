"""Decoding: one frozen pass per token, one ODE per token, in a scan over tokens with a persistent cache.

Each sequence has a key of its own, folded with the token's number, so its output does not depend on its batch mates.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax import diffusion
from l2d_jax.llm import LLM, KVCache
from l2d_jax.objective import Context
from l2d_jax.refine import Model, Refinement, refine


@nnx.dataclass
class State(nnx.Module):
    """Everything that the next token depends on."""

    cache: KVCache = nnx.data()
    hidden: Float[Array, "B D"] = nnx.data()  # of the main path at the newest token
    positions: Int[Array, " B"] = nnx.data()  # of the newest token
    keys: Key[Array, " B"] = nnx.data()
    count: Int[Array, ""] = nnx.data()  # tokens generated so far
    done: Bool[Array, " B"] = nnx.data()  # whether the sequence has ended


@partial(jax.jit, static_argnames="room")
def prefill(
    llm: LLM, tokens: Int[Array, "B P"], lengths: Int[Array, " B"], keys: Key[Array, " B"], *, room: int
) -> State:
    """Run the prompts, padded on the right, and leave `room` slots for new tokens in the cache."""
    batch, padded = tokens.shape
    slots = jnp.arange(padded, dtype=jnp.int32)
    positions = jnp.where(slots < lengths[:, None], slots, -1)
    hidden, prompt = llm(tokens, positions)
    cache = KVCache.empty(llm.architecture, batch, padded + room, dtype=llm.embed.dtype).extend(prompt)
    last = jnp.take_along_axis(hidden, (lengths - 1)[:, None, None], axis=1)[:, 0]
    done = jnp.zeros(batch, bool)
    return State(cache=cache, hidden=last, positions=lengths - 1, keys=keys, count=jnp.int32(0), done=done)


def next_logits(
    model: Model,
    state: State,
    noise: Float[Array, "B C"],
    *,
    settings: Refinement,
    keys: Key[Array, " B"],
    labels: Int[Array, " B"] | None = None,
) -> Float[Array, "B V"]:
    """Logits of the next token after the whole budget, from unit noise."""
    context = Context(
        hidden=state.hidden[:, None],
        cache=state.cache,
        positions=state.positions[:, None],
        labels=None if labels is None else labels[:, None],
    )
    hidden = refine(model, context, noise[:, None], settings=settings, keys=keys[:, None])
    return model.llm.logits(hidden[:, 0])


def advance(llm: LLM, state: State, tokens: Int[Array, " B"], done: Bool[Array, " B"]) -> State:
    """Feed one chosen token per sequence to the main path."""
    positions = state.positions + 1
    hidden, new = llm(tokens[:, None], positions[:, None], state.cache)
    return State(
        cache=state.cache.extend(new),
        hidden=hidden[:, 0],
        positions=positions,
        keys=state.keys,
        count=state.count + 1,
        done=done,
    )


@partial(jax.jit, static_argnames="steps", donate_argnames="state")
def decode(
    model: Model,
    state: State,
    *,
    settings: Refinement,
    temperature: Float[Array, ""],
    ends: Int[Array, " ends"],
    steps: int,
    labels: Int[Array, " B"] | None = None,
) -> tuple[State, Int[Array, "B steps"]]:
    """Generate `steps` tokens; a sequence that has met one of the `ends` goes on with that end token.

    Args:
      model: the LM and the path.
      state: from `prefill` or an earlier call; donated.
      settings: solver, grid and velocity.
      temperature: of the final draw; 0: arg max.
      ends: tokens that end a sequence.
      steps: tokens to generate.
      labels: classes for guidance, or None.
    """
    width = 1 if model.path is None else model.path.config.width

    def step(state: State, _: None) -> tuple[State, Array]:
        token_keys = jax.vmap(jax.random.fold_in, (0, None))(state.keys, state.count)
        noise_keys, velocity_keys, final_keys = jax.vmap(partial(jax.random.split, num=3), out_axes=1)(token_keys)
        noise = jax.vmap(lambda key: jax.random.normal(key, (width,), jnp.float32))(noise_keys)
        logits = next_logits(model, state, noise, settings=settings, keys=velocity_keys, labels=labels)
        token = jax.vmap(diffusion.sample, (0, 0, None))(final_keys, logits, temperature)
        token = jnp.where(state.done, ends[0], token).astype(jnp.int32)
        done = state.done | (token[:, None] == ends).any(axis=-1)
        return advance(model.llm, state, token, done), token

    state, tokens = jax.lax.scan(step, state, None, length=steps)
    return state, tokens.T
