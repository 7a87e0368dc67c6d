"""Matrix products, in the form that is fast on each platform: `multiply` and `logits_of`.

On CPUs, a model in bfloat16 has only the factors of products in bfloat16, and everything else in float32. CPUs with
AVX512-BF16 or AMX multiply bfloat16 at least twice as fast as float32, but are slow in bfloat16 elsewhere. XLA uses
these instructions if both factors are in bfloat16, sums are in float32, and neither factor is transposed. The gradients
here keep to that.
"""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from l2d_jax.distributed.sharding import platform
from l2d_jax.model.few_rows import StackedWeight, few_rows_product
from l2d_jax.model.quantization import from_bits


def multiply(x: Array, weight: Array | StackedWeight, dims: int) -> Array:
    """`x @ weight` over the last `dims` axes of x, in the dtype of x."""
    if isinstance(weight, StackedWeight):
        return few_rows_product(x, weight, dims)
    if _is_on_cpu(x):
        return _product(x, weight, tuple(range(dims)))
    return jnp.tensordot(x, weight.astype(x.dtype), dims)


def multiply_rows(x: Array, weights: Array, dims: int) -> Array:
    """`x @ weights` over the last `dims` axes of x [B, M, *in], in its dtype; each row b has its own weights."""
    axes = (tuple(range(x.ndim - dims, x.ndim)), tuple(range(1, 1 + dims))), ((0,), (0,))
    if _is_on_cpu(x):
        return jax.lax.dot_general(x.astype(weights.dtype), weights, axes, preferred_element_type=jnp.float32)
    return jax.lax.dot_general(x, weights.astype(x.dtype), axes)


def logits_of(x: Float[Array, "*B D"], head: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """`x @ head.T`, in float32."""
    if _is_on_cpu(x):
        return _product(x, head, (1,))
    return jnp.einsum("...D,VD->...V", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


def _is_on_cpu(x: Array) -> bool:
    return platform() == "cpu" and x.dtype == jnp.float32


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _product(x: Array, weight: Array, inputs: tuple[int, ...]) -> Array:
    """Product in float32 over the last axes of x and the axes `inputs` of a weight, with factors in its dtype."""
    weight = from_bits(weight)
    return _tensordot(x, weight, range(x.ndim - len(inputs), x.ndim), inputs, dtype=weight.dtype)


def _backward(inputs: tuple[int, ...], saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array | None]:
    """The gradients. The gradient of a weight transposes the narrower of its two factors.

    By default, the gradient of the second factor of a low-rank update would be the transpose of `g^T (x a)`. For that,
    XLA on CPUs transposes g and all element-wise work before it, which took half of the backward pass.
    """
    x, weight = saved
    rows, outputs = range(x.ndim - len(inputs)), [axis for axis in range(weight.ndim) if axis not in inputs]
    if math.prod(gradient.shape) < math.prod(x.shape):
        of_weight = jnp.moveaxis(_tensordot(gradient, x, rows, rows), range(len(outputs)), outputs)
    else:
        of_weight = jnp.moveaxis(_tensordot(x, gradient, rows, rows), range(len(inputs)), inputs)
    is_frozen = weight.dtype == jnp.uint16
    if is_frozen:  # otherwise the view would be fused with a transpose
        weight = jax.lax.optimization_barrier(from_bits(weight))
    of_x = _tensordot(gradient, weight, range(len(rows), gradient.ndim), outputs, dtype=weight.dtype)
    return of_x, None if is_frozen else of_weight.astype(weight.dtype)


_product.defvjp(lambda x, weight, inputs: (_product(x, weight, inputs), (x, weight)), _backward)


def _tensordot(x: Array, y: Array, x_axes: Sequence[int], y_axes: Sequence[int], *, dtype: Any = jnp.float32) -> Array:
    x, y = x.astype(dtype), y.astype(dtype)
    return jnp.tensordot(x, y, (tuple(x_axes), tuple(y_axes)), preferred_element_type=jnp.float32)
