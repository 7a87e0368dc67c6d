"""The ODEs of many tokens of one answer side by side, with every point on their way.

The tokens are given, so one frozen pass over prompt and answer serves them all. Notable: each has the noise and keys
that decoding gave it, and no more than `CHUNK` of them have logits or trajectories in memory at once.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding import integrate
from l2d_jax.decoding.refine import Refinement, evaluate, make_target, solve_each
from l2d_jax.decoding.sampler import entropy, token_keys
from l2d_jax.decoding.solver import Solver
from l2d_jax.model.context import Context
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM

CHUNK = 64  # tokens that are integrated side by side: M, below


class Given(NamedTuple):
    """An answer whose tokens are known, after the frozen pass over its prompt and itself."""

    hidden: Float[Array, "1 T D"]
    cache: KVCache
    first: Int[Array, ""]  # position of the prompt's last token
    length: Int[Array, ""]  # of the answer, in tokens
    key: Key[Array, ""]  # of the sequence
    label: Int[Array, ""] | None  # class for guidance


class _Path(NamedTuple):
    """Where the ODEs of M tokens have been."""

    times: Float[Array, "points M"]
    states: Float[Array, "points M C"]
    last: Int[Array, " M"]  # index of each token's last point
    rejected: Int[Array, " M"]


@jax.jit
def read(
    llm: LLM,
    tokens: Int[Array, "1 T"],
    lengths: Int[Array, " 1"],
    *,
    length: Int[Array, ""],
    key: Key[Array, ""],
    label: Int[Array, ""] | None,
) -> Given:
    """The frozen pass over a prompt and its answer less its last token, padded on the right to T tokens.

    `lengths` is before padding; the other arguments are as in `Given`.
    """
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    hidden, cache = llm(tokens, jnp.where(slots < lengths[:, None], slots, -1))
    first = lengths[0] - jnp.maximum(length, 1)
    return Given(hidden, cache, first, length, key, label)


@partial(jax.jit, static_argnames="steps")
def follow(
    model: Model, given: Given, *, start: Int[Array, ""], settings: Refinement, gate: Float[Array, ""], steps: int
) -> dict[str, Int[Array, " M"] | Float[Array, " M"] | Bool[Array, " M"]]:
    """The fields of `trace.TokenTrace`, less token and text, of the tokens `start`, `start` + 1, … of an answer.

    Beyond its end, the last token is followed again.

    Args:
      model: the LM and the path.
      given: the answer.
      start: number of the first token to follow, from 0.
      settings: solver, grid and velocity.
      gate: entropy of the LM alone below which it is left alone, in nats.
      steps: grid intervals, or the most steps of an adaptive solver.
    """
    context, numbers = _place(given, start)
    plain = model.llm.logits(context.hidden[0])
    alone = {"likeliest": jnp.argmax(plain, axis=-1), "entropy": entropy(plain)}
    none, at_start = jnp.zeros(CHUNK, jnp.int32), jnp.zeros(CHUNK)
    skipped = alone["entropy"] < gate
    common = {"plain_entropy": alone["entropy"], "skipped": skipped}
    if model.path is None:
        return alone | common | {"evaluations": none, "rejected": none, "settled": at_start}
    path = _integrate(model, context, given.key, numbers, settings=settings, steps=steps)
    refined = _read_out(model, context, path, settings=settings)
    taken = {"evaluations": _evaluations(settings.solver, path), "rejected": path.rejected}
    left_alone = alone | {"evaluations": none, "rejected": none, "settled": at_start}
    return common | {name: jnp.where(skipped, left_alone[name], value) for name, value in (refined | taken).items()}


@partial(jax.jit, static_argnames="steps")
def score_points(
    model: Model, given: Given, targets: Int[Array, " M"], *, start: Int[Array, ""], settings: Refinement, steps: int
) -> dict[str, Float[Array, "points M"]]:
    """At every point of a uniform grid, the probability of the true token, and 1 where it is the arg max, else 0.

    The arguments are those of `follow`, with the true tokens from `start` on.
    """
    context, numbers = _place(given, start)
    path = _integrate(model, context, given.key, numbers, settings=settings, steps=steps)

    def at(point: Array) -> dict[str, Array]:
        x, t = path.states[point][None], path.times[point, :1][None]
        logits = model.llm.logits(evaluate(model, context, x, t, table=settings.table)[0, 0])
        chances = jnp.take_along_axis(jax.nn.softmax(logits), targets[:, None], axis=-1)[:, 0]
        return {"expected": chances, "greedy": (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32)}

    return jax.lax.map(at, jnp.arange(steps + 1))


def _place(given: Given, start: Int[Array, ""]) -> tuple[Context, Int[Array, " M"]]:
    """The context of M tokens of an answer, and their numbers."""
    numbers = jnp.minimum(start + jnp.arange(CHUNK), given.length - 1)
    positions = (given.first + numbers)[None]
    labels = None if given.label is None else jnp.full_like(positions, given.label)
    return Context(given.hidden[:, positions[0]], given.cache, positions, labels), numbers


def _integrate(
    model: Model,
    context: Context,
    key: Key[Array, ""],
    numbers: Int[Array, " M"],
    *,
    settings: Refinement,
    steps: int,
) -> _Path:
    """All points of a uniform grid, or each token's own accepted steps (as `refine.adapt` takes them)."""
    assert model.path is not None
    config = model.path.config
    noise_keys, keys, _ = token_keys(jnp.broadcast_to(key, numbers.shape), numbers)
    noise = config.sigma * jax.vmap(lambda key: jax.random.normal(key, (config.width,), jnp.float32))(noise_keys)
    none = jnp.zeros(CHUNK, jnp.int32)
    if steps == 0:
        return _Path(jnp.zeros((1, CHUNK)), noise[None], none, none)
    if not settings.solver.is_adaptive:
        target = make_target(model, context, settings=settings, keys=keys[None])
        states = integrate.fixed_states(target, noise[None], solver=settings.solver, steps=steps)[:, 0]
        times = jnp.broadcast_to((jnp.arange(steps + 1) / steps)[:, None], states.shape[:2])
        return _Path(times, states, none + steps, none)
    end = 1 - 1 / config.sigma

    def solve(target: integrate.Target, noise: Array) -> tuple[Array, Array, Array]:
        times, states, rejected = integrate.adaptive_states(
            target, noise, solver=settings.solver, tolerance=settings.tolerance, end=end, max_steps=steps
        )
        return times, states[:, 0, 0], rejected

    times, states, rejected = (
        a[0] for a in solve_each(model, context, noise[None], solve, settings=settings, keys=keys[None])
    )
    accepted = jnp.isfinite(times).sum(axis=1)
    times, states = (jnp.moveaxis(a, 1, 0) for a in (times, states))
    return _Path(
        jnp.concatenate([jnp.zeros((1, CHUNK)), times]), jnp.concatenate([noise[None], states]), accepted, rejected
    )


