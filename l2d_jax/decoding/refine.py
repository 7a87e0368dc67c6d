"""From noise to a corrected hidden state: the ODE of a diffusion token, over any positions at once (paper section 3.3).

Decoding refines the last position of each sequence; teacher-forced evaluation refines every answer position at once.
"""

import dataclasses
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import integrate, runge_kutta
from l2d_jax.decoding.budget import evaluation_times, lookahead, steps_of
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import over_logits

TABULATED = 128  # evaluations whose conditions a table holds: 50 MB at the SmolLM2-135M shape, 200 MB at Llama 8B's


@nnx.dataclass
class Table(nnx.Module):
    """What the path computes from time and class alone, for every evaluation of a uniform grid."""

    times: Float[Array, " n"] = nnx.data()  # infinite beyond the last
    conditions: Conditions = nnx.data()  # of shape [n, labels]

    def at(self, t: Float[Array, "1 1"], labels: Int[Array, "B M"] | None) -> Conditions:
        """The entries of one time; labels None: the null class, which is the last."""
        index = jnp.argmin(jnp.abs(self.times - t[0, 0]))
        assert self.conditions.modulation is not None
        picked = jnp.array([[-1]]) if labels is None else labels
        return Conditions(self.conditions.modulation[:, index][:, picked], self.conditions.merge[index][picked])


@nnx.dataclass
class Refinement(nnx.Module):
    """How to integrate. The arrays are arguments of one compiled program; the strings choose the program."""

    steps: Array = nnx.data()  # grid intervals, or the most steps of an adaptive solver; 0 leaves the LM as it is
    velocity_temperature: Array = nnx.data()
    anneal: Array = nnx.data()  # 1: the temperature falls linearly to 0 as t goes to 1; 0: constant
    guidance: Float[Array, "#B"] = nnx.data()  # strength w_g; unused without labels
    tolerance: Array = nnx.data()  # of an adaptive solver's steps, relative and absolute
    table: Table | None = nnx.data(default=None)  # of `tabulate`, for the model's weights and this grid
    solver: str = nnx.static(default="midpoint")
    velocity: Literal["sample", "expectation"] = nnx.static(default="sample")

    @classmethod
    def from_config(cls, config: DecodeConfig, *, budget: int | None = None) -> "Refinement":
        """Raises `InputError` for a budget that the solver cannot spend."""
        return cls(
            steps=jnp.int32(steps_of(config.solver, budget or config.budget)),
            velocity_temperature=jnp.float32(config.velocity_temperature),
            anneal=jnp.float32(config.anneal),
            guidance=jnp.float32([config.guidance]),
            tolerance=jnp.float32(config.tolerance),
            solver=config.solver,
            velocity=config.velocity,
        )

    def temperature(self, t: Float[Array, ""], step: Float[Array, ""]) -> Float[Array, ""]:
        """The velocity's temperature at t; annealing reads it ahead, so that the last draw is the arg max."""
        annealed = diffusion.anneal(self.velocity_temperature, t + lookahead(self.solver) * step)
        return jnp.where(self.anneal > 0, annealed, self.velocity_temperature)


def tabulate(model: Model, settings: Refinement, *, budget: int) -> Refinement:
    """The settings with their table, which up to `TABULATED` evaluations is one program's; as they are beyond."""
    if model.path is None or settings.solver in runge_kutta.ADAPTIVE or budget > TABULATED:
        return settings
    return dataclasses.replace(settings, table=_tabulate(model.path, settings, dtype=model.llm.embed.dtype))


@partial(jax.jit, static_argnames="dtype")
def _tabulate(path: DiffusionPath, settings: Refinement, *, dtype: Any) -> Table:
    times = evaluation_times(settings.solver, settings.steps, room=TABULATED)
    labels = jnp.arange(path.config.classes + 1)[None]
    t, labels = jnp.broadcast_arrays(jnp.where(times <= 1, times, 0.0)[:, None], labels)
    return Table(times=times, conditions=path.conditions(t, labels, dtype=dtype))


def evaluate(
    model: Model, context: Context, x: Float[Array, "B M C"], t: Float[Array, "#B #M"], *, table: Table | None = None
) -> Float[Array, "G B M D"]:
    """Corrected hidden states, at one time or each at its own; G is 1, or 2 with labels: conditional, then null.

    With a table, there is one time, which it has.
    """
    assert model.path is not None
    path = model.path

    def branch(labels: Array | None) -> Array:
        conditions = None if table is None else table.at(t, labels)
        return context.hidden + path(model.llm, x, t, context._replace(labels=labels), conditions=conditions)

    if context.labels is None:
        return branch(None)[None]
    null = jnp.full_like(context.labels, path.config.classes)
    return jax.vmap(branch)(jnp.stack([context.labels, null]))


