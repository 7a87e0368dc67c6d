"""What the path computes from time and class alone, once for all evaluations of a uniform grid.

An adaptive solver's times are not known beforehand, and it has no table.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.decoding.solver import Solver
from l2d_jax.model.diffusion_path import Conditions, DiffusionPath

CAPACITY = 128  # evaluations in a table: 50 MB at the SmolLM2-135M shape, 200 MB at Llama 8B's
# Times are fractions with a denominator below `CAPACITY`: two that differ do so by more than twice this. The solver
# adds up its steps in float32, which moves a time by up to 1e-5.
SAME = 0.5 / CAPACITY**2


@nnx.dataclass
class ConditionTable(nnx.Module):
    """The path's conditions for every evaluation of a grid and every class."""

    times: Float[Array, " n"] = nnx.data()  # infinite beyond the last
    conditions: Conditions = nnx.data()  # of shape [n, labels]

    def at(self, t: Float[Array, "1 1"], labels: Int[Array, "B M"] | None) -> Conditions:
        """The conditions at a time of the grid; labels None: the null class, which is the last.

        At any other time, as where the table is that of another grid, the merge weight is not a number.
        """
        distance = jnp.abs(self.times - t[0, 0])
        index = jnp.argmin(distance)
        assert self.conditions.modulation is not None
        picked = jnp.array([[-1]]) if labels is None else labels
        merge = jnp.where(distance[index] < SAME, self.conditions.merge[index][picked], jnp.nan)
        return Conditions(self.conditions.modulation[:, index][:, picked], merge)


@partial(jax.jit, static_argnames=("solver", "dtype"))
def build_table(path: DiffusionPath, steps: Int[Array, ""], *, solver: Solver, dtype: Any) -> ConditionTable:
    """The table of a grid of `steps` intervals, with the modulation in the type of the blocks' activations."""
    times = solver.times(steps, capacity=CAPACITY)
    labels = jnp.arange(path.config.classes + 1)[None]
    t, labels = jnp.broadcast_arrays(jnp.where(times <= 1, times, 0.0)[:, None], labels)
    return ConditionTable(times=times, conditions=path.conditions(t, labels, dtype=dtype))