def _read_out(model: Model, context: Context, path: _Path, *, settings: Refinement) -> dict[str, Array]:
    """The final distribution of each token, and the time from which on its arg max was the same."""

    def at(point: Array, before: dict[str, Array]) -> dict[str, Array]:
        index = jnp.minimum(point, path.last), jnp.arange(CHUNK)
        x, t = path.states[index][None], path.times[index][None]
        t_once = t if settings.solver.is_adaptive else t[:, :1]  # a grid's time is the same for all, and in the table
        logits = model.llm.logits(evaluate(model, context, x, t_once, table=settings.table)[0, 0])
        likeliest = jnp.argmax(logits, axis=-1)
        settled = jnp.where(likeliest == before["likeliest"], before["settled"], t[0])
        return {"likeliest": likeliest, "entropy": entropy(logits), "settled": settled}

    none = jnp.zeros(CHUNK)
    before = {"likeliest": jnp.full(CHUNK, -1), "entropy": none, "settled": none}
    return jax.lax.fori_loop(0, path.last.max() + 1, at, before)


def _evaluations(solver: Solver, path: _Path) -> Int[Array, " M"]:
    """Evaluations of the integration, and the final one."""
    steps = path.last + path.rejected
    return jnp.where(steps > 0, solver.overhead + solver.stages * steps, 1)
