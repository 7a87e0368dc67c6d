"""Integrates dx/dt = (target(t, x) - x) / (1 - t) from noise with diffrax (paper section 3.3).

Notable: on a uniform grid the state is the pair (a, y) with x = a x_0 + y. The equation is linear in x, so every
Runge-Kutta rule moves the noise's share a (a scalar) and the data's share y by themselves, and x is the same; but y is
of order one where x starts at sigma = 64, and float32 keeps 64 times more of it. The budget counts evaluations of the
path, including the final one that gives the answer's logits.

With adaptive steps the state is x itself, on which errors are measured. Controller, first step and reuse of slopes are
those of the release, so that every step is the same up to the last; by design only the end differs. torchdiffeq steps
past the end and interpolates back, diffrax shortens the last step to end there; and the release shares one error norm
over a batch, where here a caller gives each sequence its own by `jax.vmap`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import diffrax
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.runge_kutta import ADAPTIVE, FIXED
from l2d_jax.model.diffusion import END

Target = Callable[[Float[Array, ""], Float[Array, "*B C"]], Float[Array, "*B C"]]
FIRST_STEP = 0.05  # of the release's adaptive solvers


class AdaptiveSolution(NamedTuple):
    """Where an adaptive solver has arrived, and what it took."""

    x: Float[Array, "*B C"]
    t: Float[Array, ""]  # before the end if the steps ran out
    accepted: Int[Array, ""]
    rejected: Int[Array, ""]


def solve(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: str,
    steps: int | Int[Array, ""],
    end: float | Float[Array, ""] = 1.0,
) -> Float[Array, "*B C"]:
    """x at time `end`, from x_0 at t = 0 in `steps` equal intervals; with no interval, x_0 itself.

    Args:
      target: the estimate of x_1 at (t, x); dx/dt counts as zero at t = 1, as in the release.
      noise: x_0, in float32.
      solver: a key of `FIXED`.
      steps: number of intervals, possibly traced, so that one program serves every budget.
      end: the final time.
    """
    steps = jnp.asarray(steps)
    stop = jnp.where(steps > 0, jnp.float32(end), 0.0)
    shares, data = _integrate(target, noise, solver=solver, steps=steps, stop=stop, saveat=diffrax.SaveAt(t1=True))
    return shares[0] * noise + data[0]


def trajectory(
    target: Target, noise: Float[Array, "*B C"], *, solver: str, steps: int, end: float | Float[Array, ""] = 1.0
) -> Float[Array, "points *B C"]:
    """x at every point of the grid, both ends included; the arguments are those of `solve`."""
    saveat = diffrax.SaveAt(t0=True, steps=True)
    shares, data = _integrate(target, noise, solver=solver, steps=steps, stop=end, saveat=saveat, room=steps)
    return jax.vmap(lambda share, data: share * noise + data)(shares, data)


def solve_adaptive(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: str,
    tolerance: float | Float[Array, ""],
    most: int | Int[Array, ""],
    end: float | Float[Array, ""],
) -> AdaptiveSolution:
    """x at time `end`, in steps whose estimated errors keep to the tolerance.

    Args:
      target: the estimate of x_1 at (t, x); dx/dt counts as zero from t = 1 on.
      noise: x_0, in float32; all of it shares one error norm.
      solver: a key of `ADAPTIVE`.
      tolerance: relative to x, and absolute.
      most: steps, accepted or rejected, after which it stops where it is; 0 leaves x_0 as it is.
      end: the final time; the release's is 1 - 1/sigma.
    """
    stop = jnp.where(jnp.asarray(most) > 0, jnp.float32(end), 0.0)
    solution = _adapt(target, noise, solver, tolerance, most, stop, saveat=diffrax.SaveAt(t1=True))
    stats: Any = solution.stats
    states: Any = (solution.ys, solution.ts)
    return AdaptiveSolution(states[0][0], states[1][0], stats["num_accepted_steps"], stats["num_rejected_steps"])


def adaptive_trajectory(
    target: Target,
    noise: Float[Array, "*B C"],
    *,
    solver: str,
    tolerance: float | Float[Array, ""],
    stop: float,
    room: int,
) -> tuple[Float[Array, " room"], Float[Array, "room *B C"], Int[Array, ""]]:
    """Times and states after each accepted one of up to `room` steps, infinite beyond the last; and how many were not.

    The arguments are those of `solve_adaptive`, with `room` for the most steps and `stop` for the end.
    """
    solution = _adapt(target, noise, solver, tolerance, room, stop, saveat=diffrax.SaveAt(steps=True), room=room)
    times: Any = solution.ts
    states: Any = solution.ys
    stats: Any = solution.stats
    return times, states, stats["num_rejected_steps"]


def _integrate(
    target: Target,
    noise: Array,
    *,
    solver: str,
    steps: Any,
    stop: Any,
    saveat: diffrax.SaveAt,
    room: int | None = None,
) -> tuple[Float[Array, " saved"], Float[Array, "saved *B C"]]:
    """The noise's share and the data's, at the times that `saveat` names."""

    def field(t: Any, state: tuple[Array, Array], args: None) -> tuple[Array, Array]:
        del args
        share, data = state
        estimate, rate = target(t, share * noise + data), _rate(t)
        return -share * rate, (estimate - data) * rate

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        FIXED[solver][0](),
        t0=0.0,
        t1=stop,
        dt0=stop / jnp.maximum(steps, 1),
        y0=(jnp.ones((), noise.dtype), jnp.zeros_like(noise)),
        saveat=saveat,
        stepsize_controller=diffrax.ConstantStepSize(),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=room,
        throw=False,  # a check on the host would end the compiled program after every token
    )
    states: Any = solution.ys
    return states


def _adapt(
    target: Target,
    noise: Array,
    solver: str,
    tolerance: Any,
    most: Any,
    stop: Any,
    *,
    saveat: diffrax.SaveAt,
    room: int | None = None,
) -> diffrax.Solution:
    def field(t: Any, x: Array, args: None) -> Array:
        del args
        return (target(t, x) - x) * _rate(t)

    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        ADAPTIVE[solver][0](),
        t0=0.0,
        t1=stop,
        dt0=FIRST_STEP,
        y0=noise,
        saveat=saveat,
        stepsize_controller=_Capped(diffrax.PIDController(rtol=tolerance, atol=tolerance), jnp.asarray(most)),
        adjoint=diffrax.DirectAdjoint(),
        max_steps=room,
        throw=False,
    )


def _rate(t: Float[Array, ""]) -> Float[Array, ""]:
    """1 / (1 - t), and 0 from t = 1 on."""
    left = 1 - t
    return jnp.where(left > END, 1 / jnp.maximum(left, END), 0.0)


class _Capped(diffrax.AbstractStepSizeController[Any, Any]):
    """A controller that ends the integration after a number of steps, which is an array: diffrax's own is static."""

    controller: diffrax.PIDController
    most: Int[Array, ""]

    def wrap(self, direction: Any) -> "_Capped":
        """Diffrax's way to tell the direction of time."""
        return _Capped(self.controller.wrap(direction), self.most)

    def init(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The end of the first step; no step has been taken."""
        first, state = self.controller.init(*args, **kwargs)
        return first, (state, jnp.int32(0))

    def adapt_step_size(self, *args: Any, **kwargs: Any) -> Any:
        """The controller's decision, and the end of the integration at the last step."""
        *before, (state, count) = args
        *decision, state, result = self.controller.adapt_step_size(*before, state, **kwargs)  # type: ignore[call-arg]
        stopped = diffrax.RESULTS.where(count + 1 >= self.most, diffrax.RESULTS.max_steps_reached, result)
        return *decision, (state, count + 1), stopped