def estimate(
    model: Model,
    hidden: Float[Array, "B M D"],
    *,
    temperature: Float[Array, ""],
    keys: Key[Array, "B M"],
    kind: Literal["sample", "expectation"],
) -> Float[Array, "B M C"]:
    """The estimate of x_1 from the logits: the vector of a drawn token, or the mean over the vocabulary."""
    assert model.table is not None
    table = model.table

    def read(logits: Array, key_data: Array) -> Array:
        if kind == "expectation":
            mean = jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6)) @ table
            return jnp.where(temperature > 0, mean, table[jnp.argmax(logits, axis=-1)])

        def drawn(operands: tuple[Array, Array]) -> Array:
            logits, key_data = operands
            key = jax.random.wrap_key_data(key_data)
            return jax.vmap(diffusion.sample, (0, 0, None))(key, logits, temperature)

        # The Gumbel noise of a whole vocabulary is worth skipping where nothing is drawn.
        token = jax.lax.cond(temperature > 0, drawn, lambda operands: jnp.argmax(operands[0], -1), (logits, key_data))
        return table[token]

    return over_logits(model.llm, hidden, read, jax.random.key_data(keys))


def make_target(
    model: Model,
    context: Context,
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
    end: float | Float[Array, ""] = 1.0,
) -> integrate.Target:
    """The estimate of x_1 at (t, x), guided where the context has labels, for the solver to integrate towards."""
    step = end / jnp.maximum(settings.steps, 1).astype(jnp.float32)

    def target(t: Array, x: Array) -> Array:
        batch, length, _ = x.shape
        hidden = evaluate(model, context, x, t[None, None], table=settings.table)
        branches = hidden.shape[0]
        time = jax.lax.bitcast_convert_type(t, jnp.uint32)
        folded = jax.vmap(jax.vmap(lambda key: jax.random.fold_in(key, time)))(keys)
        estimates = estimate(
            model,
            hidden.reshape(branches * batch, length, -1),
            temperature=settings.temperature(t, step),
            keys=jnp.tile(folded, (branches, 1)),
            kind=settings.velocity,
        ).reshape(branches, batch, length, -1)
        return (
            estimates[0]
            if branches == 1
            else diffusion.guide(estimates[0], estimates[1], settings.guidance[:, None, None])
        )

    return target


def refine(
    model: Model,
    context: Context,
    noise: Float[Array, "B M C"],
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
) -> Float[Array, "B M D"]:
    """Hidden states after the whole budget, whose logits are the answer.

    A uniform grid ends at t = 1; adaptive steps, which each position has to itself, at 1 - 1/sigma as in the release.

    Args:
      model: the LM and the path.
      context: the frozen pass at the positions to refine.
      noise: x_0 of unit variance.
      settings: solver, grid and velocity.
      keys: for the velocity's draws, per position; the evaluation's time is folded in.
    """
    if model.path is None:
        return context.hidden
    noise = model.path.config.sigma * noise
    if settings.solver in runge_kutta.ADAPTIVE:
        x, t = adapt(model, context, noise, settings=settings, keys=keys)[:2]
        return evaluate(model, context, x, t)[0]
    target = make_target(model, context, settings=settings, keys=keys)
    x = integrate.solve(target, noise, solver=settings.solver, steps=settings.steps)
    end = jnp.where(settings.steps > 0, jnp.float32(1), 0.0)[None, None]
    return evaluate(model, context, x, end, table=settings.table)[0]


def adapt(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> integrate.AdaptiveSolution:
    """Where each position arrives with steps of its own, and what it took; `noise` is x_0 itself."""
    assert model.path is not None
    end, cache = 1 - 1 / model.path.config.sigma, context.cache

    def sequence(k: Array, v: Array, slots: Array, strength: Array, *rows: Any) -> integrate.AdaptiveSolution:
        own = KVCache(k=k[:, None], v=v[:, None], positions=slots[None], used=cache.used, shared=cache.shared)
        chosen = dataclasses.replace(settings, guidance=strength[None])

        def position(*row: Any) -> integrate.AdaptiveSolution:
            hidden, at, labels, noise, key = jax.tree.map(lambda a: a[None, None], row)
            target = make_target(model, Context(hidden, own, at, labels), settings=chosen, keys=key)
            found = integrate.solve_adaptive(
                target, noise, solver=settings.solver, tolerance=settings.tolerance, most=settings.steps, end=end
            )
            return found._replace(x=found.x[0, 0])

        return jax.vmap(position)(*rows)

    strengths = jnp.broadcast_to(settings.guidance, noise.shape[:1])
    rows = (cache.positions, strengths, context.hidden, context.positions, context.labels, noise, keys)
    return jax.vmap(sequence, in_axes=(1, 1, *[0] * 7))(cache.k, cache.v, *rows)
