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
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.solver import Solver
from l2d_jax.model.diffusion import END

Target = Callable[[Float[Array, ""], Float[Array, "*B C"]], Float[Array, "*B C"]]
FIRST_STEP = 0.05  # length of an adaptive solver's first step, as in the release


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
    steps: int | Int[Array, ""],
    end: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*B C"]:
    """x at time `end`, from x_0 at t = 0 in `steps` equal intervals; without an interval, x_0 itself.

    Args:
      target: the estimate of x_1 at (t, x); dx/dt counts as zero at t = 1, as in the release.
      noise: x_0, in float32.
      solver: one of `FIXED`.
      steps: number of intervals; may be traced, so that one program serves every budget.
      end: the final time.
    """
    steps = jnp.asarray(steps)
    stop = jnp.where(steps > 0, jnp.float32(end), 0.0)
    scale, data = _run_fixed(target, noise, solver=solver, steps=steps, stop=stop, saveat=diffrax.SaveAt(t1=True))
    return scale[0] * noise + data[0]


def fixed_states(
    target: Target, noise: Float[Array, "*B C"], *, solver: Solver, steps: int, end: float | Float[Array, ""] = 1.0
) -> Float[Array, "points *B C"]:
    """x at every point of the grid, both ends included; arguments as for `solve_fixed`."""
    saveat = diffrax.SaveAt(t0=True, steps=True)
    scales, data = _run_fixed(target, noise, solver=solver, steps=steps, stop=end, saveat=saveat, capacity=steps)
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
    """x at time `end`, in steps whose estimated errors stay within the tolerance.

    Args:
      target: the estimate of x_1 at (t, x); dx/dt counts as zero from t = 1 on.
      noise: x_0, in float32; there is one error norm for all of it.
      solver: one of `ADAPTIVE`.
      tolerance: both the relative and the absolute tolerance.
      max_steps: steps, accepted or rejected, after which the integration stops short of the end; 0: x_0 itself.
      end: the final time; the release's is 1 - 1/sigma.
    """
    stop = jnp.where(jnp.asarray(max_steps) > 0, jnp.float32(end), 0.0)
    solution = _run_adaptive(target, noise, solver, tolerance, max_steps, stop, saveat=diffrax.SaveAt(t1=True))
    stats: Any = solution.stats
    states: Any = (solution.ys, solution.ts)
    return AdaptiveSolution(states[0][0], states[1][0], stats["num_accepted_steps"], stats["num_rejected_steps"])


def adaptive_states(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: Solver,
    tolerance: float | Float[Array, ""],
    end: float,
    max_steps: int,
) -> tuple[Float[Array, " steps"], Float[Array, "steps *B C"], Int[Array, ""]]:
    """Times and states at the end of each accepted step, infinite beyond the last, and the number of rejected steps.

    Arguments as for `solve_adaptive`.
    """
    saveat = diffrax.SaveAt(steps=True)
    solution = _run_adaptive(target, noise, solver, tolerance, max_steps, end, saveat=saveat, capacity=max_steps)
    times: Any = solution.ts
    states: Any = solution.ys
    stats: Any = solution.stats
    return times, states, stats["num_rejected_steps"]


def _run_fixed(
    target: Target,
    noise: Array,
    *,
    solver: Solver,
    steps: Any,
    stop: Any,
    saveat: diffrax.SaveAt,
    capacity: int | None = None,
) -> tuple[Float[Array, " saved"], Float[Array, "saved *B C"]]:
    """The coefficient of the noise, and the data, at the times of `saveat`."""

    def field(t: Any, state: tuple[Array, Array], args: None) -> tuple[Array, Array]:
        del args
        scale, data = state
        estimate, rate = target(t, scale * noise + data), _rate(t)
        return -scale * rate, (estimate - data) * rate

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver.method(),
        t0=0.0,
        t1=stop,
        dt0=None,
        y0=(jnp.ones((), noise.dtype), jnp.zeros_like(noise)),
        saveat=saveat,
        stepsize_controller=_Stepping(diffrax.ConstantStepSize(), stop / jnp.maximum(steps, 1)),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=capacity,
        throw=False,  # a check on the host would end the compiled program after every token
    )
    states: Any = solution.ys
    return states


def _run_adaptive(
    target: Target,
    noise: Array,
    solver: Solver,
    tolerance: Any,
    max_steps: Any,
    stop: Any,
    *,
    saveat: diffrax.SaveAt,
    capacity: int | None = None,
) -> diffrax.Solution:
    def field(t: Any, x: Array, args: None) -> Array:
        del args
        return (target(t, x) - x) * _rate(t)

    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        solver.method(),
        t0=0.0,
        t1=stop,
        dt0=None,
        y0=noise,
        saveat=saveat,
        stepsize_controller=_Stepping(
            diffrax.PIDController(rtol=tolerance, atol=tolerance),
            jnp.asarray(FIRST_STEP, noise.dtype),
            jnp.asarray(max_steps),
        ),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=capacity,
        throw=False,
    )


def _rate(t: Float[Array, ""]) -> Float[Array, ""]:
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
