"""The language model and its diffusion path as one model."""

import dataclasses
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.distributed.sharding import axis_size, constrain, platform
from l2d_jax.errors import require
from l2d_jax.model.axes import ADAPTED, LAYER_AXES, MATRICES
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.few_rows import can_read
from l2d_jax.model.layers import Lora
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import merge_adapter
from l2d_jax.model.quantization import QuantizedWeight, as_bits


@nnx.dataclass
class Model(nnx.Module):
    """The frozen LM and the path, with the table of vocabulary vectors V_y, which depends on the path's weights.

    Without the table, a velocity that is an expectation is not possible.
    """

    llm: LLM = nnx.data()
    path: DiffusionPath | None = nnx.data()  # None: the LM alone, for a budget of 1
    table: Float[Array, "V C"] | None = nnx.data()
    # Only in a merged model: the path with separate low-rank updates, if LM and path share matrices in a joint pass.
    updating: DiffusionPath | None = nnx.data(default=None)

    @classmethod
    def build(cls, llm: LLM, path: DiffusionPath | None) -> "Model":
        """Build the model and compute the table of vocabulary vectors, once for these weights."""
        table = None if path is None else _embed(path, llm.embed)
        return cls(llm=dataclasses.replace(llm, layers=as_bits(llm.layers)), path=path, table=table)

    def vectors(self, tokens: Int[Array, "GB M"]) -> Float[Array, "GB M C"]:
        """The vectors V_y of tokens; without a table, they are computed from the embeddings of these tokens."""
        if self.table is not None:
            return self.table[tokens]
        assert self.path is not None
        return self.path.embed(self.llm.rows(tokens))

    def reading(self, *, refines: bool) -> "Model":
        """The model with the LM that reads the context for the path; without refinement (budget 1) the plain LM."""
        if self.path is None or not refines:
            return self
        return dataclasses.replace(self, llm=self.path.reader(self.llm))

    def can_merge(self, memory: int | None) -> bool:
        """Whether `memory` bytes (None: unknown) can hold the copies that `merged` makes, next to caches and logits."""
        models = 3 if axis_size("stationary") == 1 else 4  # there `apart` copies the LM as well
        return self._fits(models, memory) and not isinstance(self.llm.layers.q, QuantizedWeight)

    def _fits(self, models: int, memory: int | None) -> bool:
        return memory is None or models * tree_bytes(self) < memory

    def merged(self, memory: int | None = None) -> "Model":
        """A copy for fast decoding, with low-rank updates merged into the weights and rounded to the weights' dtype.

        On CPUs, `few_rows` reads float32 weights. Returns the model itself if a copy does not fit into `memory` bytes.
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
        model = dataclasses.replace(self, llm=llm, path=path, updating=updating)
        return model.apart() if self.gains_apart(memory) else model

    @property
    def readings(self) -> float:
        """What a joint pass reads, in units of the LM's layers; the path's layers count if they are separate."""
        if self.path is None or self.path.config.reader != "lm":
            return 1.0
        path = self.path if self.updating is None else self.updating
        layers = [getattr(path.layers, name) for name in ADAPTED]
        return 1.0 + tree_bytes(layers) / tree_bytes([getattr(self.llm.layers, name) for name in ADAPTED])

    def gains_apart(self, memory: int | None) -> bool:
        """Whether a merged copy of this model decodes faster `apart`, and fits into `memory` bytes (None: unknown).

        Where weights are stationary, XLA prefetches the next matrices into a TPU's on-chip memory. It does not prefetch
        slices of a stack, and 16 sequences take twice as long (compiled for TPU v5e). On GPUs XLA copies a slice of a
        stack before a product reads it: Llama 1B decodes 1.7 times as fast without (H200).
        """
        return axis_size("stationary") > 1 or (platform() == "gpu" and self._fits(4, memory))

    def apart(self) -> "Model":
        """The model with one array per layer for each matrix."""
        llm, path, updating = dataclasses.replace(self.llm, layers=_split(self.llm.layers)), self.path, self.updating
        if path is not None and path.adapter is None:
            path = dataclasses.replace(path, layers=_split(path.layers))
        if updating is not None and platform() == "gpu":  # XLA copies slices of these, too
            updating = dataclasses.replace(updating, layers=_split_updates(updating.layers))
        return dataclasses.replace(self, llm=llm, path=path, updating=updating)


def small_updates(path: DiffusionPath, llm: LLM) -> DiffusionPath | None:
    """The path with its updates in the dtype of the LM's products; None if they exceed half of the LM's."""
    updates = {name: getattr(path.layers, name) for name in ADAPTED}
    cast = jax.tree.map(lambda array: array.astype(llm.product_dtype), updates)
    if 2 * tree_bytes(cast) > tree_bytes([getattr(llm.layers, name) for name in ADAPTED]):
        return None
    return dataclasses.replace(path, layers=dataclasses.replace(path.layers, **cast))


def _split(layers: Any) -> Any:
    stacks = {name: stack for name in MATRICES if (stack := getattr(layers, name, None)) is not None}
    return dataclasses.replace(layers, **{name: _unstack(stack, name=name) for name, stack in stacks.items()})


def _split_updates(layers: Any) -> Any:
    def split(name: str) -> list[Lora]:
        update = getattr(layers, name)
        factors = zip(_unstack(update.a, name=f"{name}.a"), _unstack(update.b, name=f"{name}.b"), strict=True)
        return [Lora(a=a, b=b) for a, b in factors]

    return dataclasses.replace(layers, **{name: split(name) for name in ADAPTED})


@partial(jax.jit, static_argnames="name")
def _unstack(stack: Array, *, name: str) -> list[Array]:
    return [constrain(matrix, *LAYER_AXES[name]) for matrix in stack]


_embed = jax.jit(DiffusionPath.embed)  # jitted once here: new weights of the same shapes do not compile again


def check_labels(path: PathConfig | None, labels: Iterable[int]) -> None:
    """Raise `InputError` for a class label with which a path of this config was not trained."""
    classes = 0 if path is None else path.classes
    known = f"0 to {classes - 1}" if classes else "none: it was trained without classes"
    for label in labels:
        require(0 <= label < classes, f"class label {label} is unknown to this path: it knows {known}")
