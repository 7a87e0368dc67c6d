"""Weights where a layer uses them: gathered from their shards, and restored from int8 where they are kept so.

An int8 weight is a number of eight bits per value and a float32 scale per output channel: half the memory of bfloat16,
and half the bytes to gather. It is restored layer by layer; products are those of the activations' type.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8

from l2d_jax.distributed.sharding import Declared, Weight

CONTRACTED = {  # logical axes that the product with an activation sums over
    "q": ("embed",),
    "k": ("embed",),
    "v": ("embed",),
    "o": ("heads", "head_dim"),
    "gate": ("embed",),
    "up": ("embed",),
    "down": ("mlp",),
}


@nnx.dataclass
class Quantized(nnx.Module):
    """A weight as int8 values times the scale of their output channel."""

    values: Int8[Array, "..."] | Declared = nnx.data()
    scale: Float[Array, "..."] | Declared = nnx.data()  # of size 1 along the contracted axes

    def restore(self, dtype: Any) -> Array:
        """The weight itself, in `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def declare(layers: Any) -> Any:
    """The declaration of decoder layers whose matrices are int8, from the one of the same layers."""

    def one(name: str) -> Quantized:
        weight = getattr(layers, name)
        sizes = zip(weight.shape, weight.axes, strict=True)
        scale = tuple(1 if axis in CONTRACTED[name] else size for size, axis in sizes)
        return Quantized(
            values=Weight(weight.shape, weight.axes, weight.init, jnp.int8),
            scale=Weight(scale, weight.axes, weight.init),
        )

    return dataclasses.replace(layers, **{name: one(name) for name in CONTRACTED})


def quantize(layers: Any, declared: Any) -> Any:
    """Decoder layers with their matrices as int8, rounded to nearest; the largest value of a channel becomes 127."""

    def one(name: str) -> Quantized:
        weight, axes = getattr(layers, name).astype(jnp.float32), getattr(declared, name).axes
        contracted = tuple(i for i, axis in enumerate(axes) if axis in CONTRACTED[name])
        scale = jnp.max(jnp.abs(weight), axis=contracted, keepdims=True) / 127
        values = jnp.round(weight / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return Quantized(values=values, scale=scale)

    return dataclasses.replace(layers, **{name: one(name) for name in CONTRACTED})
