"""Small weights of which each row of a batch has its own, so that the rows may belong to different paths.

All rows still share the language model's matrices. A product reads those once, and the small weights once per row.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from l2d_jax.model.products import multiply_rows


@nnx.dataclass
class RowLora(nnx.Module):
    """A low-rank update of a weight for each row: as `layers.Lora`, with an axis B before that of the inputs."""

    row_a: Float[Array, "..."] = nnx.data()  # [B, *in, R]; both have a leading axis L if layers are stacked
    row_b: Float[Array, "..."] = nnx.data()  # [B, R, *out]

    def __call__(self, x: Array, *, scale: float, dims: int, dtype: Any) -> Array:
        """`x @ (scale * a @ b)` over the last `dims` axes of x [B, M, *in], with factors in `dtype`."""
        a, b = self.row_a.astype(dtype), (scale * self.row_b).astype(dtype)
        return multiply_rows(multiply_rows(x, a, dims), b, 1)


@nnx.dataclass
class RowLinear(nnx.Module):
    """An affine map for each row."""

    weight: Float[Array, "B i o"] = nnx.data()
    bias: Float[Array, "B o"] = nnx.data()

    def __call__(self, x: Float[Array, "GB M i"]) -> Float[Array, "GB M o"]:
        """`x @ weight + bias` for each row, in the dtype of `x`; x may be several batches, one after the other."""
        weight, bias = self.weight.astype(x.dtype), self.bias[:, None].astype(x.dtype)
        y = jnp.einsum("gbmi,bio->gbmo", x.reshape(-1, len(weight), *x.shape[1:]), weight) + bias
        return y.reshape(*x.shape[:2], -1)


@nnx.dataclass
class RowMlp(nnx.Module):
    """Two affine maps with a SiLU between them, for each row."""

    first: RowLinear = nnx.data()
    last: RowLinear = nnx.data()

    def __call__(self, x: Float[Array, "GB M i"]) -> Float[Array, "GB M o"]:
        """`last(silu(first(x)))` for each row, in the dtype of `x`."""
        return self.last(jax.nn.silu(self.first(x)))
