"""The table that maps Hugging Face's tensors to our arrays; it is read in both directions.

A row names a tensor of the release (or of `transformers`), a leaf of our pytrees, and how their axes correspond, in the
notation of einops. A linear layer is `[out, in]` there and `[in, out]` here, with heads as a separate axis. Weights
stream from files into their shards slice by slice, so no host holds a whole model.
"""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed import sharding
from l2d_jax.errors import require
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import ADAPTED, KEYS, MATRICES
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM

Shapes: TypeAlias = dict[str, tuple[int, ...]]  # keys: tensor names


@runtime_checkable
class TensorSource(Protocol):
    """A set of named tensors that can be read slice by slice."""

    @property
    def records(self) -> Mapping[str, Any]:
        """For each tensor name, an object with the `shape` and `dtype` of the tensor."""

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a tensor or a slice of it."""


@dataclass(frozen=True)
class Row:
    """A row of the table; `theirs` contains `{}` for the number of the layer if ours is stacked."""

    theirs: str
    ours: str  # path of attributes, with dots
    axes: str  # "our axes -> their axes"

    @property
    def stacked(self) -> bool:
        """Whether our array has a leading layers axis, with one of their tensors per layer."""
        return "{}" in self.theirs

    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each of their axes, the indices of our axes that it joins."""
        ours, theirs = self.axes.split("->")
        parts = re.findall(r"\([^)]*\)|\w+", theirs)
        return tuple(tuple(ours.split().index(letter) for letter in part.strip("()").split()) for part in parts)

    def their_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of their tensor for one layer of ours."""
        return tuple(math.prod(shape[i] for i in group) for group in self.groups())

    def to_theirs(self, array: np.ndarray) -> np.ndarray:
        """Their tensor from one layer of ours."""
        order = [i for group in self.groups() for i in group]
        return np.ascontiguousarray(array.transpose(order).reshape(self.their_shape(array.shape)))

    def read(self, source: TensorSource, name: str, shape: tuple[int, ...], index: tuple[slice, ...]) -> np.ndarray:
        """Read the slice `index` of one layer of ours; only the blocks of their tensor that contain it are read."""
        groups = self.groups()
        wanted = [slice(*part.indices(size)) for part, size in zip(index, shape, strict=True)]
        outer, left, sizes = [], list(wanted), list(shape)
        for group in groups:
            first, inner = group[0], math.prod(shape[i] for i in group[1:])
            outer.append(slice(wanted[first].start * inner, wanted[first].stop * inner))
            sizes[first] = wanted[first].stop - wanted[first].start
            left[first] = slice(None)
        order = [i for group in groups for i in group]
        block = source.read(name, tuple(outer)).reshape([sizes[i] for i in order])
        return block.transpose(np.argsort(order))[tuple(left)]


_LAYER = "model.layers.{}."


def matrix_rows(names: Iterable[str], theirs: str, ours: str, axes: str, *, prefix: str = "") -> list[Row]:
    """A row for each matrix in `names`: %s stands for its name, I and O for the axes of its inputs and outputs."""
    return [
        Row(theirs % matrix, ours % name, axes.replace("I", inputs).replace("O", outputs))
        for name in names
        for matrix in [f"{_LAYER}{'self_attn' if name in 'qkvo' else 'mlp'}.{prefix}{name}_proj"]
        for inputs, outputs in [map(" ".join, MATRICES[name])]
    ]


def _linear(theirs: str, ours: str, inputs: str, outputs: str) -> list[Row]:
    return [
        Row(f"{theirs}.weight", f"{ours}.weight", f"{inputs} {outputs} -> ({outputs}) ({inputs})"),
        Row(f"{theirs}.bias", f"{ours}.bias", f"{outputs} -> ({outputs})"),
    ]


LLM_ROWS = [
    Row("model.embed_tokens.weight", "embed", "v d -> v d"),
    Row("model.norm.weight", "norm", "d -> d"),
    Row("lm_head.weight", "head", "v d -> v d"),
    Row(_LAYER + "input_layernorm.weight", "layers.attention_norm", "d -> d"),
    # In blocks with two norms, this name is the MLP's norm; in blocks with four, the norm after the attention.
    Row(_LAYER + "post_attention_layernorm.weight", "layers.post_attention_norm", "d -> d"),
    Row(_LAYER + "post_attention_layernorm.weight", "layers.mlp_norm", "d -> d"),
    Row(_LAYER + "pre_feedforward_layernorm.weight", "layers.mlp_norm", "d -> d"),
    Row(_LAYER + "post_feedforward_layernorm.weight", "layers.post_mlp_norm", "d -> d"),
    *(Row(f"{_LAYER}self_attn.{x}_norm.weight", f"layers.{x}_norm", "d -> d") for x in "qk"),
    *matrix_rows(MATRICES, "%s.weight", "layers.%s", "I O -> (O) (I)"),
    *matrix_rows("qkv", "%s.bias", "layers.%s_bias", "O -> (O)"),
]

PATH_ROWS = [
    *_linear("model.flow_token_embedder.embedder.layers_module.0", "vocabulary", "d", "c"),
    *_linear("model.flow_to_lm_encoder.embedder.layers_module.0", "translation.first", "c", "w"),
    *_linear("model.flow_to_lm_encoder.embedder.layers_module.2", "translation.last", "w", "d"),
    *_linear("model.timestep_embedder.mlp.0", "time.first", "f", "e"),
    *_linear("model.timestep_embedder.mlp.2", "time.last", "i", "e"),
    Row("model.data_label_embedder.weight", "classes", "n e -> n e"),
    *_linear("model.modulation_head.mlp.0", "merge.first", "i", "e"),
    *_linear("model.modulation_head.mlp.2", "merge.last", "e", "d"),
    *_linear(_LAYER + "modulation_head.mlp.0", "layers.modulation.first", "i", "e"),
    *_linear(_LAYER + "modulation_head.mlp.2", "layers.modulation.last", "e", "p d"),
    # Updates and full copies; those of k and v do not exist in the release.
    *matrix_rows((*ADAPTED, *KEYS), "%s.A", "layers.%s.a", "I rank -> (I) rank", prefix="flow_"),
    *matrix_rows((*ADAPTED, *KEYS), "%s.B", "layers.%s.b", "rank O -> rank (O)", prefix="flow_"),
    *matrix_rows((*ADAPTED, *KEYS), "%s.weight", "layers.%s", "I O -> (O) (I)", prefix="flow_"),
    *matrix_rows("q", "%s.bias", "layers.%s_bias", "O -> (O)", prefix="flow_"),
]


@dataclass(frozen=True)
class Leaf:
    """A row, and the leaf of our tree that it fills."""

    row: Row
    value: Any  # an array, a declaration or a `jax.ShapeDtypeStruct`

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The shape of the leaf without the layers axis."""
        return tuple(self.value.shape[1:] if self.row.stacked else self.value.shape)

    def names(self) -> list[str]:
        """The names of their tensors; one per layer if ours is stacked."""
        return [self.row.theirs.format(i) for i in range(self.value.shape[0] if self.row.stacked else 1)]


