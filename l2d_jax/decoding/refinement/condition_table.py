"""A table of what the path computes from time and class alone, for all evaluations of a uniform grid.

An adaptive solver has no table, because its times are not known in advance.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.llm import LLM

CAPACITY = 128  # largest number of evaluations in a table: 50 MB for SmolLM2-135M, 200 MB for Llama 8B
SMALLEST = 16  # evaluations in the smallest table that `first` makes
# Two times closer than this share of the last one are the same. Times of grids with the same end are fractions of it
# with denominators below `CAPACITY`, so different times differ by more than twice this. The solver adds up steps in
# float32, which moves a time by up to 1e-5 of the end.
SAME = 0.5 / CAPACITY**2


@nnx.dataclass
class ConditionTable(nnx.Module):
    """The path's conditions for every evaluation of one or several grids and every class, shared or for each row."""

    times: Float[Array, "*B n"] = nnx.data()  # infinite beyond the last
    conditions: Conditions = nnx.data()  # of shape [n, labels], or [B, n, labels]

    def first(self, count: int) -> "ConditionTable":
        """A table with room for the first `count` times; each layer reads all rows of the table to look some up."""
        if self.times.ndim > 1:
            return self
        size = max(SMALLEST, 1 << (count - 1).bit_length())
        modulation, merge, which = self.conditions
        assert modulation is not None
        return ConditionTable(self.times[:size], Conditions(modulation[:, :size], merge[:size], which))

    def at(self, t: Float[Array, "#B #M"], labels: Int[Array, "B M"] | None) -> Conditions:
        """The conditions at times of a grid, shared or per row; labels None: the null class, which is the last.

        At any other time, for example with the table of another grid, the merge weight is NaN.
        """
        times = self.times[:, None] if self.times.ndim > 1 else self.times
        distance = jnp.abs(times - t[..., None])
        index = jnp.argmin(distance, axis=-1)
        last = jnp.max(times, axis=-1, keepdims=True, initial=0.0, where=jnp.isfinite(times))
        is_known = jnp.take_along_axis(distance, index[..., None], axis=-1) <= SAME * last
        assert self.conditions.modulation is not None
        picked = jnp.array([[-1]]) if labels is None else labels
        if self.times.ndim > 1:
            which = (jnp.arange(len(times))[:, None], *jnp.broadcast_arrays(index, picked))
            merge = jnp.where(is_known, self.conditions.merge[which], jnp.nan)
            return Conditions(self.conditions.modulation, merge, which)
        merge = jnp.where(is_known, self.conditions.merge[index, picked], jnp.nan)
        if index.size == picked.size == 1:  # look it up once, not in each layer
            return Conditions(self.conditions.modulation[:, index, picked], merge)
        return Conditions(self.conditions.modulation, merge, (index, picked))


@jax.jit
def build_table(llm: LLM, path: DiffusionPath, times: Float[Array, " n"]) -> ConditionTable:
    """Build the table for these times; infinite entries are unused."""
    labels = jnp.arange(path.config.classes + 1)[None]
    t, labels = jnp.broadcast_arrays(jnp.where(times <= 1, times, 0.0)[:, None], labels)
    return ConditionTable(times=times, conditions=path.conditions(llm, t, labels))
