"""From noise to a corrected hidden state: the ODE of diffusion tokens, at any positions at once (paper section 3.3).

Decoding refines the last position of each sequence; teacher-forced evaluation refines all answer positions at once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import corrected_hidden, make_target
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.side_by_side import refine_side_by_side
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model

Solution = TypeVar("Solution")


class Cost(NamedTuple):
    """What the path spent on tokens."""

    evaluations: Int[Array, "..."]
    passes: Int[
        Array, "..."
    ]  # over the path's weights, with an evaluation each or several side by side; the LM has none


def refine(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> tuple[Float[Array, "B M D"], Cost]:
    """Hidden states after the whole budget, and the cost of each position; their logits are the answer's.

    `noise` is x_0 with unit variance. The final evaluation counts. A uniform grid ends at `settings.end`. Adaptive
    steps, which each position chooses, end there or at 1 - 1/sigma as in the release, whichever is earlier. The time of
    an evaluation is folded into the keys of its velocity.
    """
    if model.path is None:
        none = jnp.zeros(noise.shape[:2], jnp.int32)
        return context.hidden, Cost(none, none)
    noise, solver = model.path.config.sigma * noise, settings.solver
    if solver.is_adaptive:
        x, t, accepted, rejected = adapt(model, context, noise, settings=settings, keys=keys)
        taken = solver.evaluations(accepted + rejected)
        return corrected_hidden(model, context, x, t)[0], Cost(taken, jnp.where(taken > 1, taken, 0))
    evaluations = jnp.broadcast_to(solver.evaluations(settings.steps).reshape(-1, 1), noise.shape[:2])
    if settings.stages is not None:
        hidden, passes = refine_side_by_side(model, context, noise, settings=settings, keys=keys)
        return hidden, Cost(evaluations, passes)
    target = make_target(model, context, settings=settings, keys=keys)
    refines = settings.steps.reshape(-1, 1) > 0

    def refined() -> Array:
        x = integrate.solve_fixed(target, noise, solver=settings.solver, steps=settings.steps, end=settings.end)
        last = jnp.where(refines, settings.end.reshape(-1, 1), 0.0)
        corrected = corrected_hidden(model, context, x, last, table=settings.table)[0]
        return jnp.where(refines[..., None], corrected, context.hidden)

    return jax.lax.cond(refines.any(), refined, lambda: context.hidden), Cost(
        evaluations, jnp.where(refines, evaluations, 0)
    )


def adapt(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> integrate.AdaptiveSolution:
    """Integrate each position with its own adaptive steps; `noise` is x_0 itself."""
    assert model.path is not None
    sigma = model.path.config.sigma

    def solve(target: integrate.Target, noise: Array, own: Refinement) -> integrate.AdaptiveSolution:
        options: Any = {"tolerance": own.tolerance, "max_steps": own.steps, "end": own.adaptive_end(sigma)}
        return integrate.solve_adaptive(target, noise, solver=own.solver, **options)

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
    """Call `solve` for each position separately, so that each has its own error norm; leaves get leading axes [B, M].

    `solve` gets the settings of the position's sequence as scalars.
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
