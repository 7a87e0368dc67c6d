"""Integrates dx/dt = (target(t, x) - x) / (1 - t) from noise with diffrax (paper section 3.3).

Notable: on a uniform grid the state is the pair (a, y) with x = a x_0 + y. The equation is linear in x, so every
Runge-Kutta method can integrate the coefficient a of the noise (a scalar) and the data y separately, with the same x.
But y is of order one while x starts at sigma = 64, so float32 keeps y 64 times more precisely.

With adaptive steps the state is x itself, and errors are measured on it. The controller, the first step and the reuse
of slopes are those of the release, so all steps except the last are the same. The end differs by design: torchdiffeq
steps past it and interpolates back, and diffrax shortens the last step. Also, the release uses one error norm for a
batch; here a caller gives each sequence its own norm by `jax.vmap`.
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
# 1/n for each n. XLA would round the division differently for one grid than for several. Then the bits of t, which are
# folded into sampling keys, would depend on the other sequences.
INVERSES = (1 / np.maximum(np.arange(10_001), 1)).astype(np.float32)


class AdaptiveSolution(NamedTuple):
    """The final state of an adaptive solver, and its numbers of steps."""

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
    end: float | Float[Array, "#B"] | Float[Array, ""] = 1.0,
) -> Float[Array, "*B C"]:
    """x at time `end`, from x_0 at t = 0 in `steps` equal intervals; without an interval, x_0 itself.

    `target` is the estimate of x_1 at (t, x); dx/dt counts as zero at t = 1, as in the release. `noise` is x_0, in
    float32. `steps` and `end` may be traced, so that one program serves every budget and end. They may also differ
    between sequences; in that case `steps`, `end` and t have one value per sequence.
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
    """x at every point of the grid, including both ends; arguments as for `solve_fixed`.

    Traced `steps` are at most `most`; points beyond them are NaN.
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
    """x at time `end`, in steps whose estimated errors are within the relative and absolute tolerance.

    There is one error norm for the whole array. After `max_steps` accepted or rejected steps, the integration stops
    before the end; 0 returns x_0. In the release, `end` is 1 - 1/sigma.
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
    end: float | Float[Array, ""],
    max_steps: int | Int[Array, ""],
    most: int | None = None,
) -> tuple[Float[Array, " steps"], Float[Array, "steps *B C"], Int[Array, ""]]:
    """Times and states at the end of each accepted step, and the number of rejected steps.

    Entries beyond the last step are infinite. Traced `max_steps` are at most `most`.
    """
    save: Any = {"saveat": diffrax.SaveAt(steps=True), "max_steps": int(max_steps) if most is None else most}
    solution = _run_adaptive(target, noise, solver, tolerance, max_steps, end, **save)
    return solution.ts, solution.ys, solution.stats["num_rejected_steps"]


def _run_fixed(target: Target, noise: Array, solver: Solver, steps: Any, stop: Any, **save: Any) -> Any:
    """The coefficient of the noise and the data at the times of `saveat`, in units of intervals."""
    steps = jnp.asarray(steps)
    length = stop * jnp.asarray(INVERSES)[steps]

    def beside(values: Array) -> Array:
        return values.reshape(values.shape + (1,) * (noise.ndim - values.ndim))

    def slopes(count: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
        scale, data = state
        t = jnp.minimum(count, steps) * length  # a sequence that has ended stays at its end
        estimate, rate = target(t, beside(scale) * noise + data), _rate(t) * length
        return -scale * rate, (estimate - data) * beside(rate)

    start = (jnp.ones(jnp.shape(steps), noise.dtype), jnp.zeros_like(noise))
    stepping = _Stepping(diffrax.ConstantStepSize(), jnp.ones((), noise.dtype))
    term = _Intervals(slopes, steps)
    return _solve(term, start, solver, jnp.max(steps).astype(noise.dtype), stepping, **save).ys


def _run_adaptive(
    target: Target, noise: Array, solver: Solver, tolerance: Any, most: Any, stop: Any, **save: Any
) -> Any:
    def field(t: Any, x: Array, args: None) -> Array:
        del args
        return (target(t, x) - x) * _rate(t)

    controller = diffrax.PIDController(rtol=tolerance, atol=tolerance)
    stepping = _Stepping(controller, jnp.asarray(FIRST_STEP, noise.dtype), jnp.asarray(most))
    return _solve(diffrax.ODETerm(field), noise, solver, stop, stepping, **save)


def _solve(term: Any, start: Any, solver: Solver, stop: Any, stepping: "_Stepping", **save: Any) -> Any:
    return diffrax.diffeqsolve(
        term,
        solver.method(),
        t0=0.0,
        t1=stop,
        dt0=None,
        y0=start,
        stepsize_controller=stepping,
        adjoint=diffrax.DirectAdjoint(),
        throw=False,  # a check on the host would interrupt the compiled program after every token
        **{"max_steps": None} | save,
    )


def _rate(t: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """1 / (1 - t), and 0 from t = 1 on."""
    rest = 1 - t
    return jnp.where(rest > END, 1 / jnp.maximum(rest, END), 0.0)


class _Intervals(diffrax.AbstractTerm[Any, Any]):
    """An ODE in units of grid intervals, of which each sequence has its own number; later ones have no length.

    The state is the pair of `_run_fixed`. A sequence that has ended keeps its state while others go on.
    """

    slopes: Callable[[Array, tuple[Array, Array]], tuple[Array, Array]]
    steps: Int[Array, "*B"]

    def vf(self, t: Any, y: Any, args: Any) -> Any:
        """The slopes of the state, per interval."""
        del args
        return self.slopes(t, y)

    def contr(self, t0: Any, t1: Any, **kwargs: Any) -> Float[Array, "*B"]:
        """The length of a step for each sequence: 1, or 0 after its end."""
        del kwargs
        return jnp.where(t0 < self.steps, t1 - t0, 0.0)

    def prod(self, vf: Any, control: Float[Array, "*B"]) -> Any:
        """The change of the state in such a step."""
        scale, data = vf
        return control * scale, control.reshape(control.shape + (1,) * (data.ndim - control.ndim)) * data


class _Stepping(diffrax.AbstractStepSizeController[Any, Any]):
    """A step size controller with a given first step, which can end the integration after a traced number of steps.

    If the first step is passed to diffrax, it checks it with a host callback in the middle of every token, and JAX does
    not cache compiled programs with host callbacks. diffrax's `max_steps` is static.
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
        """The controller's decision, or after the last step the end of the integration."""
        *before, (state, count) = args
        *decision, state, result = self.controller.adapt_step_size(*before, state, **kwargs)  # type: ignore[call-arg]
        if self.max_steps is not None:
            is_last = count + 1 >= self.max_steps
            result = diffrax.RESULTS.where(is_last, diffrax.RESULTS.max_steps_reached, result)
        return *decision, (state, count + 1), result
