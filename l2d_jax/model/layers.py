"""The building blocks of the main path and the diffusion path, as functions of arrays.

Axis letters, here and in every shape of the project:
    B batch             T tokens            S slots of the cache     M positions of diffusion tokens
    D model width       N query heads       K key and value heads    H head width
    F MLP width         V vocabulary        L layers                 R LoRA rank
    C diffusion width   E condition width   P tokens of a prefix that all rows share
"""

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jaxtyping import Array, Float, Int

from l2d_jax.distributed.sharding import Declared, Initializer, platform
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import declare_stacked

PRODUCT = "product"  # checkpoint name of a block's matrix products, which rematerialisation may save


def rms_norm(x: Float[Array, "*B D"], weight: Float[Array, "*b D"], epsilon: float) -> Float[Array, "*B D"]:
    """Root-mean-square norm, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def rope_frequencies(architecture: Architecture) -> Float[Array, " half"]:
    """The angle per position of each pair of channels, in radians, with Llama 3's scaling where the model has it."""
    half = architecture.head_dim // 2
    frequency = architecture.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    scaling = architecture.rope_scaling
    if scaling is None:
        return frequency
    # Llama 3 slows long waves by `factor`, keeps short ones, and blends the others linearly in turns per context.
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = jnp.clip(kept, 0.0, 1.0)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rope(
    x: Float[Array, "B T N H"], positions: Int[Array, "B T"], frequencies: Float[Array, " half"]
) -> Float[Array, "B T N H"]:
    """Rotary embedding in the half-split layout of Hugging Face; angles in float32."""
    angle = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


@nnx.dataclass
class Lora(nnx.Module):
    """A low-rank update of a weight: `scale * a @ b`."""

    a: Float[Array, "*in R"] | Declared = nnx.data()
    b: Float[Array, "..."] | Declared = nnx.data()  # [R, *out]; both with a leading L where layers are stacked

    @classmethod
    def declare(cls, name: str, sizes: Mapping[str, int], init: Initializer) -> "Lora":
        """The update of one of `axes.MATRICES` in all blocks: a starts as `init` says, b at zero."""
        return cls(
            a=declare_stacked(f"{name}.a", sizes, init), b=declare_stacked(f"{name}.b", sizes, initializers.zeros)
        )


def project(x: Array, weight: Array, update: Lora | None = None, *, scale: float = 1.0, dims: int = 1) -> Array:
    """`x @ (weight + scale * a @ b)` over the last `dims` axes of `x`, never forming the sum of the matrices."""
    y = jnp.tensordot(x, weight.astype(x.dtype), dims)
    if update is None:
        return y
    a, b = update.a.astype(x.dtype), (scale * update.b).astype(x.dtype)
    if platform() == "cpu":
        return y + _low_rank_product(x.reshape(*x.shape[: x.ndim - dims], -1), a.reshape(-1, a.shape[-1]), b)
    return y + jnp.tensordot(jnp.tensordot(x, a, dims), b, 1)


def checkpointed_matmul(
    x: Array, weight: Array, update: Lora | None = None, *, scale: float = 1.0, dims: int = 1
) -> Array:
    """`project` for a block that is trained: rematerialisation may save the result, which is fused with nothing."""
    return fusion_barrier(checkpoint_name(project(fusion_barrier(x), weight, update, scale=scale, dims=dims), PRODUCT))


@jax.custom_vjp
def _low_rank_product(x: Float[Array, "*B i"], a: Float[Array, "i R"], b: Float[Array, "R ..."]) -> Array:
    """`x @ a @ b` for CPUs, with gradients that transpose no wide array.

    Left alone, the gradient of `b` is the transpose of `g^T (x a)`. For it, XLA on CPUs transposes g and all
    element-wise work before it, which took half of the backward pass.
    """
    return jnp.tensordot(x @ a, b, 1)


def _low_rank_forward(x: Array, a: Array, b: Array) -> tuple[Array, tuple[Array, ...]]:
    low = x @ a
    return jnp.tensordot(low, b, 1), (x, a, b, low)


def _low_rank_backward(saved: tuple[Array, ...], gradient: Array) -> tuple[Array, Array, Array]:
    x, a, b, low = saved
    rows = list(range(x.ndim - 1))
    back = jnp.tensordot(gradient, b, (list(range(x.ndim - 1, gradient.ndim)), list(range(1, b.ndim))))
    return back @ a.T, jnp.tensordot(back, x, (rows, rows)).T, jnp.tensordot(low, gradient, (rows, rows))


_low_rank_product.defvjp(_low_rank_forward, _low_rank_backward)


@jax.custom_vjp
def fusion_barrier(x: Array) -> Array:
    """Compute `x` and its gradient here, once: neither is fused into the products that read it.

    Otherwise, two products that read one element-wise result both compute it again for each of their tiles. Compiled
    for TPU v5e, that cost a tenth of a training step.
    """
    return jax.lax.optimization_barrier(x)


fusion_barrier.defvjp(
    lambda x: (fusion_barrier(x), None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


@nnx.dataclass
class Linear(nnx.Module):
    """An affine map; leading axes of the weights are scanned over."""

    weight: Float[Array, "*in out"] | Declared = nnx.data()
    bias: Float[Array, "*out"] | Declared = nnx.data()

    def __call__(self, x: Float[Array, "*B i"]) -> Float[Array, "..."]:
        """`x @ weight + bias`, in the type of `x`."""
        return jnp.tensordot(x, self.weight.astype(x.dtype), 1) + self.bias.astype(x.dtype)


@nnx.dataclass
class Mlp(nnx.Module):
    """Two affine maps with a SiLU between them."""

    first: Linear = nnx.data()
    last: Linear = nnx.data()

    def __call__(self, x: Float[Array, "*B i"]) -> Array:
        """`last(silu(first(x)))`, in the type of `x`."""
        return self.last(jax.nn.silu(self.first(x)))
