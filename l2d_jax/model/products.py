"""Matrix products with what each platform needs to compute them fast: `multiply`, `low_rank_product`, `logits_of`.

On CPUs the factors of a model in bfloat16 are in bfloat16, and all else is in float32: those with AVX512-BF16 or AMX
multiply so at twice the rate of float32 and more, and are slow in bfloat16 between products. XLA does it where both
factors are in bfloat16, the sums in float32, and neither is transposed; the gradients here keep to that.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from l2d_jax.model.few_rows import StackedWeight, few_rows_product


def multiply(x: Array, weight: Array | StackedWeight, dims: int) -> Array:
    """`x @ weight` over the last `dims` axes of x, in the type of x."""
    if isinstance(weight, StackedWeight):
        return few_rows_product(x, weight, dims)
    if _is_mixed(x, weight):
        return _bfloat16_product(x, weight, tuple(range(dims)))
    return jnp.tensordot(x, weight.astype(x.dtype), dims)


def logits_of(x: Float[Array, "*B D"], head: Float[Array, "V D"]) -> Float[Array, "*B V"]:
    """`x @ head.T`, in float32."""
    if _is_mixed(x, head):
        return _bfloat16_product(x, head, (1,))
    return jnp.einsum("...D,VD->...V", x, head.astype(x.dtype), preferred_element_type=jnp.float32)


@jax.custom_vjp
def low_rank_product(x: Float[Array, "*B i"], a: Float[Array, "i R"], b: Float[Array, "R ..."]) -> Array:
    """`x @ a @ b` for CPUs, with gradients that transpose no wide array.

    Left alone, the gradient of `b` is the transpose of `g^T (x a)`. For it, XLA on CPUs transposes g and all
    element-wise work before it, which took half of the backward pass.
    """
    return multiply(multiply(x, a, 1), b, 1)


def _low_rank_forward(x: Array, a: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
    low = multiply(x, a, 1)
    return multiply(low, b, 1), (x, a, b, low)


def _low_rank_backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    x, a, b, low = saved
    rows = range(x.ndim - 1)
    product = _contract if _is_mixed(x, a) else _tensordot
    back = product(gradient, b, range(len(rows), gradient.ndim), range(1, b.ndim))
    of_a, of_b = _tensordot(back, x, rows, rows).T, _tensordot(low, gradient, rows, rows)
    return product(back, a, [len(rows)], [1]), of_a.astype(a.dtype), of_b.astype(b.dtype)


low_rank_product.defvjp(_low_rank_forward, _low_rank_backward)


def _is_mixed(x: Array, weight: Array) -> bool:
    return bool(weight.dtype == jnp.bfloat16 and x.dtype == jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _bfloat16_product(x: Array, weight: Array, inputs: tuple[int, ...]) -> Array:
    """The product, in float32, of the last axes of x and the `inputs` of a weight."""
    return _contract(x, weight, range(x.ndim - len(inputs), x.ndim), inputs)


def _forward(x: Array, weight: Array, inputs: tuple[int, ...]) -> tuple[Array, tuple[Array, Array]]:
    return _bfloat16_product(x, weight, inputs), (x, weight)


def _backward(inputs: tuple[int, ...], saved: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, weight = saved
    rows, outputs = range(x.ndim - len(inputs)), [axis for axis in range(weight.ndim) if axis not in inputs]
    of_weight = jnp.moveaxis(_tensordot(x, gradient, rows, rows), range(len(inputs)), inputs)
    return _contract(gradient, weight, range(len(rows), gradient.ndim), outputs), of_weight.astype(weight.dtype)


_bfloat16_product.defvjp(_forward, _backward)


def _contract(x: Array, y: Array, x_axes: Sequence[int], y_axes: Sequence[int]) -> Array:
    return _tensordot(x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), x_axes, y_axes)


def _tensordot(x: Array, y: Array, x_axes: Sequence[int], y_axes: Sequence[int]) -> Any:
    """A product with sums in float32; over the first axes of both, XLA on CPUs has it of float32 alone."""
    return jnp.tensordot(x, y, (tuple(x_axes), tuple(y_axes)), preferred_element_type=jnp.float32)
