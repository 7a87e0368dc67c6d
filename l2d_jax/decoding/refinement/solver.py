"""The solvers of the ODE: their Runge-Kutta methods, and the number of steps that a budget of evaluations buys.

The budget is the number of evaluations of the path for one token, including the final one, which gives the answer's
logits. A budget of 1 is the LM alone, without a step, for every solver.

The methods here are those of the paper's experiments (section 3.3) that diffrax lacks. Heun's three-stage method and
the 3/8 rule are torchdiffeq's `heun3` and `rk4`. The embedded pairs also follow torchdiffeq, including their reuse of a
slope: the last stage of a step is the first stage of the next. For Bogacki and Shampine's pair these two slopes are
equal. For the other two, the last stage belongs to the step's lower-order result, and a step costs one evaluation fewer
than diffrax's solvers with these tableaux would.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import diffrax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.errors import InputError, require

AMPLE = 512  # default budget of an adaptive solver, in evaluations per token


class FixedStepRungeKutta(diffrax.AbstractERK):
    """An explicit method without an error estimate; `ConstantStepSize` never reads the zero `b_error`."""

    interpolation_cls: ClassVar[Any] = diffrax.ThirdOrderHermitePolynomialInterpolation.from_k


class _OfSlopes(diffrax.AbstractSolver[Any]):
    """Shared parts of solvers that do not derive from diffrax's Runge-Kutta classes."""

    term_structure: ClassVar[Any] = diffrax.AbstractTerm
    interpolation_cls: ClassVar[Any] = diffrax.LocalLinearInterpolation

    def func(self, terms: Any, t0: Any, y0: Any, args: Any) -> Any:
        """The slope at a point."""
        return terms.vf(t0, y0, args)


class EmbeddedPair(_OfSlopes, diffrax.AbstractAdaptiveSolver[Array]):
    """A method with an error estimate; its state is the slope at the start of the next step."""

    tableau: ClassVar[diffrax.ButcherTableau]
    accuracy: ClassVar[int]

    def order(self, terms: Any) -> int:
        """The order of the global error, from which diffrax chooses the next step."""
        del terms
        return self.accuracy

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> Any:
        """The slope at the start of the integration."""
        del t1
        return terms.vf(t0, y0, args)

    def step(
        self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any, solver_state: Any, made_jump: Any
    ) -> tuple[Any, Any, dict[str, Any], Any, Any]:
        """Take one step, starting with the slope that the previous step returned."""
        del made_jump
        length, slopes = t1 - t0, [solver_state]
        for node, row in zip(self.tableau.c, self.tableau.a_lower, strict=True):
            t = t1 if node == 1 else t0 + node * length
            slopes.append(terms.vf(t, y0 + length * _combine(row, slopes), args))
        y1 = y0 + length * _combine(self.tableau.b_sol, slopes)
        error = length * _combine(self.tableau.b_error, slopes)
        return y1, error, {"y0": y0, "y1": y1}, slopes[-1], diffrax.RESULTS.successful


class Restart(_OfSlopes):
    """Puts x on the straight line from x_0 to the newest estimate, so that earlier estimates have no effect.

    As in multistep sampling of consistency models (Song et al. 2023, algorithm 1), but with x_0 as the only noise. The
    state is the pair of `integrate`: the coefficient a = 1 - t of x_0, and the data y. At an end before t = 1, x keeps
    the share 1 - t of x_0, as in training.
    """

    def order(self, terms: Any) -> int:
        """The order of Euler's method, which takes the same steps if the estimate does not change."""
        del terms
        return 1

    def init(self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any) -> None:
        """There is no state."""

    def step(
        self, terms: Any, t0: Any, t1: Any, y0: Any, args: Any, solver_state: None, made_jump: Any
    ) -> tuple[Any, None, dict[str, Any], None, Any]:
        """Replace y by the estimate, multiplied by t at the end of the step."""
        del solver_state, made_jump
        changes = terms.vf_prod(t0, y0, args, terms.contr(t0, t1))
        (scale, data), (change, slope) = y0, changes  # the change of a is minus the step
        end = scale + change
        share, left, after = (a.reshape(a.shape + (1,) * (data.ndim - a.ndim)) for a in (change, scale, end))
        estimate = data - slope * left / jnp.where(share < 0, share, -1.0)
        y1 = end, jnp.where(share < 0, (1 - after) * estimate, data)
        return y1, None, {"y0": y0, "y1": y1}, None, diffrax.RESULTS.successful


def _combine(weights: Any, slopes: list[Any]) -> Any:
    return sum(float(weight) * slope for weight, slope in zip(weights, slopes, strict=True) if weight)


def _tableau(c: list[float], a: list[list[float]], b: list[float], error: list[float]) -> diffrax.ButcherTableau:
    return diffrax.ButcherTableau(np.array(c), np.array(b), np.array(error), tuple(map(np.array, a)))


class Heun3(FixedStepRungeKutta):
    """Heun's third-order method."""

    tableau: ClassVar[Any] = _tableau([1 / 3, 2 / 3], [[1 / 3], [0.0, 2 / 3]], [1 / 4, 0.0, 3 / 4], [0.0] * 3)


class ThreeEighths(FixedStepRungeKutta):
    """Kutta's 3/8 rule, a method of fourth order."""

    tableau: ClassVar[Any] = _tableau(
        [1 / 3, 2 / 3, 1.0], [[1 / 3], [-1 / 3, 1.0], [1.0, -1.0, 1.0]], [1 / 8, 3 / 8, 3 / 8, 1 / 8], [0.0] * 4
    )