def leaves(tree: Any, rows: Iterable[Row]) -> list[Leaf]:
    """The rows that apply to a tree, in the order of its leaves. If several match a leaf or tensor: the first."""
    flat = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: hasattr(x, "shape"))[0]
    by_path = {jax.tree_util.keystr(path, simple=True, separator="."): value for path, value in flat}
    filled: dict[str, Leaf] = {}
    taken = set()
    for row in rows:
        if row.ours in by_path.keys() - filled.keys() and row.theirs not in taken:
            filled[row.ours] = Leaf(row, by_path[row.ours])
            taken.add(row.theirs)
    assert filled.keys() == by_path.keys(), f"no row for {by_path.keys() - filled.keys()}"
    return [filled[path] for path in by_path]


def tensor_shapes(tree: Any, rows: Iterable[Row]) -> Shapes:
    """Names and shapes of all their tensors that correspond to a tree of ours."""
    return {name: leaf.row.their_shape(leaf.layer_shape) for leaf in leaves(tree, rows) for name in leaf.names()}


def llm_shapes(architecture: Architecture) -> Shapes:
    """Names and shapes of all tensors of a language model."""
    return tensor_shapes(LLM.declare(architecture, dtype=np.float32), LLM_ROWS)


def path_shapes(config: PathConfig, architecture: Architecture) -> Shapes:
    """Names and shapes of all tensors of a path, as in the release."""
    return tensor_shapes(DiffusionPath.declare(config, architecture), PATH_ROWS)


