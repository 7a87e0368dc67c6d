"""Integrates dx/dt = (target(t, x) - x) / (1 - t) from noise with diffrax, on a uniform grid (paper section 3.3).

Notable: the state is the pair (a, y) with x = a x_0 + y. The equation is linear in x, so every Runge-Kutta rule moves
the noise's share a (a scalar) and the data's share y by themselves, and x is the same; but y is of order one where x
starts at sigma = 64, and float32 keeps 64 times more of it. The budget counts evaluations of the path, including the
final one that gives the answer's logits. Heun's three-stage rule and the 3/8 rule are those of torchdiffeq (`heun3`,
`rk4`).
"""

from collections.abc import Callable
from typing import Any, ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.diffusion import END
from l2d_jax.errors import InputError

Target = Callable[[Float[Array, ""], Float[Array, "*B C"]], Float[Array, "*B C"]]


class _FixedStepRungeKutta(diffrax.AbstractERK):
    """An explicit rule without an error estimate; the zero `b_error` is never read by `ConstantStepSize`."""

    interpolation_cls: ClassVar[Any] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k


class Heun3(_FixedStepRungeKutta):
    """Heun's third-order rule."""

    tableau: ClassVar[diffrax.ButcherTableau] = diffrax.ButcherTableau(
        c=np.array([1 / 3, 2 / 3]),
        a_lower=(np.array([1 / 3]), np.array([0.0, 2 / 3])),
        b_sol=np.array([1 / 4, 0.0, 3 / 4]),
        b_error=np.zeros(3),
    )

    def order(self, terms: Any) -> int:
        """Of the error at the end."""
        del terms
        return 3


class ThreeEighths(_FixedStepRungeKutta):
    """Kutta's 3/8 rule, of fourth order."""

    tableau: ClassVar[diffrax.ButcherTableau] = diffrax.ButcherTableau(
        c=np.array([1 / 3, 2 / 3, 1.0]),
        a_lower=(np.array([1 / 3]), np.array([-1 / 3, 1.0]), np.array([1.0, -1.0, 1.0])),
        b_sol=np.array([1 / 8, 3 / 8, 3 / 8, 1 / 8]),
        b_error=np.zeros(4),
    )

    def order(self, terms: Any) -> int:
        """Of the error at the end."""
        del terms
        return 4


# name -> rule and evaluations per interval
SOLVERS: dict[str, tuple[type[diffrax.AbstractERK] | type[diffrax.Euler], int]] = {
    "euler": (diffrax.Euler, 1),
    "midpoint": (diffrax.Midpoint, 2),
    "heun": (diffrax.Heun, 2),
    "heun3": (Heun3, 3),
    "rk4": (ThreeEighths, 4),
}


def intervals(solver: str, budget: int) -> int:
    """The number of grid intervals that spend `budget` evaluations, the final one included.

    Raises `InputError` for a budget that the solver cannot spend exactly, naming the nearest ones that it can.
    """
    if solver not in SOLVERS:
        raise InputError(f"unknown solver {solver!r}: choose from {', '.join(SOLVERS)}")
    stages = SOLVERS[solver][1]
    if budget < 1 or (budget - 1) % stages:
        below = max(0, budget - 1) // stages * stages + 1
        raise InputError(
            f"a budget of {budget} evaluations is unreachable for {solver}, which takes 1 + {stages} n: "
            f"try {below} or {below + stages}"
        )
    return (budget - 1) // stages


def lookahead(solver: str) -> float:
    """How far beyond t an annealed temperature is read, in grid intervals (the release's choice)."""
    return 0.5 if solver == "midpoint" else 1.0


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
      solver: a key of `SOLVERS`.
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
        left = 1 - t
        estimate = target(t, share * noise + data)
        rate = jnp.where(left > END, 1 / jnp.maximum(left, END), 0.0)
        return -share * rate, (estimate - data) * rate

    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        SOLVERS[solver][0](),
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
