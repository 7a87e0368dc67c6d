"""The building blocks of the LM (the main path) and of the diffusion path, as functions of arrays.

Axis letters, here and in every shape of the project:
    B batch             T tokens            S slots of the cache     M positions of diffusion tokens
    D model width       N query heads       K key and value heads    H head width
    F MLP width         V vocabulary        L layers                 R LoRA rank
    C diffusion width   E condition width   P tokens of a prefix that all rows share
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.nn import initializers
from jaxtyping import Array, Float, Int

from l2d_jax.distributed.sharding import Declared, Initializer
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import declare_stacked
from l2d_jax.model.few_rows import StackedWeight
from l2d_jax.model.products import multiply, multiply_rows
from l2d_jax.model.quantization import from_bits

EVERY = 2**31 - 1  # the window of a layer whose queries see all keys
PRODUCT = "product"  # checkpoint name of a block's matrix products, so that rematerialisation may save them


def rms_norm(
    x: Float[Array, "*B D"], weight: Float[Array, "*b D"] | None, epsilon: float, offset: float = 0.0
) -> Float[Array, "*B D"]:
    """Root-mean-square norm times `offset + weight`, computed in float32; `x` itself if `weight` is None."""
    if weight is None:
        return x
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon)
    if offset:  # Gemma rounds after the product, other models before it
        return (y * (offset + weight.astype(jnp.float32))).astype(x.dtype)
    return y.astype(x.dtype) * weight.astype(x.dtype)


def activate(x: Array, architecture: Architecture) -> Array:
    """Apply the non-linearity of the MLP's gate."""
    return jax.nn.silu(x) if architecture.activation == "silu" else jax.nn.gelu(x, approximate=True)


def rope_frequencies(architecture: Architecture, kind: str = "global") -> Float[Array, " half"]:
    """The angle per position of each pair of channels, in radians; `kind` is one of `Architecture.ropes`."""
    a, half = architecture, architecture.head_dim // 2
    if kind == "none":
        return jnp.zeros(half)
    theta, scaling = (a.local_rope_theta, None) if kind == "local" else (a.rope_theta, a.rope_scaling)
    frequency = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if scaling is None:
        return frequency
    kept = scaling.kept(frequency, theta)
    return frequency * (kept + (1 - kept) / scaling.factor)


