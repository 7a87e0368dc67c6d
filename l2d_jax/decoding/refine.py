"""From noise to a corrected hidden state: the ODE of a diffusion token, over any positions at once (paper section 3.3).

Decoding refines the last position of each sequence; teacher-forced evaluation refines every answer position at once.
"""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.config.conflicts import check_decoding
from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding import integrate
from l2d_jax.decoding.condition_table import CAPACITY, ConditionTable, build_table
from l2d_jax.decoding.solver import FIXED, Solver, find_solver
from l2d_jax.errors import require
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import map_logits

Solution = TypeVar("Solution")


@nnx.dataclass
class Refinement(nnx.Module):
    """How to integrate all sequences, or each. The arrays are arguments of a program, which the other fields choose."""

    steps: Int[Array, "*b"] = nnx.data()  # grid intervals, or an adaptive solver's most steps; 0 leaves the LM as it is
    velocity_temperature: Float[Array, "*b"] = nnx.data()
    anneal: Float[Array, "*b"] = nnx.data()  # 1: the temperature falls linearly to 0 as t goes to 1; 0: constant
    guidance: Float[Array, "#B"] = nnx.data()  # strength w_g; unused without labels
    tolerance: Float[Array, "*b"] = nnx.data()  # of an adaptive solver's steps, relative and absolute
    allowed: Bool[Array, "B V"] | None = nnx.data(default=None)  # tokens that estimates are made of; None: all
    table: ConditionTable | None = nnx.data(default=None)  # for the model's weights and these grids
    solver: Solver = nnx.static(default=FIXED["midpoint"])
    velocity: Literal["sample", "expectation"] = nnx.static(default="sample")

    @classmethod
    def from_config(cls, config: DecodeConfig, *, budget: int | None = None) -> "Refinement":
        """The settings for any model, and no table; raises `InputError` for a budget that the solver cannot spend."""
        solver = find_solver(config.solver)
        return cls(
            steps=jnp.int32(solver.steps(budget or config.budget)),
            velocity_temperature=jnp.float32(config.velocity_temperature),
            anneal=jnp.float32(config.anneal),
            guidance=jnp.float32([config.guidance]),
            tolerance=jnp.float32(config.tolerance),
            solver=solver,
            velocity=config.velocity,
        )

    @classmethod
    def prepare(cls, model: Model, config: DecodeConfig) -> "Refinement":
        """The settings for one model, with a table where there can be one; raises `InputError` as `check_settings`."""
        check_settings(config, None if model.path is None else model.path.config)
        table = cls.tabulate(model, config.solver, [config.budget])
        return dataclasses.replace(cls.from_config(config), table=table)

    @staticmethod
    def tabulate(model: Model, solver: str, budgets: Collection[int]) -> ConditionTable | None:
        """The table of conditions for the grids of these budgets; None where there can be none."""
        found = find_solver(solver)
        if model.path is None or found.is_adaptive or max(budgets) > CAPACITY:
            return None
        times = np.unique(np.concatenate([found.times(found.steps(budget)) for budget in budgets]))
        if len(times) > CAPACITY:
            return None
        padded = np.pad(times, (0, CAPACITY - len(times)), constant_values=np.inf)
        return build_table(model.llm, model.path, jnp.asarray(padded))

    def temperature(self, t: Float[Array, "*b"], step: Float[Array, "*b"]) -> Float[Array, "*b"]:
        """The velocity's temperature at t; annealing reads it ahead, so that the last estimate is the arg max."""
        annealed = diffusion.anneal(self.velocity_temperature, t + self.solver.lookahead * step)
        return jnp.where(self.anneal > 0, annealed, self.velocity_temperature)


def check_settings(config: DecodeConfig, path: PathConfig | None) -> None:
    """Raise `InputError` for settings that a model with this path, or without one, cannot follow.

    Those are a budget that the solver cannot spend, one above 1 without a path, and what `check_decoding` refuses.
    """
    problem = f"a budget of {config.budget} needs a diffusion path, and this model has none"
    require(path is not None or config.budget == 1, f"{problem}: use a budget of 1")
    find_solver(config.solver).steps(config.budget)
    check_decoding(config, path)