class Fehlberg2(EmbeddedPair):
    """Fehlberg's pair of orders 1 and 2: the release's adaptive solver."""

    tableau: ClassVar[Any] = _tableau(
        [1 / 2, 1.0], [[1 / 2], [1 / 256, 255 / 256]], [1 / 512, 255 / 256, 1 / 512], [-1 / 512, 0.0, 1 / 512]
    )
    accuracy: ClassVar[int] = 2


class AdaptiveHeun(EmbeddedPair):
    """Heun's second-order method, with Euler's for the error."""

    tableau: ClassVar[Any] = _tableau([1.0], [[1.0]], [1 / 2, 1 / 2], [1 / 2, -1 / 2])
    accuracy: ClassVar[int] = 2


class BogackiShampine(EmbeddedPair):
    """Bogacki and Shampine's pair of orders 2 and 3."""

    tableau: ClassVar[Any] = diffrax.Bosh3.tableau
    accuracy: ClassVar[int] = 3


class Grid(NamedTuple):
    """What determines a uniform grid of a solver."""

    budget: int  # evaluations of the path, including the final one
    end: float = 1.0  # t of the final evaluation


@dataclass(frozen=True)
class Solver:
    """A Runge-Kutta method on a uniform grid, or with adaptive steps."""

    name: str
    method: type[diffrax.AbstractSolver[Any]]
    stages: int  # evaluations per grid interval, or per adaptive step (accepted or rejected)
    lookahead: float = 0.0  # grid intervals beyond t at which an annealed temperature is read, as in the release

    @property
    def is_adaptive(self) -> bool:
        """Whether it chooses its steps from estimated errors."""
        return issubclass(self.method, EmbeddedPair)

    @property
    def overhead(self) -> int:
        """Evaluations in addition to those of steps: the final one, and an adaptive solver's first slope."""
        return 2 if self.is_adaptive else 1

    def steps(self, budget: int) -> int:
        """The number of grid intervals that spends a budget exactly, or the largest number of adaptive steps within it.

        Raises `InputError` for a budget that cannot be spent, with the nearest ones that can.
        """
        below = self.spendable(budget)
        if budget == below:
            return max(0, budget - self.overhead) // self.stages
        if self.is_adaptive:
            problem = f"too small for {self.name}, which takes 2 and {self.stages} a step"
            remedy = f"1 (the LM alone), or at least {2 + self.stages}"
        else:
            problem = f"unreachable for {self.name}, which takes 1 + {self.stages} n"
            remedy = f"{below} or {below + self.stages}"
        raise InputError(f"a budget of {budget} evaluations is {problem}: try {remedy}")

    def evaluations(self, steps: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """The number of evaluations for `steps` grid intervals or adaptive steps."""
        return jnp.where(steps > 0, self.overhead + self.stages * steps, 1)

    def spendable(self, budget: int) -> int:
        """The largest budget of at most `budget` that can be spent exactly; at least 1."""
        steps = max(0, budget - self.overhead) // self.stages
        if steps == 0:
            return 1
        return budget if self.is_adaptive else 1 + self.stages * steps

    @property
    def nodes(self) -> Float[np.ndarray, " stages"]:
        """The places at which a step evaluates, in grid intervals from its beginning."""
        return np.array([0.0, *getattr(getattr(self.method, "tableau", None), "c", ())])

    def times(self, steps: int, *, end: float = 1.0) -> Float[np.ndarray, " n"]:
        """t of all evaluations on a uniform grid of `steps` intervals up to `end`, where the final one is.

        For 0 intervals, the final evaluation is at t = 0.
        """
        inner = end * (np.arange(steps)[:, None] + self.nodes) / max(steps, 1)
        return np.append(inner.ravel(), end * min(steps, 1)).astype(np.float32)


SOLVERS = {
    solver.name: solver
    for solver in (
        Solver("euler", diffrax.Euler, stages=1, lookahead=1.0),
        Solver("midpoint", diffrax.Midpoint, stages=2, lookahead=0.5),
        Solver("heun", diffrax.Heun, stages=2, lookahead=1.0),
        Solver("heun3", Heun3, stages=3, lookahead=1.0),
        Solver("rk4", ThreeEighths, stages=4, lookahead=1.0),
        Solver("restart", Restart, stages=1, lookahead=1.0),
        Solver("fehlberg2", Fehlberg2, stages=2),
        Solver("adaptive_heun", AdaptiveHeun, stages=1),
        Solver("bosh3", BogackiShampine, stages=3),
    )
}
FIXED = {name: solver for name, solver in SOLVERS.items() if not solver.is_adaptive}
ADAPTIVE = {name: solver for name, solver in SOLVERS.items() if solver.is_adaptive}


def find_solver(name: str) -> Solver:
    """The solver of this name; raises `InputError` for an unknown name."""
    require(name in SOLVERS, f"unknown solver {name!r}: choose from {', '.join(SOLVERS)}")
    return SOLVERS[name]


def split_budget(solver: str, total: int, *, beams: int) -> int:
    """The largest budget per beam of a search in which a token may cost `total` evaluations for all beams.

    Raises `InputError` for an unknown solver, and for a total below one evaluation per beam, which is the LM alone.
    """
    found = find_solver(solver)
    require(beams >= 1, f"a budget is split between at least 1 beam, got {beams}")
    problem = f"a total of {total} evaluations per token is less than one for each of {beams} beams"
    require(total >= beams, f"{problem}: try a total of at least {beams}{f', or {total} beams' if total > 0 else ''}")
    return found.spendable(total // beams)
