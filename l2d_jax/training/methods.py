"""The training methods (`config.train.method`). Each says which weights it trains, with which loss, and how to export.

To add a method, subclass `Method` and add it to `METHODS`.
"""

import abc
import dataclasses
from pathlib import Path
from typing import Any, ClassVar

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.data.batch import Batch
from l2d_jax.distributed.sharding import initialize
from l2d_jax.files import Fingerprint
from l2d_jax.model import lm_head
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.model.quantization import as_bits
from l2d_jax.training.objective import TIMES, LossOptions, diffusion_loss, finetuning_loss
from l2d_jax.training.step import REMAT
from l2d_jax.weights import base_model, export, model_folder


@dataclasses.dataclass(frozen=True)
class Method(abc.ABC):
    """A training method. Its weights are two pytrees: trained and frozen."""

    config: Config
    part: ClassVar[str]  # name of the trained tree in a checkpoint
    says: ClassVar[str]  # name of the trained tree in messages

    @abc.abstractmethod
    def declare(self, architecture: Architecture) -> Any:
        """Declare the trained tree (shapes without values)."""

    def declare_frozen(self, architecture: Architecture) -> LLM | None:
        """Declare the frozen tree (shapes without values); None if everything is trained."""
        return LLM.declare(architecture, dtype=self.config.model.dtype)

    @abc.abstractmethod
    def begin(self, base: base_model.BaseFiles, mesh: Mesh) -> tuple[Any, LLM | None]:
        """The trained and the frozen tree with initial values."""

    @abc.abstractmethod
    def loss(self, trained: Any, frozen: LLM | None, batch: Batch, key: jax.Array) -> jax.Array:
        """The loss of a micro-batch; an `Objective` for `step.make_step`."""

    @abc.abstractmethod
    def model(self, trained: Any, frozen: LLM | None) -> Model:
        """Both trees as one model, with the dtypes of training."""

    def open(self, base: base_model.BaseFiles, trained: Any, mesh: Mesh) -> Model:
        """The trained model, ready to use."""
        return self.model(trained, self.load(base, mesh))

    @abc.abstractmethod
    def export(self, folder: Path, trained: Any, mesh: Mesh, *, base_fingerprint: Fingerprint) -> None:
        """Write the trained tree, and which base it belongs to, into an existing folder; all processes call this."""

    @property
    def loss_options(self) -> LossOptions:
        """How a step computes the loss; the weights of its batch already contain the config's reduction."""
        train = self.config.train
        return LossOptions("sum", chunk=train.loss_chunk, remat=REMAT[train.remat])

    def load(self, base: base_model.BaseFiles, mesh: Mesh, *, adapter: LLMAdapter | None = None) -> LLM:
        """Load the language model in the config's dtype, with `adapter` attached."""
        llm = base.load(dtype=self.config.model.dtype, mesh=mesh, seed=self.config.train.seed, adapter=adapter)
        return dataclasses.replace(llm, layers=as_bits(llm.layers))


class L2D(Method):
    """Trains a diffusion path; the language model is frozen."""

    part = "path"
    says = "path"

    def declare(self, architecture: Architecture) -> DiffusionPath:
        return DiffusionPath.declare(self.config.path, architecture)

    def begin(self, base: base_model.BaseFiles, mesh: Mesh) -> tuple[DiffusionPath, LLM]:
        llm = self.load(base, mesh)
        return model_folder.new_path(self.config.path, llm, mesh, seed=self.config.train.seed), llm

    def loss(self, trained: DiffusionPath, frozen: LLM | None, batch: Batch, key: jax.Array) -> jax.Array:
        assert frozen is not None
        train = self.config.train
        return diffusion_loss(
            trained,
            frozen,
            batch,
            key,
            draws_per_context=train.draws_per_context,
            own_estimates=train.own_estimates,
            times=TIMES[train.time_density],
            options=self.loss_options,
        )[0]

    def model(self, trained: DiffusionPath, frozen: LLM | None) -> Model:
        assert frozen is not None
        return Model.build(frozen, trained)

    def export(self, folder: Path, trained: DiffusionPath, mesh: Mesh, *, base_fingerprint: Fingerprint) -> None:
        model_folder.save_path(folder, trained, base=self.config.model.name, base_fingerprint=base_fingerprint)


class LoRA(Method):
    """Trains low-rank updates of the language model's layers; its weights are frozen."""

    part = "adapter"
    says = "low-rank updates"

    def declare(self, architecture: Architecture) -> LLMAdapter:
        return LLMAdapter.declare(self.config.lora, architecture)

    def begin(self, base: base_model.BaseFiles, mesh: Mesh) -> tuple[LLMAdapter, LLM]:
        key = jax.random.key(self.config.train.seed)
        return initialize(self.declare(base.architecture), key, mesh), self.load(base, mesh)

    def loss(self, trained: LLMAdapter, frozen: LLM | None, batch: Batch, key: jax.Array) -> jax.Array:
        return finetuning_loss(self.model(trained, frozen).llm, batch, options=self.loss_options)

    def model(self, trained: LLMAdapter, frozen: LLM | None) -> Model:
        assert frozen is not None
        return Model.build(dataclasses.replace(frozen, adapter=trained), None)

    def open(self, base: base_model.BaseFiles, trained: LLMAdapter, mesh: Mesh) -> Model:
        return Model.build(self.load(base, mesh, adapter=trained), None)

    def export(self, folder: Path, trained: LLMAdapter, mesh: Mesh, *, base_fingerprint: Fingerprint) -> None:
        export.save_adapter(folder, trained, base=self.config.model.name, base_fingerprint=base_fingerprint)


class Full(Method):
    """Trains all weights of the language model, in float32, with matrix products in `config.model.dtype`."""

    part = "weights"
    says = "language model"

    def declare(self, architecture: Architecture) -> LLM:
        return LLM.declare(architecture, dtype="float32")

    def declare_frozen(self, architecture: Architecture) -> None:
        return None

    def begin(self, base: base_model.BaseFiles, mesh: Mesh) -> tuple[LLM, None]:
        return base.load(dtype="float32", mesh=mesh, seed=self.config.train.seed), None

    def loss(self, trained: LLM, frozen: LLM | None, batch: Batch, key: jax.Array) -> jax.Array:
        llm, losses = self.model(trained, frozen).llm, lm_head.target_losses_with_trained_head
        return finetuning_loss(llm, batch, losses=losses, options=self.loss_options)

    def model(self, trained: LLM, frozen: LLM | None) -> Model:
        return Model.build(dataclasses.replace(trained, products=self.config.model.dtype), None)

    def open(self, base: base_model.BaseFiles, trained: LLM, mesh: Mesh) -> Model:
        return Model.build(base_model.cast_llm(trained, dtype=self.config.model.dtype, mesh=mesh), None)

    def export(self, folder: Path, trained: LLM, mesh: Mesh, *, base_fingerprint: Fingerprint) -> None:
        del base_fingerprint  # the result is itself a base model
        export.save_llm(folder, trained, self.config.model, mesh=mesh)


METHODS: dict[str, type[Method]] = {"l2d": L2D, "lora": LoRA, "full": Full}


def method_of(config: Config) -> Method:
    """The training method of a config."""
    return METHODS[config.train.method](config)
