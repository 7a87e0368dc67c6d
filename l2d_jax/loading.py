"""Opens what training or a conversion has written, ready to generate."""

import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, DecodeConfig, MeshConfig, ModelConfig, PathConfig
from l2d_jax.decoding.generation import Loaded
from l2d_jax.distributed import runtime, sharding
from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.model.l2d import Model
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.methods import method_of
from l2d_jax.weights import model_folder

PLAIN: dict[str, Any] = {"budget": 1, "solver": "euler"}  # of a language model without a path


class Folder(NamedTuple):
    """What a folder says of its model, before any weight is read."""

    path: Path
    base: ModelConfig
    defaults: DecodeConfig
    path_config: PathConfig | None  # None: the LM alone
    trained: Config | None  # of a workdir, in whose checkpoints there is what was trained; None: it is no workdir

    @property
    def base_name(self) -> str:
        """The base's name: of a workdir as its config has it, whatever folder it is opened from."""
        return self.base.name if self.trained is None else self.trained.model.name


def find(folder: str | os.PathLike[str], *, dtype: str | None = None) -> Folder:
    """Read what a folder is, with the arguments and errors of `load`."""
    path = Path(folder)
    if (path / "checkpoints").is_dir():
        config = Config.from_dict(read_json(path / "config.json"))
        config = dataclasses.replace(config, model=_base(vars(config.model), dtype))
        base = model_folder.recorded_base(path, config.model)
        if config.train.method == "l2d":
            return Folder(path, base, config.decode, config.path, config)
        return Folder(path, base, dataclasses.replace(config.decode, **PLAIN), None, config)
    if (path / "path.json").exists():
        name = str(folder) if (path / "config.json").exists() else model_folder.base_name(path)
        return Folder(path, _base({"name": name}, dtype), DecodeConfig(), model_folder.read_path_config(path), None)
    return Folder(path, _base({"name": str(folder)}, dtype), DecodeConfig(**PLAIN), None, None)


def load(
    folder: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: str | None = None, step: int | None = None
) -> Loaded:
    """Open a workdir of training, a model folder, or a plain language model (which knows a budget of 1 alone).

    Args:
      folder: where the model is; a hub id, a GGUF file or a folder with a LoRA adapter is a plain model.
      mesh: the devices to use; None: all.
      dtype: "float32" or "bfloat16", of weights and products; None: as it was trained, bfloat16 for plain models.
      step: the checkpoint of a workdir, which `newest_step` has found good; None: the newest good one.

    Raises:
      InputError: for anything that is missing, malformed or does not fit.
    """
    found = find(folder, dtype=dtype)
    mesh = runtime.start_jax(MeshConfig()) if mesh is None else mesh
    base = model_folder.find_base(found.base)
    if found.trained is not None:
        step = newest_step(found) if step is None else step
        trained = _restore(found, found.trained, base, mesh, step=step)
        model = method_of(found.trained).open(base, trained, mesh)
    else:
        llm = base.load(dtype=found.base.dtype, mesh=mesh)
        path = None if found.path_config is None else model_folder.load_path(found.path, base.architecture, mesh)
        model = Model.build(llm, path)
    return Loaded(model, base.tokenizer, base.ends, found.defaults, step)


def _base(options: dict[str, Any], dtype: str | None) -> ModelConfig:
    """The base's config, with the type that was asked for."""
    changes = {} if dtype is None else {"dtype": dtype}
    config: ModelConfig = from_dict(ModelConfig, {**options, **changes}, prefix="model")
    return config


def newest_step(found: Folder) -> int | None:
    """The newest good checkpoint of a workdir, whose files are read, once JAX has started; None for another folder.

    Raises `InputError` for a workdir without a good checkpoint.
    """
    if found.trained is None:
        return None
    checkpoints = Checkpoints(found.path / "checkpoints")
    step = checkpoints.latest()
    checkpoints.close()
    if step is None:
        raise InputError(f"{found.path / 'checkpoints'} holds no good checkpoint: train it first")
    return step


def _restore(found: Folder, config: Config, base: model_folder.BaseFiles, mesh: Mesh, *, step: int | None) -> Any:
    assert step is not None
    checkpoints, method = Checkpoints(found.path / "checkpoints"), method_of(config)
    declared = sharding.abstract(method.declare(base.architecture), mesh)
    trained = checkpoints.restore(step, {method.part: declared})[method.part]
    checkpoints.close()
    return trained
