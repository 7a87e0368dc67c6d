"""Trajectories of the tokens of a known answer: their ODEs are integrated in parallel, and every point is kept.

The tokens are known, so one frozen pass over prompt and answer serves them all. Notable: each token gets the same noise
and keys as in decoding, and at most `CHUNK` tokens have logits or trajectories in memory at once.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.buckets import Programs, pad, positions
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import corrected_hidden, make_target
from l2d_jax.decoding.refinement.refine import solve_each
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.side_by_side import refine_side_by_side
from l2d_jax.decoding.sampler import entropy, token_keys
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM

CHUNK = 32  # tokens that are integrated in parallel: M, below


class KnownAnswer(NamedTuple):
    """The frozen pass over a prompt and its answer, and what determines the noise of the answer's tokens."""

    hidden: Float[Array, "1 T D"]
    inputs: Float[Array, "1 T D"]  # embeddings of the tokens
    cache: KVCache
    first: Int[Array, ""]  # position of the prompt's last token
    length: Int[Array, ""]  # of the answer, in tokens
    key: Key[Array, ""]  # key of the sequence
    label: Int[Array, ""] | None  # class for guidance


class _Trajectories(NamedTuple):
    """The points of the ODEs of M tokens."""

    times: Float[Array, "points M"]
    states: Float[Array, "points M C"]
    last: Int[Array, " M"]  # index of each token's last point
    rejected: Int[Array, " M"]


def read_answer(
    model: Model, prompt: Sequence[int], answer: Sequence[int], *, key: Key[Array, ""], label: int | None = None
) -> KnownAnswer:
    """Run the frozen pass over a prompt and its answer; `key` and `label` are those of the sequence."""
    tokens, lengths = pad([[*prompt, *answer[:-1]]])  # nothing follows the last token
    hidden, cache, inputs = _read(model.llm, tokens, lengths)
    of_class = None if label is None else jnp.int32(label)
    return KnownAnswer(hidden, inputs, cache, jnp.int32(len(prompt) - 1), jnp.int32(len(answer)), key, of_class)


@Programs
def _read(llm: LLM, tokens: Int[Array, "1 T"], lengths: Int[Array, " 1"]) -> tuple[Array, KVCache, Array]:
    slots = jnp.arange(tokens.shape[1], dtype=jnp.int32)
    return *llm(tokens, positions(lengths, slots)), llm.lookup(tokens)


@partial(Programs, static=["most"])
def trace_tokens(
    model: Model,
    answer: KnownAnswer,
    *,
    start: Int[Array, ""],
    settings: Refinement,
    gate: Float[Array, ""],
    most: int,
) -> dict[str, Int[Array, " M"] | Float[Array, " M"] | Bool[Array, " M"]]:
    """The fields of `trace.TokenTrace`, without token and text, for M tokens of an answer from number `start` on.

    Beyond the answer's end, its last token is traced again. The path is skipped where the entropy of the LM alone is
    below `gate`, in nats. `most` is the largest number of grid intervals or adaptive steps; it may exceed that of the
    settings, so that few programs serve all budgets.
    """
    context, numbers = _place(answer, start)
    logits = model.llm.logits(context.hidden[0])
    none = jnp.zeros(CHUNK, jnp.int32)
    plain = {"likeliest": diffusion.arg_max(logits), "entropy": entropy(logits)}
    plain |= {"evaluations": none, "passes": none, "rejected": none, "settled": jnp.zeros(CHUNK)}
    skipped = plain["entropy"] < gate
    both = {f"plain_{name}": plain[name] for name in ("likeliest", "entropy")} | {"skipped": skipped}
    if model.path is None or most == 0:
        return plain | both | {"evaluations": none + (model.path is not None)}
    ways = _integrate(model, context, answer.key, numbers, settings=settings, most=most)
    refined = _final_distribution(model, context, ways, settings=settings)
    taken = settings.solver.evaluations(ways.last + ways.rejected)
    refined |= {"evaluations": taken, "passes": taken, "rejected": ways.rejected}
    if settings.stages is not None:
        noise, keys = _start(model, answer.key, numbers)
        refined["passes"] = refine_side_by_side(model, context, noise, settings=settings, keys=keys)[1][0]
    return both | {name: jnp.where(skipped, plain[name], value) for name, value in refined.items()}


@partial(jax.jit, static_argnames="steps")
def score_points(
    model: Model,
    answer: KnownAnswer,
    targets: Int[Array, " M"],
    *,
    start: Int[Array, ""],
    settings: Refinement,
    steps: int,
) -> dict[str, Float[Array, "points M"]]:
    """At every point of a uniform grid: the probability of the true token, and whether it is the arg max (1 or 0).

    `targets` are the true tokens from number `start` on. The other arguments are those of `trace_tokens`.
    """
    context, numbers = _place(answer, start)
    ways = _integrate(model, context, answer.key, numbers, settings=settings, most=steps)

    def at(point: Array) -> dict[str, Array]:
        x, t = ways.states[point][None], ways.times[point, :1][None]
        logits = model.llm.logits(corrected_hidden(model, context, x, t, table=settings.table)[0, 0])
        probs = jnp.take_along_axis(jax.nn.softmax(logits), targets[:, None], axis=-1)[:, 0]
        return {"expected": probs, "greedy": (diffusion.arg_max(logits) == targets).astype(jnp.float32)}

    return jax.lax.map(at, jnp.arange(steps + 1))


