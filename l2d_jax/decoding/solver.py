"""The solvers of the ODE by name, and what a budget of evaluations buys of each.

The budget counts evaluations of the path for one token, the final one that gives the answer's logits included. A budget
of 1 is the LM alone: no step, whatever the solver.
"""

from dataclasses import dataclass
from typing import Any

import diffrax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.decoding import runge_kutta
from l2d_jax.errors import InputError

AMPLE = 512  # evaluations per token: the budget of an adaptive solver where the user names none


@dataclass(frozen=True)
class Solver:
    """A Runge-Kutta method on a uniform grid, or with adaptive steps."""

    name: str
    method: type[diffrax.AbstractSolver[Any]]
    stages: int  # evaluations per grid interval, or per adaptive step, accepted or rejected
    lookahead: float = 0.0  # grid intervals beyond t at which an annealed temperature is read, as in the release

    @property
    def is_adaptive(self) -> bool:
        """Whether it chooses its steps by their estimated errors."""
        return issubclass(self.method, runge_kutta.EmbeddedPair)

    @property
    def overhead(self) -> int:
        """Evaluations besides those of the steps: the final one, and an adaptive solver's first slope."""
        return 2 if self.is_adaptive else 1

    def steps(self, budget: int) -> int:
        """Grid intervals that spend a budget exactly, or the most steps of an adaptive solver within it.

        Raises `InputError` for a budget that cannot be spent, naming the nearest ones that can.
        """
        below = self.spendable(budget)
        if budget == below:
            return max(0, budget - self.overhead) // self.stages
        if self.is_adaptive:
            raise InputError(
                f"a budget of {budget} evaluations is too small for {self.name}, which takes 2 and {self.stages} a "
                f"step: try 1 (the LM alone), or at least {2 + self.stages}"
            )
        raise InputError(
            f"a budget of {budget} evaluations is unreachable for {self.name}, which takes 1 + {self.stages} n: "
            f"try {below} or {below + self.stages}"
        )

    def evaluations(self, steps: Int[Array, "*b"]) -> Int[Array, "*b"]:
        """What so many grid intervals, or adaptive steps, cost."""
        return jnp.where(steps > 0, self.overhead + self.stages * steps, 1)

    def spendable(self, budget: int) -> int:
        """The largest budget that can be spent exactly within this one; at least 1."""
        steps = max(0, budget - self.overhead) // self.stages
        if steps == 0:
            return 1
        return budget if self.is_adaptive else 1 + self.stages * steps

    def times(self, steps: int) -> Float[np.ndarray, " n"]:
        """t of every evaluation on a uniform grid of `steps` intervals, the final one included; without any, 0."""
        nodes = np.array([0.0, *getattr(getattr(self.method, "tableau", None), "c", ())])
        inner = (np.arange(steps)[:, None] + nodes) / max(steps, 1)
        return np.append(inner.ravel(), min(steps, 1)).astype(np.float32)


SOLVERS = {
    solver.name: solver
    for solver in (
        Solver("euler", diffrax.Euler, stages=1, lookahead=1.0),
        Solver("midpoint", diffrax.Midpoint, stages=2, lookahead=0.5),
        Solver("heun", diffrax.Heun, stages=2, lookahead=1.0),
        Solver("heun3", runge_kutta.Heun3, stages=3, lookahead=1.0),
        Solver("rk4", runge_kutta.ThreeEighths, stages=4, lookahead=1.0),
        Solver("fehlberg2", runge_kutta.Fehlberg2, stages=2),
        Solver("adaptive_heun", runge_kutta.AdaptiveHeun, stages=1),
        Solver("bosh3", runge_kutta.BogackiShampine, stages=3),
    )
}
FIXED = {name: solver for name, solver in SOLVERS.items() if not solver.is_adaptive}
ADAPTIVE = {name: solver for name, solver in SOLVERS.items() if solver.is_adaptive}


def find_solver(name: str) -> Solver:
    """Raises `InputError` for an unknown name."""
    if name not in SOLVERS:
        raise InputError(f"unknown solver {name!r}: choose from {', '.join(SOLVERS)}")
    return SOLVERS[name]


def split_budget(solver: str, total: int, *, beams: int) -> int:
    """The largest budget that each beam of a search can spend where a token may cost `total` evaluations for all.

    Raises `InputError` for an unknown solver, and for a total below the LM alone, which is one evaluation per beam.
    """
    found = find_solver(solver)
    if beams < 1:
        raise InputError(f"a budget is split between at least 1 beam, got {beams}")
    if total < beams:
        raise InputError(
            f"a total of {total} evaluations per token is less than one for each of {beams} beams: "
            f"try a total of at least {beams}{f', or {total} beams' if total > 0 else ''}"
        )
    return found.spendable(total // beams)
