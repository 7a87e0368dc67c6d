"""Opens what training or a conversion has written, ready to generate."""

import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax import models, runtime, sharding
from l2d_jax.checkpoint import Checkpoints
from l2d_jax.config import Config, DecodeConfig, MeshConfig, ModelConfig, PathConfig
from l2d_jax.diffusion_path import DiffusionPath
from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.options import from_dict
from l2d_jax.refine import Model


class Loaded(NamedTuple):
    """A model that is ready to generate."""

    model: Model
    tokenizer: PreTrainedTokenizerFast | None
    ends: tuple[int, ...]  # tokens that end an answer
    defaults: DecodeConfig  # how it was validated while it was trained
    step: int | None = None  # of the checkpoint; None: it was not read from one


class Folder(NamedTuple):
    """What a folder says of its model, before any weight is read."""

    path: Path
    base: ModelConfig
    seed: int  # of a random base
    defaults: DecodeConfig
    path_config: PathConfig | None  # None: the LM alone
    is_workdir: bool  # the path is in its checkpoints


def find(folder: str | os.PathLike[str], *, dtype: str | None = None) -> Folder:
    """Read what a folder is, with the arguments and errors of `load`."""
    path = Path(folder)
    if (path / "checkpoints").is_dir():
        config = Config.from_dict(read_json(path / "config.json"))
        return Folder(path, _base(vars(config.model), dtype), config.train.seed, config.decode, config.path, True)
    if (path / "path.json").exists():
        name = str(folder) if (path / "config.json").exists() else models.base_name(path)
        return Folder(path, _base({"name": name}, dtype), 0, DecodeConfig(), models.path_config(path), False)
    return Folder(path, _base({"name": str(folder)}, dtype), 0, DecodeConfig(budget=1, solver="euler"), None, False)


def load(folder: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: str | None = None) -> Loaded:
    """Open a workdir of training, a model folder, or a plain Hugging Face folder (which knows a budget of 1 alone).

    Args:
      folder: where the model is; a hub id or GGUF file is a plain model.
      mesh: the devices to use; None: all.
      dtype: "float32" or "bfloat16", of weights and products; None: as it was trained, bfloat16 for plain models.

    Raises:
      InputError: for anything that is missing, malformed or does not fit.
    """
    found = find(folder, dtype=dtype)
    mesh = runtime.start(MeshConfig()) if mesh is None else mesh
    base = models.open_base(found.base, mesh, seed=found.seed)
    path, step = None, None
    if found.is_workdir and found.path_config is not None:
        path, step = _newest_path(found.path / "checkpoints", found.path_config, base, mesh)
    elif found.path_config is not None:
        path = models.load_path(found.path, base.llm.architecture, mesh)
    return Loaded(Model.build(base.llm, path), base.tokenizer, base.ends, found.defaults, step)


def _base(options: dict[str, Any], dtype: str | None) -> ModelConfig:
    """The base's config, with the type that was asked for."""
    changes = {} if dtype is None else {"dtype": dtype}
    config: ModelConfig = from_dict(ModelConfig, {**options, **changes}, prefix="model")
    return config


def _newest_path(folder: Path, config: PathConfig, base: models.Base, mesh: Mesh) -> tuple[DiffusionPath, int]:
    checkpoints = Checkpoints(folder)
    step = checkpoints.latest()
    if step is None:
        raise InputError(f"{folder} holds no good checkpoint: train it first")
    declared = DiffusionPath.declare(config, base.llm.architecture)
    path: DiffusionPath = checkpoints.restore(step, {"path": sharding.abstract(declared, mesh)})["path"]
    checkpoints.close()
    return path, step
