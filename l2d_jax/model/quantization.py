"""Decoder weights stored as integers: int8 with a scale per output channel, or on CPUs the bits of bfloat16.

int8 takes half the memory of bfloat16, and half the bytes to gather. Weights are restored layer by layer, and products
are computed in the dtype of the activations.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int8

from l2d_jax.distributed.sharding import Declared, Weight, platform
from l2d_jax.model.axes import LAYER_AXES, MATRICES


@nnx.dataclass
class QuantizedWeight(nnx.Module):
    """A weight stored as int8 values, times a scale per output channel."""

    values: Int8[Array, "..."] | Declared = nnx.data()
    scale: Float[Array, "..."] | Declared = nnx.data()  # of size 1 along the contracted axes

    def restore(self, dtype: Any) -> Array:
        """The weight in `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale).astype(dtype)


def declare_quantized(layers: Any) -> Any:
    """Turn the declaration of decoder layers into that of the same layers with int8 matrices."""

    def declare(name: str) -> QuantizedWeight:
        weight, contracted = getattr(layers, name), MATRICES[name][0]
        scale = tuple(1 if axis in contracted else size for size, axis in zip(weight.shape, weight.axes, strict=True))
        values = Weight(weight.shape, weight.axes, weight.init, jnp.int8)
        return QuantizedWeight(values=values, scale=Weight(scale, weight.axes, weight.init))

    return dataclasses.replace(layers, **{name: declare(name) for name in MATRICES})


def quantize_layers(layers: Any) -> Any:
    """Quantize the matrices of decoder layers to int8, rounded to nearest; a channel's largest value becomes 127."""

    def quantize(name: str) -> QuantizedWeight:
        weight = getattr(layers, name).astype(jnp.float32)
        contracted = tuple(i for i, axis in enumerate(LAYER_AXES[name], 1) if axis in MATRICES[name][0])
        scale = jnp.max(jnp.abs(weight), axis=contracted, keepdims=True) / 127
        values = jnp.round(weight / jnp.where(scale > 0, scale, 1)).astype(jnp.int8)
        return QuantizedWeight(values=values, scale=scale)

    return dataclasses.replace(layers, **{name: quantize(name) for name in MATRICES})


def as_bits(layers: Any) -> Any:
    """On CPUs, store the bfloat16 matrices of frozen layers as integers, which `from_bits` reads.

    Otherwise XLA converts a whole stack to float32, and each layer's slice back to bfloat16.
    """
    is_cpu = platform() == "cpu"
    names = [name for name in MATRICES if is_cpu and getattr(getattr(layers, name), "dtype", None) == jnp.bfloat16]
    bits = {name: jax.lax.bitcast_convert_type(getattr(layers, name), jnp.uint16) for name in names}
    return dataclasses.replace(layers, **bits)


def from_bits(weight: Array) -> Array:
    """The weight that `as_bits` stored."""
    return jax.lax.bitcast_convert_type(weight, jnp.bfloat16) if weight.dtype == jnp.uint16 else weight
