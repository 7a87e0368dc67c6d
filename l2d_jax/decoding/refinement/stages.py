"""The evaluations of a uniform grid as rows: x of each is a fixed combination of x_0 and earlier estimates.

The ODE is linear in x, so a Runge-Kutta method on a grid is a table of coefficients. It gives what `integrate` computes
one evaluation after the other, up to rounding. Evaluations whose estimates are never used have no row: their rate is 0,
as for the last stage of Heun's method at t = 1.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.config.ranges import MOST_PARALLEL
from l2d_jax.decoding.refinement.integrate import INVERSES
from l2d_jax.decoding.refinement.solver import Grid, Restart, Solver
from l2d_jax.model.diffusion import END

SIZES = (1, 3, 7, 15, 31, 63, MOST_PARALLEL)  # numbers of rows with compiled programs; larger budgets run one by one
CACHED = 512  # grids whose rows are kept; those of a budget of 127 take 130 KB


class _Rows(NamedTuple):
    """The rows of one grid, in float64."""

    times: np.ndarray  # [n]
    noise: np.ndarray  # [n]
    estimates: np.ndarray  # [n, n]


@nnx.dataclass
class Stages(nnx.Module):
    """The rows of each sequence's grid, or of a shared grid; row `count` - 1 is the final evaluation."""

    times: Float[Array, "#B n"] = nnx.data()  # t of each evaluation, with the same bits as in `integrate`
    noise: Float[Array, "#B n"] = nnx.data()  # coefficient of x_0
    estimates: Float[Array, "#B n n"] = nnx.data()  # coefficients of the earlier estimates, for each row
    count: Int[Array, "#B"] = nnx.data()  # number of rows in use; 0: nothing is refined

    @classmethod
    def of(cls, solver: Solver, grids: Sequence[Grid]) -> "Stages | None":
        """The rows for each grid; None for adaptive solvers and for budgets beyond the largest of `SIZES`."""
        if solver.is_adaptive or max(grid.budget for grid in grids) > SIZES[-1]:
            return None
        tables = [_rows(solver, solver.steps(grid.budget), grid.end) for grid in grids]
        size = room_for(max(len(table.times) for table in tables))
        counts = [len(table.times) if grid.budget > 1 else 0 for table, grid in zip(tables, grids, strict=True)]

        def stack(arrays: Sequence[np.ndarray]) -> Array:
            padded = [np.pad(array, [(0, size - n) for n in array.shape]) for array in arrays]
            return jnp.asarray(np.stack(padded).astype(np.float32))

        times, noise, estimates = map(stack, zip(*tables, strict=True))
        return cls(times=times, noise=noise, estimates=estimates, count=jnp.array(counts, jnp.int32))

    @property
    def size(self) -> int:
        """The number of rows in the arrays."""
        return self.times.shape[1]

    def x(
        self, rows: Int[Array, "B M W"], noise: Float[Array, "B M C"], estimates: Float[Array, "B M n C"]
    ) -> Float[Array, "B M W C"]:
        """x of these rows, given the estimates of all rows.

        The sum is not a matrix product, so the bits of a row depend neither on other rows nor on its place.
        """
        own = self.spread(self.noise, rows)[..., None] * noise[:, :, None]
        parts = self.spread(self.estimates, rows)[..., None] * estimates[:, :, None]
        return own + parts.sum(axis=-2)

    def spread(self, values: Float[Array, "#B n *rest"], rows: Int[Array, "B M W"]) -> Float[Array, "B M W *rest"]:
        """Pick the values of these rows."""
        sequences = jnp.arange(len(rows)) if len(values) > 1 else jnp.zeros(len(rows), jnp.int32)
        return values[sequences[:, None, None], rows]


def room_for(rows: int) -> int:
    """The smallest of `SIZES` that is at least `rows`."""
    return next(size for size in SIZES if size >= rows)


@lru_cache(maxsize=CACHED)
def _rows(solver: Solver, steps: int, end: float) -> _Rows:
    """Compute the needed rows, by walking through the grid up to `end` with the estimates as unknowns."""
    count = solver.stages * steps + 1
    times, noise, estimates = _times(solver, steps, end), np.zeros(count), np.zeros((count, count))
    units, number = np.eye(count), 0
    scale, data, density = 1.0, np.zeros(count), steps / end

    def slope(scale: float, data: np.ndarray) -> tuple[float, np.ndarray]:
        """dx/dt at the next evaluation, for this x."""
        nonlocal number
        rest = 1.0 - float(times[number])
        rate = 1 / rest if rest > END else 0.0
        noise[number], estimates[number] = scale, data
        number += 1
        return -scale * rate, (units[number - 1] - data) * rate

    tableau: Any = getattr(solver.method, "tableau", None)
    lower, weights = ((), [1.0]) if tableau is None else (tableau.a_lower, tableau.b_sol)
    for step in range(steps):
        if solver.method is Restart:
            slope(scale, data)
            share = end * (step + 1) / steps
            scale, data = 1 - share, share * units[step]
            continue
        slopes = [slope(scale, data)]
        for row in lower:
            slopes.append(slope(*_along(scale, data, row, slopes, density)))
        scale, data = _along(scale, data, weights, slopes, density)
    noise[number], estimates[number] = scale, data
    kept = [i for i in range(count) if i == count - 1 or estimates[:, i].any()]
    return _Rows(times[kept], noise[kept], estimates[np.ix_(kept, kept)])


def _times(solver: Solver, steps: int, end: float) -> np.ndarray:
    """`Solver.times` with the bits that `integrate` computes, because they determine sampled tokens."""
    length = np.float32(end) * INVERSES[steps]
    inner = (np.arange(steps, dtype=np.float32)[:, None] + solver.nodes.astype(np.float32)) * length
    return np.append(inner.ravel(), np.float32(end * min(steps, 1)))


def _along(
    scale: float, data: np.ndarray, weights: Iterable[float], slopes: list[tuple[float, np.ndarray]], density: float
) -> tuple[float, np.ndarray]:
    """A point within a step, from its start and its slopes; `density` is the number of steps per unit of t."""
    for weight, (of_scale, of_data) in zip(weights, slopes, strict=True):
        scale, data = scale + weight * of_scale / density, data + weight * of_data / density
    return scale, data