def corrected_hidden(
    model: Model,
    context: Context,
    x: Float[Array, "B M C"],
    t: Float[Array, "#B #M"],
    *,
    table: ConditionTable | None = None,
) -> Float[Array, "G B M D"]:
    """Corrected hidden states, at one time or at one per position; G is 1, or 2 with labels: conditional, then null.

    With a table there is one time, a time of its grid.
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
    temperature: Float[Array, "#B #M"],
    keys: Key[Array, "B M"],
    kind: Literal["sample", "expectation"],
    allowed: Bool[Array, "B V"] | None = None,
) -> Float[Array, "B M C"]:
    """The estimate of x_1 from the logits: the vector of a sampled token, or the mean over the (allowed) vocabulary.

    It is not a number where the hidden state is not: an arg max would hide that.
    """
    assert model.table is not None
    table = model.table

    def at(logits: Array, key_data: Array, temperature: Array, allowed: Array | None = None) -> Array:
        if allowed is not None:
            logits = jnp.where(allowed, logits, -jnp.inf)
        if kind == "expectation":
            mean = jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6)[:, None]) @ table
            return jnp.where(temperature[:, None] > 0, mean, table[diffusion.arg_max(logits)])

        return table[diffusion.sample_rows(jax.random.wrap_key_data(key_data), logits, temperature)]

    temperature = jnp.broadcast_to(temperature, hidden.shape[:2])
    masks = () if allowed is None else (jnp.broadcast_to(allowed[:, None], (*hidden.shape[:2], allowed.shape[1])),)
    estimates = map_logits(model.llm, hidden, at, jax.random.key_data(keys), temperature, *masks)
    return jnp.where(jnp.isnan(hidden[..., :1]), jnp.nan, estimates)


def make_target(
    model: Model,
    context: Context,
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
    end: float | Float[Array, ""] = 1.0,
) -> integrate.Target:
    """The estimate of x_1 that the solver integrates towards, at one t or each sequence's; guided if it has labels."""
    step = end / jnp.maximum(settings.steps, 1).astype(jnp.float32)

    def target(t: Array, x: Array) -> Array:
        batch, length, _ = x.shape
        hidden = corrected_hidden(model, context, x, t.reshape(-1, 1), table=settings.table)
        branches = hidden.shape[0]
        time = jnp.broadcast_to(jax.lax.bitcast_convert_type(t, jnp.uint32), (batch,))
        folded = jax.vmap(jax.vmap(jax.random.fold_in, (0, None)))(keys, time)
        temperature = jnp.broadcast_to(settings.temperature(t, step), (branches, batch)).reshape(-1, 1)
        estimates = estimate(
            model,
            hidden.reshape(branches * batch, length, -1),
            temperature=temperature,
            keys=jnp.tile(folded, (branches, 1)),
            kind=settings.velocity,
            allowed=None if settings.allowed is None else jnp.tile(settings.allowed, (branches, 1)),
        ).reshape(branches, batch, length, -1)
        if branches == 1:
            return estimates[0]
        return diffusion.guide(estimates[0], estimates[1], settings.guidance[:, None, None])

    return jax.jit(target)  # a solver evaluates it at several places of a program, which traces it once


def refine(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> tuple[Float[Array, "B M D"], Int[Array, "B M"]]:
    """Hidden states after the whole budget, whose logits are the answer, and the evaluations that each position took.

    `noise` is x_0 of unit variance, and the final evaluation counts. A uniform grid ends at t = 1. Adaptive steps, each
    position's own, end at 1 - 1/sigma as in the release. An evaluation's time is folded into the keys of its velocity.
    """
    if model.path is None:
        return context.hidden, jnp.zeros(noise.shape[:2], jnp.int32)
    noise, solver = model.path.config.sigma * noise, settings.solver
    if solver.is_adaptive:
        x, t, accepted, rejected = adapt(model, context, noise, settings=settings, keys=keys)
        return corrected_hidden(model, context, x, t)[0], solver.evaluations(accepted + rejected)
    evaluations = jnp.broadcast_to(solver.evaluations(settings.steps).reshape(-1, 1), noise.shape[:2])
    target = make_target(model, context, settings=settings, keys=keys)
    refines = settings.steps.reshape(-1, 1) > 0

    def refined() -> Array:
        x = integrate.solve_fixed(target, noise, solver=settings.solver, steps=settings.steps)
        corrected = corrected_hidden(model, context, x, refines.astype(jnp.float32), table=settings.table)[0]
        return jnp.where(refines[..., None], corrected, context.hidden)

    return jax.lax.cond(refines.any(), refined, lambda: context.hidden), evaluations


def adapt(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> integrate.AdaptiveSolution:
    """Where each position ends with adaptive steps of its own, and what it took; `noise` is x_0 itself."""
    assert model.path is not None
    end = 1 - 1 / model.path.config.sigma

    def solve(target: integrate.Target, noise: Array, own: Refinement) -> integrate.AdaptiveSolution:
        return integrate.solve_adaptive(
            target, noise, solver=own.solver, tolerance=own.tolerance, max_steps=own.steps, end=end
        )

    solution = solve_each(model, context, noise, solve, settings=settings, keys=keys)
    return solution._replace(x=solution.x[:, :, 0, 0])


def solve_each(
    model: Model,
    context: Context,
    noise: Float[Array, "B M C"],
    solve: Callable[[integrate.Target, Float[Array, "1 1 C"], Refinement], Solution],
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
) -> Solution:
    """`solve` for each position by itself, so that it has an error norm of its own; leaves gain leading axes [B, M].

    `solve` gets the settings of the position's sequence, with single numbers.
    """
    cache = context.cache

    def sequence(k: Array, v: Array, slots: Array, chosen: Refinement, *rows: Any) -> Solution:
        own = dataclasses.replace(cache, k=k[:, None], v=v[:, None], positions=slots[None])
        allowed = None if chosen.allowed is None else chosen.allowed[None]
        chosen = dataclasses.replace(chosen, guidance=chosen.guidance[None], allowed=allowed)

        def position(*row: Any) -> Solution:
            hidden, inputs, at, labels, noise, key = jax.tree.map(lambda a: a[None, None], row)
            context = Context(hidden, own, at, labels, inputs=inputs)
            return solve(make_target(model, context, settings=chosen, keys=key), noise, chosen)

        return jax.vmap(position)(*rows)

    each = jax.tree.map(lambda a: jnp.broadcast_to(a, (*noise.shape[:1], *a.shape[1:])), settings)
    read = (context.hidden, context.inputs, context.positions, context.labels)
    rows = (cache.positions, each, *read, noise, keys)
    return jax.vmap(sequence, in_axes=(1, 1, *[0] * 8))(cache.k, cache.v, *rows)
