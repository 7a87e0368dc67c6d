"""The language model and its diffusion path as one model."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float

from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.distributed.sharding import axis_size, constrain
from l2d_jax.errors import require
from l2d_jax.model.axes import ADAPTED, LAYER_AXES, MATRICES
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.few_rows import can_read
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import merge_adapter
from l2d_jax.model.quantization import QuantizedWeight, as_bits


@nnx.dataclass
class Model(nnx.Module):
    """The frozen LM and the path, with the table of vocabulary vectors V_y that the path's weights determine."""

    llm: LLM = nnx.data()
    path: DiffusionPath | None = nnx.data()  # None: the LM alone, for a budget of 1
    table: Float[Array, "V C"] | None = nnx.data()
    # Of a merged model: the path whose updates are apart, where the LM's matrices serve both in a joint pass.
    updating: DiffusionPath | None = nnx.data(default=None)

    @classmethod
    def build(cls, llm: LLM, path: DiffusionPath | None) -> "Model":
        """Compute the table once for these weights."""
        table = None if path is None else _embed(path, llm.embed)
        return cls(llm=dataclasses.replace(llm, layers=as_bits(llm.layers)), path=path, table=table)

    def reading(self, *, refines: bool) -> "Model":
        """The model with the LM that reads the context; with a budget of 1, where nothing is refined, it is the LM."""
        if self.path is None or not refines:
            return self
        return dataclasses.replace(self, llm=self.path.reader(self.llm))

    def can_merge(self, memory: int | None) -> bool:
        """Whether so many bytes (None: unknown) hold what `merged` adds, beside caches and logits."""
        models = 3 if axis_size("stationary") == 1 else 4  # `apart` copies the LM, too
        fits = memory is None or models * tree_bytes(self) < memory
        return fits and not isinstance(self.llm.layers.q, QuantizedWeight)

    def merged(self, memory: int | None = None) -> "Model":
        """The model as it decodes fastest: updates are added to copies of the weights, once, and rounded to their type.

        On CPUs, `few_rows` reads those in float32. It is the model itself where it cannot be merged in this memory.
        """
        if not self.can_merge(memory):
            return self
        llm, path, updating = self.llm, self.path, None
        if path is not None and path.adapter is not None:
            if path.config.reader == "lm":
                updating = small_updates(path, llm)
            path = path.with_matrices(as_bits(merge_adapter(llm.layers, path.adapter)))
        if llm.adapter is not None:
            llm = dataclasses.replace(llm, layers=merge_adapter(llm.layers, llm.adapter), adapter=None)
        llm = dataclasses.replace(llm, layers=as_bits(llm.layers), in_place=can_read(llm.embed))
        return dataclasses.replace(self, llm=llm, path=path, updating=updating).apart()

    @property
    def readings(self) -> float:
        """What a joint pass reads, in the LM's layers: those of the path, too, if they are others."""
        if self.path is None or self.path.config.reader != "lm":
            return 1.0
        path = self.path if self.updating is None else self.updating
        layers = [getattr(path.layers, name) for name in ADAPTED]
        return 1.0 + tree_bytes(layers) / tree_bytes([getattr(self.llm.layers, name) for name in ADAPTED])

    def apart(self) -> "Model":
        """The model with the matrices of each layer in arrays of their own, where the weights are stationary.

        So XLA reads the next ones ahead, into on-chip memory. It does not where they are slices of a stack, and 16
        sequences take twice as long (compiled for TPU v5e).
        """
        if axis_size("stationary") == 1:
            return self
        llm, path = dataclasses.replace(self.llm, layers=_split(self.llm.layers)), self.path
        if path is not None and path.adapter is None:
            path = dataclasses.replace(path, layers=_split(path.layers))
        return dataclasses.replace(self, llm=llm, path=path)


def small_updates(path: DiffusionPath, llm: LLM) -> DiffusionPath | None:
    """The path with its updates in the type of the LM's products; None where they are half as large as its matrices."""
    updates = {name: getattr(path.layers, name) for name in ADAPTED}
    cast = jax.tree.map(lambda array: array.astype(llm.product_dtype), updates)
    if 2 * tree_bytes(cast) > tree_bytes([getattr(llm.layers, name) for name in ADAPTED]):
        return None
    return dataclasses.replace(path, layers=dataclasses.replace(path.layers, **cast))


def _split(layers: Any) -> Any:
    stacks = {name: stack for name in MATRICES if (stack := getattr(layers, name, None)) is not None}
    return dataclasses.replace(layers, **{name: _unstack(stack, name=name) for name, stack in stacks.items()})


@partial(jax.jit, static_argnames="name")
def _unstack(stack: Array, *, name: str) -> list[Array]:
    return [constrain(matrix, *LAYER_AXES[name]) for matrix in stack]


_embed = jax.jit(DiffusionPath.embed)  # jitted once here: new weights of the same shapes do not compile again


def check_labels(path: PathConfig | None, labels: Iterable[int]) -> None:
    """Raise `InputError` for a class that a path with this config was not trained with."""
    classes = 0 if path is None else path.classes
    known = f"0 to {classes - 1}" if classes else "none: it was trained without classes"
    for label in labels:
        require(0 <= label < classes, f"class label {label} is unknown to this path: it knows {known}")
