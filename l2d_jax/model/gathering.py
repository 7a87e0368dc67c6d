"""Gathers the weights of a layer from their shards where the layer uses them, and restores them from int8.

On a mesh with a `stationary` axis, weights stay where they are, and the rows of a product are gathered instead.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array

from l2d_jax.distributed.sharding import GATHERED, axis_size, constrain
from l2d_jax.model.axes import LAYER_AXES, MATRICES
from l2d_jax.model.few_rows import StackedWeight
from l2d_jax.model.quantization import QuantizedWeight, from_bits

NAME = "gathered"  # checkpoint name of gathered weights; rematerialisation never saves them, a second copy


def gather_weight(weight: Array | QuantizedWeight, axes: tuple[str, ...], *, dtype: Any) -> Array:
    """Gather a weight with these logical axes over the mesh axes `fsdp` and `context`, in `dtype`."""
    if isinstance(weight, QuantizedWeight):
        values, scale = (constrain(array, *axes, rules=GATHERED) for array in (weight.values, weight.scale))
        return checkpoint_name(QuantizedWeight(values=values, scale=scale).restore(dtype), NAME)
    if weight.dtype != jnp.uint16 or dtype != jnp.bfloat16:  # products read these bits directly
        weight = from_bits(weight).astype(dtype)
    return checkpoint_name(constrain(weight, *axes, rules=GATHERED), NAME)


def gather_layer(layer: Any, *, dtype: Any, products: Any) -> Any:
    """Gather the weights of one layer: matrices in the dtype `products`, everything else in `dtype`.

    Call it at the top of a layer, so that each weight is gathered once, there. Otherwise the partitioner splits the
    contractions of every product: compiled for TPU v5e, the products of the MLP then run at 40 % of peak, with
    gathering at 95 %.
    """

    def gather(path: Any, weight: Array | QuantizedWeight | StackedWeight) -> Array | StackedWeight:
        if isinstance(weight, StackedWeight):
            return weight
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return gather_weight(weight, LAYER_AXES[name], dtype=products if name in MATRICES else dtype)

    return jax.tree.map_with_path(gather, layer, is_leaf=lambda x: isinstance(x, QuantizedWeight | StackedWeight))


def gather_rows(x: Array, *axes: str) -> Array:
    """Gather all rows of activations [B, ..., *axes] for a product with stationary weights."""
    if not axes:  # in two steps: in one, XLA would insert a transpose of everything
        x = _place(x, "residual_batch")
    return _place(x, "gathered_batch", *axes)


def split_rows(x: Array, *axes: str) -> Array:
    """Split rows over the devices again, after such a product; rows of the residual stream are split over `tensor`."""
    return _place(x, "batch", *axes) if axes else _place(x, "residual_batch", "residual_embed")


def residual(x: Array) -> Array:
    """Place the residual stream where a block begins and ends."""
    return split_rows(x) if axis_size("stationary") > 1 else constrain(x, "batch", "length", "embed_activation")


def _place(x: Array, rows: str, *axes: str) -> Array:
    whole = ("embed_activation",) * (x.ndim - 1 - len(axes))
    return constrain(x, rows, *whole, *axes) if axis_size("stationary") > 1 else x
