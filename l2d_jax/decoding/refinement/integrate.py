"""Integrates dx/dt = (target(t, x) - x) / (1 - t) from noise with diffrax (paper section 3.3).

Notable: on a uniform grid the state is the pair (a, y) with x = a x_0 + y. The equation is linear in x, so every
Runge-Kutta method integrates the coefficient a of the noise (a scalar) and the data y separately, and x is the same.
But y is of order one where x starts at sigma = 64, and float32 keeps 64 times more of it.

With adaptive steps the state is x itself, and errors are measured on it. The controller, the first step and the reuse
of slopes are those of the release, so that all steps but the last are the same. The end differs by design: torchdiffeq
steps past it and interpolates back, and diffrax shortens the last step to end there. Also, the release takes one error
norm over a batch, and here a caller gives each sequence a norm of its own by `jax.vmap`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.refinement.solver import Solver
from l2d_jax.model.diffusion import END

Target = Callable[[Float[Array, "*b"], Float[Array, "*B C"]], Float[Array, "*B C"]]
FIRST_STEP = 0.05  # length of an adaptive solver's first step, as in the release
# 1/n by n. A program would divide by another rule for one grid than for several, and t of an evaluation, by whose bits
# a token is sampled, would depend on the other sequences.
INVERSES = (1 / np.maximum(np.arange(10_001), 1)).astype(np.float32)


class AdaptiveSolution(NamedTuple):
    """The state in which an adaptive solver ended, and the steps that it took."""

    x: Float[Array, "*B C"]
    t: Float[Array, ""]  # earlier than the end if the steps ran out
    accepted: Int[Array, ""]
    rejected: Int[Array, ""]


def solve_fixed(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: Solver,
    steps: int | Int[Array, "#B"] | Int[Array, ""],
    end: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*B C"]:
    """x at time `end`, from x_0 at t = 0 in `steps` equal intervals; without an interval, x_0 itself.

    `target` is the estimate of x_1 at (t, x); dx/dt counts as zero at t = 1, as in the release. `noise` is x_0, in
    float32. `steps` may be traced, so that one program serves every budget, and be those of each sequence, up to t = 1;
    then t is one of each sequence, too.
    """
    steps = jnp.asarray(steps)
    stop = jnp.where(steps > 0, jnp.float32(end), 0.0)
    scale, data = _run_fixed(target, noise, solver, steps, stop, saveat=diffrax.SaveAt(t1=True))
    return scale[0].reshape(steps.shape + (1,) * (noise.ndim - steps.ndim)) * noise + data[0]


def fixed_states(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: Solver,
    steps: int | Int[Array, ""],
    end: float | Float[Array, ""] = 1.0,
    most: int | None = None,
) -> Float[Array, "points *B C"]:
    """x at every point of the grid, both ends included; arguments as for `solve_fixed`.

    Traced steps are at most `most`; the points beyond them are no numbers.
    """
    saveat = diffrax.SaveAt(t0=True, steps=True)
    most = int(steps) if most is None else most
    scales, data = _run_fixed(target, noise, solver, steps, end, saveat=saveat, max_steps=most)
    return jax.vmap(lambda scale, data: scale * noise + data)(scales, data)


def solve_adaptive(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: Solver,
    tolerance: float | Float[Array, ""],
    max_steps: int | Int[Array, ""],
    end: float | Float[Array, ""],
) -> AdaptiveSolution:
    """x at time `end`, in steps whose estimated errors stay within the relative and absolute tolerance.

    There is one error norm for all of the noise. After `max_steps`, accepted or rejected, the integration stops short
    of the end; 0 leaves x_0 itself. The release's end is 1 - 1/sigma.
    """
    stop = jnp.where(jnp.asarray(max_steps) > 0, jnp.float32(end), 0.0)
    solution = _run_adaptive(target, noise, solver, tolerance, max_steps, stop, saveat=diffrax.SaveAt(t1=True))
    accepted, rejected = (solution.stats[f"num_{kind}_steps"] for kind in ("accepted", "rejected"))
    return AdaptiveSolution(solution.ys[0], solution.ts[0], accepted, rejected)


def adaptive_states(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: Solver,
    tolerance: float | Float[Array, ""],
    end: float,
    max_steps: int | Int[Array, ""],
    most: int | None = None,
) -> tuple[Float[Array, " steps"], Float[Array, "steps *B C"], Int[Array, ""]]:
    """Times and states at the end of each accepted step, infinite beyond the last, and the number of rejected steps.

    Traced `max_steps` are at most `most`.
    """
    save: Any = {"saveat": diffrax.SaveAt(steps=True), "max_steps": int(max_steps) if most is None else most}
    solution = _run_adaptive(target, noise, solver, tolerance, max_steps, end, **save)
    return solution.ts, solution.ys, solution.stats["num_rejected_steps"]


def _run_fixed(target: Target, noise: Array, solver: Solver, steps: Any, stop: Any, **save: Any) -> Any:
    """The coefficient of the noise, and the data, at the times of `saveat`, which count intervals."""
    length = stop * jnp.asarray(INVERSES)[steps]

    def beside(values: Array) -> Array:
        return values.reshape(values.shape + (1,) * (noise.ndim - values.ndim))

    def field(count: Any, state: tuple[Array, Array], args: None) -> tuple[Array, Array]:
        del args
        scale, data = state
        t = count * length
        estimate, rate = target(t, beside(scale) * noise + data), _rate(t) * length
        return -scale * rate, (estimate - data) * beside(rate)

    start = (jnp.ones(jnp.shape(steps), noise.dtype), jnp.zeros_like(noise))
    stepping = _Stepping(diffrax.ConstantStepSize(), jnp.ones((), noise.dtype))
    return _solve(field, start, solver, jnp.max(steps).astype(noise.dtype), stepping, **save).ys


def _run_adaptive(
    target: Target, noise: Array, solver: Solver, tolerance: Any, most: Any, stop: Any, **save: Any
) -> Any:
    def field(t: Any, x: Array, args: None) -> Array:
        del args
        return (target(t, x) - x) * _rate(t)

    controller = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    stepping = _Stepping(controller, jnp.asarray(FIRST_STEP, noise.dtype), jnp.asarray(most))
    return _solve(field, noise, solver, stop, stepping, **save)


def _solve(field: Any, start: Any, solver: Solver, stop: Any, stepping: "_Stepping", **save: Any) -> Any:
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver.method(),
        t0=0.0,
        t1=stop,
        dt0=None,
        y0=start,
        stepsize_controller=stepping,
        adjoint=diffrax.DirectAdjoint(),
        throw=False,  # a check on the host would end the compiled program after every token
        **{"max_steps": None} | save,
    )


def _rate(t: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / (1 - t); 0 from t = 1 on."""
    rest = 1 - t
    return jnp.where(rest > END, 1 / jnp.maximum(rest, END), 0.0)


