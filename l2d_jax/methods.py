"""What differs between the methods of training: what is trained, its loss, its validation, and what it leaves.

`l2d` trains a diffusion path and `lora` low-rank updates of the language model's layers, both beside frozen weights;
`full` trains the language model itself, float32 weights whose products are of `config.model.dtype`.
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from l2d_jax import export, finetuning, models, objective, times
from l2d_jax.architecture import Architecture
from l2d_jax.config import Config
from l2d_jax.diffusion_path import DiffusionPath
from l2d_jax.llm import LLM
from l2d_jax.llm_adapter import LLMAdapter
from l2d_jax.objective import Batch
from l2d_jax.refine import Model
from l2d_jax.sharding import initialize
from l2d_jax.step import REMAT, Objective, Seen
from l2d_jax.validate import validate


@dataclass(frozen=True)
class Method:
    """One method, as functions of the config and of the two trees of its training: trained and frozen weights."""

    part: str  # of a checkpoint: what is trained
    says: str  # the same, in words
    declare: Callable[[Config, Architecture], Any]  # the trained tree
    declare_frozen: Callable[[Config, Architecture], LLM | None]
    begin: Callable[[Config, models.FoundBase, Mesh], tuple[Any, LLM | None]]  # both trees, with initial values
    loss: Callable[..., tuple[jax.Array, Seen]]  # an `Objective`, with a config and the options of a step
    model: Callable[..., Model]  # of a config and both trees: as training sees it
    open: Callable[[Config, models.FoundBase, Any, Mesh], Model]  # as its users do
    export: Callable[[Config, Path, Any, Mesh], None]  # into an existing folder, by all processes

    def objective(self, config: Config) -> Objective:
        """The loss of a micro-batch, for a step."""
        return partial(
            self.loss, config=config, reduction="sum", chunk=config.train.loss_chunk, remat=REMAT[config.train.remat]
        )

    def validate(
        self, config: Config, trained: Any, frozen: LLM | None, batches: Iterable[Batch], *, budgets: tuple[int, ...]
    ) -> dict[str, Any]:
        """The report of a validation; a model without a path has a budget of 1, whatever `budgets` are."""
        return validate(self.model(config, trained, frozen), batches, config, budgets=budgets)


def method_of(config: Config) -> Method:
    """The method of a config."""
    return METHODS[config.train.method]


# --- l2d ---


def _declare_path(config: Config, architecture: Architecture) -> DiffusionPath:
    return DiffusionPath.declare(config.path, architecture)


def _declare_frozen(config: Config, architecture: Architecture) -> LLM:
    return LLM.declare(architecture, dtype=config.model.dtype)


def _begin_path(config: Config, base: models.FoundBase, mesh: Mesh) -> tuple[DiffusionPath, LLM]:
    llm = _load(config, base, mesh)
    return models.new_path(config.path, llm, mesh, seed=config.train.seed), llm


def _load(config: Config, base: models.FoundBase, mesh: Mesh) -> LLM:
    return base.load(dtype=config.model.dtype, mesh=mesh, seed=config.train.seed)


def _path_loss(
    path: DiffusionPath, llm: LLM, batch: Batch, key: jax.Array, seen: Seen, *, config: Config, **options: Any
) -> tuple[jax.Array, Seen]:
    sigma, draws = path.config.sigma, config.train.draws_per_context
    chosen = times.choose(config.train, seen, sigma=sigma)
    value, terms = objective.loss(path, llm, batch, key, draws_per_context=draws, times=chosen, **options)
    return value, None if seen is None else times.observe(*terms, sigma=sigma)


def _path_model(config: Config, path: DiffusionPath, llm: LLM) -> Model:
    del config
    return Model.build(llm, path)


def _open_path(config: Config, base: models.FoundBase, path: DiffusionPath, mesh: Mesh) -> Model:
    return Model.build(_load(config, base, mesh), path)


def _export_path(config: Config, folder: Path, path: DiffusionPath, mesh: Mesh) -> None:
    del mesh
    models.save_path(folder, path, base=config.model.name)


# --- lora ---


def _declare_adapter(config: Config, architecture: Architecture) -> LLMAdapter:
    return LLMAdapter.declare(config.lora, LLM.declare(architecture, dtype="float32").layers)


def _begin_adapter(config: Config, base: models.FoundBase, mesh: Mesh) -> tuple[LLMAdapter, LLM]:
    key = jax.random.key(config.train.seed)
    return initialize(_declare_adapter(config, base.architecture), key, mesh), _load(config, base, mesh)


def _adapter_loss(
    adapter: LLMAdapter, llm: LLM, batch: Batch, key: jax.Array, seen: None, *, config: Config, **options: Any
) -> tuple[jax.Array, None]:
    del key, seen
    return finetuning.loss(_adapter_model(config, adapter, llm).llm, batch, **options), None


def _adapter_model(config: Config, adapter: LLMAdapter, llm: LLM) -> Model:
    del config
    return Model.build(dataclasses.replace(llm, adapter=adapter), None)


def _open_adapter(config: Config, base: models.FoundBase, adapter: LLMAdapter, mesh: Mesh) -> Model:
    llm = base.load(dtype=config.model.dtype, mesh=mesh, seed=config.train.seed, adapter=adapter)
    return Model.build(llm, None)


def _export_adapter(config: Config, folder: Path, adapter: LLMAdapter, mesh: Mesh) -> None:
    del mesh
    export.save_adapter(folder, adapter, base=config.model.name)


# --- full ---


def _declare_weights(config: Config, architecture: Architecture) -> LLM:
    del config
    return LLM.declare(architecture, dtype="float32")


def _declare_nothing(config: Config, architecture: Architecture) -> None:
    del config, architecture


def _begin_weights(config: Config, base: models.FoundBase, mesh: Mesh) -> tuple[LLM, None]:
    return base.load(dtype="float32", mesh=mesh, seed=config.train.seed), None


def _weights_loss(
    weights: LLM, frozen: None, batch: Batch, key: jax.Array, seen: None, *, config: Config, **options: Any
) -> tuple[jax.Array, None]:
    del key, seen
    llm = _weights_model(config, weights, frozen).llm
    return finetuning.loss(llm, batch, losses=finetuning.target_losses_of_all, **options), None


def _weights_model(config: Config, weights: LLM, frozen: None) -> Model:
    del frozen
    return Model.build(dataclasses.replace(weights, products=config.model.dtype), None)


def _open_weights(config: Config, base: models.FoundBase, weights: LLM, mesh: Mesh) -> Model:
    del base
    return Model.build(models.bring(weights, dtype=config.model.dtype, mesh=mesh), None)


def _export_weights(config: Config, folder: Path, weights: LLM, mesh: Mesh) -> None:
    export.save_llm(folder, weights, config.model, mesh=mesh)


METHODS = {
    "l2d": Method(
        part="path",
        says="path",
        declare=_declare_path,
        declare_frozen=_declare_frozen,
        begin=_begin_path,
        loss=_path_loss,
        model=_path_model,
        open=_open_path,
        export=_export_path,
    ),
    "lora": Method(
        part="adapter",
        says="low-rank updates",
        declare=_declare_adapter,
        declare_frozen=_declare_frozen,
        begin=_begin_adapter,
        loss=_adapter_loss,
        model=_adapter_model,
        open=_open_adapter,
        export=_export_adapter,
    ),
    "full": Method(
        part="weights",
        says="language model",
        declare=_declare_weights,
        declare_frozen=_declare_nothing,
        begin=_begin_weights,
        loss=_weights_loss,
        model=_weights_model,
        open=_open_weights,
        export=_export_weights,
    ),
}
