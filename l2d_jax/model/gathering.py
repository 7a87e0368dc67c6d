"""Weights where a layer uses them: gathered from their shards, and restored from int8 where they are stored so.

On a mesh with `stationary` weights stay where they are, and the rows of a product come to them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array

from l2d_jax.distributed.sharding import GATHERED, RULES, axis_size, constrain
from l2d_jax.model.axes import LAYER_AXES, MATRICES
from l2d_jax.model.few_rows import StackedWeight
from l2d_jax.model.products import multiply
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
        if name == "gate" and getattr(weight, "ndim", 0) == 3:
            return jnp.moveaxis(gather_weight(weight, LAYER_AXES["gate_and_up"], dtype=products), 0, 1)
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


def scatter_sums(x: Array, pair: tuple[Any, Any], product: Callable[..., Array]) -> Array:
    """`split_rows(product(x, *pair))` of hidden units x [B, T, F] with a matrix [F, D] or its update, or both.

    With a matrix alone a device gets its own sums, where all divides: the partitioner would send it those of others.
    """
    tensor, stationary = axis_size("tensor"), axis_size("stationary")
    weight, *more = (part for part in pair if part is not None)
    rows, units = axis_size("data") * axis_size("fsdp") * tensor, tensor * stationary
    if stationary == 1 or more or len(x) % rows or len(weight) % units or weight.shape[1] % stationary:
        return split_rows(product(x, *pair))

    def local(x: Array, weight: Array) -> Array:  # XLA scatters the first axis of a matrix, and no other
        y = jax.lax.psum_scatter(multiply(x.reshape(-1, x.shape[2]), weight, 1), "tensor", tiled=True)
        columns = y.reshape(len(y), stationary, -1).swapaxes(0, 1).reshape(stationary * len(y), -1)
        return jax.lax.psum_scatter(columns, "stationary", tiled=True).reshape(-1, x.shape[1], columns.shape[1])

    hidden, mesh = RULES["mlp"], jax.sharding.get_abstract_mesh()
    specs = PartitionSpec(RULES["gathered_batch"], None, hidden), PartitionSpec(hidden)
    out = PartitionSpec(RULES["residual_batch"], None, RULES["residual_embed"])
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=out, check_vma=False)(x, weight)


def residual(x: Array) -> Array:
    """The residual stream where a block begins and ends."""
    return split_rows(x) if axis_size("stationary") > 1 else constrain(x, "batch", "length", "embed_activation")


def _place(x: Array, rows: str, *axes: str) -> Array:
    whole = ("embed_activation",) * (x.ndim - 1 - len(axes))
    return constrain(x, rows, *whole, *axes) if axis_size("stationary") > 1 else x
