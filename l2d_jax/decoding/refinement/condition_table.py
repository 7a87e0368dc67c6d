"""What the path computes from time and class alone, once for all evaluations of a uniform grid.

An adaptive solver's times are not known beforehand, and it has no table.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.llm import LLM

CAPACITY = 128  # evaluations in a table: 50 MB at the SmolLM2-135M shape, 200 MB at Llama 8B's
# Times are fractions with a denominator below `CAPACITY`: two that differ do so by more than twice this. The solver
# adds up its steps in float32, which moves a time by up to 1e-5.
SAME = 0.5 / CAPACITY**2


@nnx.dataclass
class ConditionTable(nnx.Module):
    """The path's conditions for every evaluation of one or several grids and every class."""

    times: Float[Array, " n"] = nnx.data()  # infinite beyond the last
    conditions: Conditions = nnx.data()  # of shape [n, labels]

    def at(self, t: Float[Array, "#B #M"], labels: Int[Array, "B M"] | None) -> Conditions:
        """The conditions at times of a grid, of all rows or of each; labels None: the null class, which is the last.

        At any other time, as where the table is that of another grid, the merge weight is not a number.
        """
        # A row that has ended before the others goes on beyond t = 1.
        distance = jnp.abs(self.times - jnp.minimum(t, 1.0)[..., None])
        index = jnp.argmin(distance, axis=-1)
        is_known = jnp.take_along_axis(distance, index[..., None], axis=-1) < SAME
        assert self.conditions.modulation is not None
        picked = jnp.array([[-1]]) if labels is None else labels
        merge = jnp.where(is_known, self.conditions.merge[index, picked], jnp.nan)
        if index.size == picked.size == 1:  # looked up once, and not in each layer
            return Conditions(self.conditions.modulation[:, index, picked], merge)
        return Conditions(self.conditions.modulation, merge, (index, picked))


@jax.jit
def build_table(llm: LLM, path: DiffusionPath, times: Float[Array, " n"]) -> ConditionTable:
    """The table of these times; infinite: none."""
    labels = jnp.arange(path.config.classes + 1)[None]
    t, labels = jnp.broadcast_arrays(jnp.where(times <= 1, times, 0.0)[:, None], labels)
    return ConditionTable(times=times, conditions=path.conditions(llm, t, labels))
