"""The solvers of the ODE that moves a diffusion token from noise to data, in PyTorch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

END = 1e-6  # closer to t = 1 than this, the velocity counts as zero


class Tableau(NamedTuple):
    """An explicit Runge-Kutta method on a uniform grid."""

    nodes: tuple[float, ...]  # times of the stages, in intervals
    rows: tuple[tuple[float, ...], ...]  # for each stage, the weights of earlier slopes
    weights: tuple[float, ...]
    lookahead: float  # intervals beyond t at which an annealed temperature is read
    restarts: bool = False  # whether each estimate replaces earlier ones: x is on the line from x_0 to the newest

    def steps(self, budget: int) -> int:
        """The number of intervals for a budget, of which one evaluation is for the answer; raises `ValueError`."""
        stages = len(self.weights)
        steps, rest = divmod(budget - 1, stages)
        if budget < 1 or rest:
            near = max(1, 1 + stages * steps)
            raise ValueError(
                f"this solver spends 1 + {stages} n evaluations, not {budget}: try {near} or {near + stages}"
            )
        return steps


SOLVERS = {
    "euler": Tableau((0,), ((),), (1,), 1),
    "midpoint": Tableau((0, 1 / 2), ((), (1 / 2,)), (0, 1), 1 / 2),
    "heun": Tableau((0, 1), ((), (1,)), (1 / 2, 1 / 2), 1),
    "heun3": Tableau((0, 1 / 3, 2 / 3), ((), (1 / 3,), (0, 2 / 3)), (1 / 4, 0, 3 / 4), 1),
    "rk4": Tableau(  # the 3/8 rule
        (0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8), 1
    ),
    "restart": Tableau((0,), ((),), (1,), 1, restarts=True),
}


@dataclass(frozen=True)
class Settings:
    """How the ODE of each token is solved; raises `ValueError` for unknown options and for options without effect."""

    budget: int
    solver: str
    velocity: str
    velocity_temperature: float
    anneal: bool
    guidance: float
    has_class: bool  # whether a class is given

    def __post_init__(self) -> None:
        if self.velocity not in ("sample", "expectation"):
            raise ValueError(f'velocity must be "sample" or "expectation", got {str(self.velocity)[:80]!r}')
        if self.solver not in SOLVERS:
            raise ValueError(f"unknown solver {str(self.solver)[:80]!r}: choose from {', '.join(SOLVERS)}")
        if self.guidance != 1 and not self.has_class:
            raise ValueError("guidance is towards a class: give class_labels, or leave guidance out")
        if not self.velocity_temperature >= 0:
            raise ValueError(f"velocity_temperature must be 0 or more, got {self.velocity_temperature}")
        if self.velocity_temperature == 0 and (self.anneal or self.velocity == "expectation"):
            raise ValueError("anneal and velocity='expectation' need a temperature: give velocity_temperature above 0")

    @property
    def tableau(self) -> Tableau:
        """The solver's method."""
        return SOLVERS[self.solver]

    @property
    def steps(self) -> int:
        """The intervals of the grid; raises `ValueError` for a budget that the solver cannot spend."""
        return self.tableau.steps(self.budget)

    def temperature(self, t: float) -> float:
        """The velocity's temperature at t. With annealing it is read ahead, so the last estimate is the arg max."""
        ahead = t + self.tableau.lookahead / self.steps
        return self.velocity_temperature * (min(max(1 - ahead, 0.0), 1.0) if self.anneal else 1.0)


def single(x: float) -> float:
    """The float32 nearest to a number."""
    scaled = x * (2**29 + 1)
    return scaled - (scaled - x)


@torch.compiler.disable(recursive=False)
def trajectory(target: Callable[..., Tensor], noise: Tensor, settings: Settings) -> Iterator[Tensor]:
    """Yield x at every point of a uniform grid: dx/dt = (target(t, x) - x) / (1 - t), starting at the noise x_0.

    The equation is linear in x = a x_0 + y. The coefficient a and y are integrated separately: y is of order one while
    x_0 is of order sigma, so float32 keeps more digits of y. Times equal those of l2d_jax, to the last bit of float32.
    """
    tableau, steps = settings.tableau, settings.steps
    scale, data = 1.0, torch.zeros_like(noise)
    yield noise
    for step in range(steps):
        slopes: list[tuple[float, Tensor]] = []
        for node, row in zip((*tableau.nodes, 1), (*tableau.rows, tableau.weights), strict=True):
            a = scale + sum(weight * slope for weight, (slope, _) in zip(row, slopes, strict=True))
            y = data + sum(weight * slope for weight, (_, slope) in zip(row, slopes, strict=True))
            if len(slopes) < len(tableau.weights):
                t = single(single(step + single(node)) * single(1 / steps))
                rate = 1 / steps / (1 - t) if 1 - t > END else 0.0
                estimate = target(t, a * noise + y)
                slopes.append((-a * rate, (estimate - y) * rate))
        scale, data = a, (1 - a) * estimate if tableau.restarts else y
        yield scale * noise + data