class _Stepping(diffrax.AbstractStepSizeController[Any, Any]):
    """A controller with the length of its first step, which may end the integration after a traced number of steps.

    Where diffrax is given the first step, it compares it with the ends by a call of the host, in the middle of every
    token; and JAX keeps no program that calls the host in its cache of compiled ones. Its own `max_steps` is static.
    """

    controller: diffrax.AbstractStepSizeController[Any, Any]
    first: Float[Array, ""]
    max_steps: Int[Array, ""] | None = None

    def wrap(self, direction: Any) -> "_Stepping":
        """Called by diffrax with the direction of time."""
        return _Stepping(self.controller.wrap(direction), self.first, self.max_steps)

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, dt0: None, *args: Any) -> tuple[Any, Any]:
        """The end of the first step, and a count of no steps."""
        del dt0
        end, state = self.controller.init(terms, t0, t1, y0, self.first, *args)
        return end, (state, jnp.int32(0))

    def adapt_step_size(self, *args: Any, **kwargs: Any) -> Any:
        """The controller's decision, or the end of the integration at the last step."""
        *before, (state, count) = args
        *decision, state, result = self.controller.adapt_step_size(*before, state, **kwargs)  # type: ignore[call-arg]
        if self.max_steps is not None:
            is_last = count + 1 >= self.max_steps
            result = diffrax.RESULTS.where(is_last, diffrax.RESULTS.max_steps_reached, result)
        return *decision, (state, count + 1), result
