"""Weights where a layer uses them: gathered from their shards, and restored from int8 where they are stored so.

On a mesh with `stationary` weights stay where they are, and the rows of a product come to them.
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

NAME = "gathered"  # checkpoint name of gathered weights, which no rematerialisation saves: they would be a second copy


def gather_weight(weight: Array | QuantizedWeight, axes: tuple[str, ...], *, dtype: Any) -> Array:
    """A weight with these logical axes in `dtype`, whole over the mesh axes `fsdp` and `context`."""
    if isinstance(weight, QuantizedWeight):
        values, scale = (constrain(array, *axes, rules=GATHERED) for array in (weight.values, weight.scale))
        return checkpoint_name(QuantizedWeight(values=values, scale=scale).restore(dtype), NAME)
    if weight.dtype != jnp.uint16 or dtype != jnp.bfloat16:  # a product reads bits itself
        weight = from_bits(weight).astype(dtype)
    return checkpoint_name(constrain(weight, *axes, rules=GATHERED), NAME)


def gather_layer(layer: Any, *, dtype: Any, products: Any) -> Any:
    """The weights of one layer by `gather_weight`: matrices in the type of `products`, all else in `dtype`.

    Called at the top of a layer, this gathers each weight once, there. Left alone, the partitioner splits the
    contractions of every product instead: compiled for TPU v5e, those of the MLP ran at 40 % of peak so, and run at
    95 % now.
    """

    def gather(path: Any, weight: Array | QuantizedWeight | StackedWeight) -> Array | StackedWeight:
        if isinstance(weight, StackedWeight):
            return weight
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return gather_weight(weight, LAYER_AXES[name], dtype=products if name in MATRICES else dtype)

    return jax.tree.map_with_path(gather, layer, is_leaf=lambda x: isinstance(x, QuantizedWeight | StackedWeight))


def gather_rows(x: Array, *axes: str) -> Array:
    """Activations [B, ..., *axes] with all rows that a product with stationary weights is of."""
    if not axes:  # in two steps, between which XLA puts no transpose of all
        x = _place(x, "residual_batch")
    return _place(x, "gathered_batch", *axes)


def split_rows(x: Array, *axes: str) -> Array:
    """The rows of each device again, behind such a product; those of the residual stream are over `tensor`."""
    return _place(x, "batch", *axes) if axes else _place(x, "residual_batch", "residual_embed")


def residual(x: Array) -> Array:
    """The residual stream where a block begins and ends."""
    return split_rows(x) if axis_size("stationary") > 1 else constrain(x, "batch", "length", "embed_activation")


def _place(x: Array, rows: str, *axes: str) -> Array:
    whole = ("embed_activation",) * (x.ndim - 1 - len(axes))
    return constrain(x, rows, *whole, *axes) if axis_size("stationary") > 1 else x