def check_tensors(source: TensorSource, shapes: Shapes, *, ignored: Set[str] = frozenset()) -> None:
    """Raise one `InputError` that names tensors that are missing, extra, misshaped or not weights (a few of each).

    float16 and bfloat16 in the same file are refused: a damaged header can turn one into the other.
    """
    present = source.records
    kinds = {name: np.dtype(present[name].dtype) for name in shapes if name in present}
    halves = {str(kind) for kind in kinds.values()} >= {"float16", "bfloat16"}
    sizes = ((name, present[name].shape, shapes[name]) for name in kinds)
    faults = [
        ("missing", sorted(shapes.keys() - present.keys())),
        ("not part of this architecture", sorted(present.keys() - shapes.keys() - ignored)),
        ("misshaped", [f"{name} has shape {list(a)}, expected {list(b)}" for name, a, b in sizes if a != b]),
        ("of integers", [name for name, kind in kinds.items() if not jnp.issubdtype(kind, jnp.floating)]),
        ("float16 and bfloat16", [name for name, kind in kinds.items() if halves and kind == np.float16]),
    ]
    text, short = (
        # Shapes make long names longer.
        "; ".join(f"{kind}: {_some(names, 1 if kind == 'misshaped' else most)}" for kind, names in faults if names)
        for most in (2, 1)
    )
    text = text if len(text) < 200 else short  # the message must be one line
    require(text == "", f"the tensors do not fit the architecture: {text}: take weights and config.json of one model")


def holds_the_same(source: TensorSource, name: str, other: str) -> bool:
    """Whether two tensors of a source have the same shape and values; compares blocks of rows."""
    shape = tuple(source.records[name].shape)
    if shape != tuple(source.records[other].shape):
        return False
    rows = max(1, 2**22 // math.prod(shape[1:]))
    blocks = ((slice(i, i + rows),) for i in range(0, shape[0], rows))
    pairs = ((source.read(name, block), source.read(other, block)) for block in blocks)
    return all(np.array_equal(a.astype(np.float64), b.astype(np.float64)) for a, b in pairs)


def load_tree(declared: Any, source: TensorSource, mesh: Mesh, *, rows: Iterable[Row]) -> Any:
    """Read a tree of arrays onto `mesh`, in the declared dtypes; each shard is read separately."""
    placements = jax.tree.leaves(sharding.shardings(declared, mesh))
    pairs, make = zip(leaves(declared, rows), placements, strict=True), jax.make_array_from_callback
    arrays = [make(leaf.value.shape, placement, partial(_read, leaf, source)) for leaf, placement in pairs]
    return jax.tree.unflatten(jax.tree.structure(declared), arrays)


def tensors(tree: Any, rows: Iterable[Row]) -> Iterator[tuple[str, Callable[[], np.ndarray]]]:
    """Yield the name of each of their tensors and a function that makes it, bit for bit; all processes must call it."""

    def make(leaf: Leaf, i: int) -> np.ndarray:
        layer = leaf.value[i] if leaf.row.stacked else leaf.value  # only one layer at a time
        return leaf.row.to_theirs(np.asarray(multihost_utils.process_allgather(layer, tiled=True)))

    return ((name, partial(make, leaf, i)) for leaf in leaves(tree, rows) for i, name in enumerate(leaf.names()))


def _read(leaf: Leaf, source: TensorSource, index: tuple[slice, ...] | None) -> np.ndarray:
    assert index is not None  # None occurs only for arrays of opaque types
    names, shape, dtype = leaf.names(), leaf.layer_shape, leaf.value.dtype
    if not leaf.row.stacked:
        return leaf.row.read(source, names[0], shape, index).astype(dtype)
    return np.stack([leaf.row.read(source, name, shape, index[1:]).astype(dtype) for name in names[index[0]]])


def _some(names: list[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
