"""The loop over the layers of a stack, for every way in which their matrices can be stored: `scan_layers`."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from l2d_jax.model.axes import MATRICES
from l2d_jax.model.few_rows import StackedWeight, takes


def scan_layers(block: Callable[..., Any], first: Any, scanned: tuple[Any, ...], *, in_place: bool) -> Any:
    """`jax.lax.scan` over layers. With `in_place`, the block gets the matrices of modules as `StackedWeight`.

    If matrices are lists with one array per layer, the loop is unrolled.
    """
    if lists := [leaf for leaf in jax.tree.leaves(scanned, is_leaf=_is_list) if _is_list(leaf)]:
        outputs = []
        for layer in range(len(lists[0])):
            first, output = block(first, jax.tree.map(operator.itemgetter(layer), scanned, is_leaf=_is_list))
            outputs.append(output)
        return first, jax.tree.map(lambda *layers: jnp.stack(layers), *outputs)
    if not in_place:
        return jax.lax.scan(block, first, scanned)
    leaves, tree = jax.tree_util.tree_flatten_with_path(scanned)

    def is_matrix(path: tuple[Any, ...], leaf: Array) -> bool:
        name = jax.tree_util.keystr(path[1:], simple=True)
        is_weight = isinstance(scanned[path[0].idx], nnx.Module) and name in MATRICES
        return is_weight and takes(leaf[0], len(MATRICES[name][0]))

    stacks = [leaf if is_matrix(path, leaf) else None for path, leaf in leaves]
    slices = [leaf if stack is None else None for (_, leaf), stack in zip(leaves, stacks, strict=True)]

    def body(carry: Any, part: tuple[Array, list[Any]]) -> tuple[Any, Any]:
        layer, slices = part
        pairs = zip(slices, stacks, strict=True)
        weights = [one if stack is None else StackedWeight(stack, layer) for one, stack in pairs]
        return block(carry, jax.tree.unflatten(tree, weights))

    return jax.lax.scan(body, first, (jnp.arange(len(leaves[0][1]), dtype=jnp.int32), slices))


def _is_list(leaf: Any) -> bool:
    return isinstance(leaf, list)