def rope(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "B T"],
    frequencies: Float[Array, " half"],
    scale: Float[Array, ""] | None = None,
) -> Float[Array, "B T N H"]:
    """Rotary embedding in the half-split layout of Hugging Face, times `scale`; angles and products in float32."""
    angle = positions[..., None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return (turned if scale is None else turned * scale).astype(x.dtype)


class LayerOptions(NamedTuple):
    """Options in which layers may differ: of one layer, or of all with a leading axis L; None: layers do not differ."""

    frequencies: Float[Array, "*L half"]
    query_scale: Float[Array, "*L"] | None
    window: Int[Array, "*L"] | None  # a query sees keys that are fewer positions before it

    def over(self, shared: "LayerOptions") -> "LayerOptions":
        """These options; where they are None, the shared ones."""
        pairs: Any = zip(self, shared, strict=True)
        return LayerOptions(*(common if own is None else own for own, common in pairs))


def layer_options(architecture: Architecture, *, length: int | None = None) -> tuple[LayerOptions, LayerOptions]:
    """The options that all layers share, and those in which they differ, for a scan over layers.

    The scale of the queries contains both factors of YaRN, that of queries and that of keys. A window that covers a
    whole row of `length` tokens is omitted.
    """
    a = architecture
    kinds, windows = a.ropes or ("global",), a.windows or (0,)
    sharp = 1.0 if a.rope_scaling is None else a.rope_scaling.attention_factor**2
    scales = [a.query_scale * (sharp if kind == "global" else 1.0) for kind in kinds]
    limits = [EVERY if window == 0 or (length and window >= length) else window for window in windows]
    frequencies = {kind: rope_frequencies(a, kind) for kind in kinds}
    columns: tuple[tuple[Sequence[Any], Callable[[Any], Array], Any], ...] = (
        (kinds, frequencies.__getitem__, None),
        (scales, jnp.float32, 1.0),
        (limits, jnp.int32, EVERY),
    )
    shared: list[Any] = []
    own: list[Any] = []
    for values, make, neutral in columns:
        is_shared = len(set(values)) == 1
        shared.append(make(values[0]) if is_shared and values[0] != neutral else None)
        own.append(None if is_shared else jnp.stack([make(value) for value in values]))
    return LayerOptions(*shared), LayerOptions(*own)


@nnx.dataclass
class Lora(nnx.Module):
    """A low-rank update of a weight: `scale * a @ b`."""

    a: Float[Array, "*in R"] | Declared = nnx.data()
    b: Float[Array, "..."] | Declared = nnx.data()  # [R, *out]; both have a leading axis L if layers are stacked

    @classmethod
    def declare(cls, name: str, sizes: Mapping[str, int], init: Initializer) -> "Lora":
        """Declare the update of a matrix of `axes.MATRICES` in all blocks: `init` initialises a; b starts at zero."""
        zero = declare_stacked(f"{name}.b", sizes, initializers.zeros)
        return cls(a=declare_stacked(f"{name}.a", sizes, init), b=zero)


@nnx.dataclass
class RowLora(nnx.Module):
    """A low-rank update of a weight for each row: as `layers.Lora`, with an axis B before that of the inputs."""

    row_a: Float[Array, "..."] = nnx.data()  # [B, *in, R]; both have a leading axis L if layers are stacked
    row_b: Float[Array, "..."] = nnx.data()  # [B, R, *out]

    def __call__(self, x: Array, *, scale: float, dims: int, dtype: Any) -> Array:
        """`x @ (scale * a @ b)` over the last `dims` axes of x [B, M, *in], with factors in `dtype`."""
        a, b = self.row_a.astype(dtype), (scale * self.row_b).astype(dtype)
        return multiply_rows(multiply_rows(x, a, dims), b, 1)


def project(
    x: Array, weight: Array | StackedWeight, update: Lora | RowLora | None = None, *, scale: float = 1.0, dims: int = 1
) -> Array:
    """`x @ (weight + scale * a @ b)` over the last `dims` axes of `x`, without forming the sum of the matrices."""
    y = multiply(x, weight, dims)
    return y if update is None else y + project_update(x, weight, update, scale=scale, dims=dims)


def project_update(
    x: Array, weight: Array | StackedWeight, update: Lora | RowLora, *, scale: float = 1.0, dims: int = 1
) -> Array:
    """`x @ (scale * a @ b)`: what the update of a weight adds in `project`."""
    dtype = x.dtype if isinstance(weight, StackedWeight) else from_bits(weight).dtype
    if isinstance(update, RowLora):
        return update(x, scale=scale, dims=dims, dtype=dtype)
    a, b = update.a.astype(dtype), (scale * update.b).astype(dtype)
    return multiply(multiply(x, a, dims), b, 1)


def project_saved(
    x: Array, weight: Array, update: Lora | RowLora | None = None, *, scale: float = 1.0, dims: int = 1
) -> Array:
    """`project` for a trained block: rematerialisation may save the result, and XLA does not fuse it."""
    return fusion_barrier(checkpoint_name(project(fusion_barrier(x), weight, update, scale=scale, dims=dims), PRODUCT))


@jax.custom_vjp
def fusion_barrier(x: Array) -> Array:
    """Compute `x` and its gradient here, once, so that neither is fused into the products that read it.

    Otherwise, two products that read the same element-wise result both compute it again for each of their tiles.
    Compiled for TPU v5e, that cost a tenth of a training step.
    """
    return jax.lax.optimization_barrier(x)


fusion_barrier.defvjp(
    lambda x: (fusion_barrier(x), None), lambda _, gradient: (jax.lax.optimization_barrier(gradient),)
)


@nnx.dataclass
class Linear(nnx.Module):
    """An affine map; weights may have leading axes, over which a scan runs."""

    weight: Float[Array, "*in out"] | Declared = nnx.data()
    bias: Float[Array, "*out"] | Declared = nnx.data()

    def __call__(self, x: Float[Array, "*B i"]) -> Float[Array, "..."]:
        """`x @ weight + bias`, in the dtype of `x`."""
        return jnp.tensordot(x, self.weight.astype(x.dtype), 1) + self.bias.astype(x.dtype)


@nnx.dataclass
class Mlp(nnx.Module):
    """Two affine maps with a SiLU between them."""

    first: Linear = nnx.data()
    last: Linear = nnx.data()

    def __call__(self, x: Float[Array, "*B i"]) -> Array:
        """`last(silu(first(x)))`, in the dtype of `x`."""
        return self.last(jax.nn.silu(self.first(x)))


@nnx.dataclass
class RowLinear(nnx.Module):
    """An affine map for each row, so that rows may belong to different paths."""

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