def place_token(
    model: Model, answer: KnownAnswer, number: int
) -> tuple[Context, Float[Array, "1 1 C"], Key[Array, "1 1"]]:
    """The context of one token, its x_0 and the keys for its estimates."""
    context, numbers = _place(answer, jnp.int32(number))
    noise, keys = _start(model, answer.key, numbers)
    columns = {name: column for name, column in context._asdict().items() if name != "cache"}
    first = jax.tree.map(lambda column: column[:, :1], columns)
    return context._replace(**first), noise[:, :1], keys[:, :1]


def _place(answer: KnownAnswer, start: Int[Array, ""]) -> tuple[Context, Int[Array, " M"]]:
    """The context of M tokens of an answer from number `start` on, and their numbers."""
    numbers = jnp.minimum(start + jnp.arange(CHUNK), answer.length - 1)
    positions = (answer.first + numbers)[None]
    labels = None if answer.label is None else jnp.full_like(positions, answer.label)
    hidden, inputs = (array[:, positions[0]] for array in (answer.hidden, answer.inputs))
    return Context(hidden, answer.cache, positions, labels, inputs=inputs), numbers


def _integrate(
    model: Model, context: Context, key: Key[Array, ""], numbers: Int[Array, " M"], *, settings: Refinement, most: int
) -> _Trajectories:
    """All points of a uniform grid, or the ends of the adaptive steps that were accepted for each token."""
    assert model.path is not None
    (noise, keys), none = _start(model, key, numbers), jnp.zeros(CHUNK, jnp.int32)
    if most == 0:
        return _Trajectories(jnp.zeros((1, CHUNK)), noise, none, none)
    if not settings.solver.is_adaptive:
        target = make_target(model, context, settings=settings, keys=keys)
        grid: dict[str, Any] = {"steps": settings.steps, "most": most, "end": settings.end}
        states = integrate.fixed_states(target, noise, solver=settings.solver, **grid)[:, 0]
        points = settings.end * (jnp.arange(most + 1) / settings.steps)
        times = jnp.broadcast_to(points[:, None], states.shape[:2])
        return _Trajectories(times, states, none + settings.steps, none)

    sigma = model.path.config.sigma

    def solve(target: integrate.Target, noise: Array, own: Refinement) -> tuple[Array, Array, Array]:
        options: Any = {"tolerance": own.tolerance, "max_steps": own.steps, "most": most}
        return integrate.adaptive_states(target, noise, solver=own.solver, end=own.adaptive_end(sigma), **options)

    solutions = solve_each(model, context, noise, solve, settings=settings, keys=keys)
    times, states, rejected = (a[0] for a in solutions)
    accepted = jnp.isfinite(times).sum(axis=1)
    times = jnp.concatenate([jnp.zeros((1, CHUNK)), times.T])
    return _Trajectories(times, jnp.concatenate([noise, states[:, :, 0, 0].swapaxes(0, 1)]), accepted, rejected)


def _start(
    model: Model, key: Key[Array, ""], numbers: Int[Array, " M"]
) -> tuple[Float[Array, "1 M C"], Key[Array, "1 M"]]:
    """x_0 of these tokens, and the keys for their estimates."""
    assert model.path is not None
    config = model.path.config
    noise_keys, keys, _ = token_keys(jnp.broadcast_to(key, numbers.shape), numbers)
    noise = jax.vmap(lambda key: jax.random.normal(key, (config.width,), jnp.float32))(noise_keys)
    return config.sigma * noise[None], keys[None]


def _final_distribution(
    model: Model, context: Context, ways: _Trajectories, *, settings: Refinement
) -> dict[str, Array]:
    """The final distribution of each token, and the t from which on its arg max stayed the same."""

    def at(point: Array, before: dict[str, Array]) -> dict[str, Array]:
        index = jnp.minimum(point, ways.last), jnp.arange(CHUNK)
        x, t = ways.states[index][None], ways.times[index][None]
        shared = t if settings.solver.is_adaptive else t[:, :1]  # one time of the grid, as the table needs it
        logits = model.llm.logits(corrected_hidden(model, context, x, shared, table=settings.table)[0, 0])
        likeliest = diffusion.arg_max(logits)
        settled = jnp.where(likeliest == before["likeliest"], before["settled"], t[0])
        return {"likeliest": likeliest, "entropy": entropy(logits), "settled": settled}

    none = jnp.zeros(CHUNK)
    before = {"likeliest": jnp.full(CHUNK, -1), "entropy": none, "settled": none}
    return jax.lax.fori_loop(0, ways.last.max() + 1, at, before)
