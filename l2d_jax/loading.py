"""Opens what training or a conversion has written, as a model that is ready to generate."""

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any, NamedTuple

from jax.sharding import Mesh

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, DecodeConfig, MeshConfig, ModelConfig, PathConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.distributed import processes, runtime, sharding
from l2d_jax.distributed.memory import require_memory, tree_bytes
from l2d_jax.errors import about, require
from l2d_jax.files import AnyPath, read_json
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.storage import mirror
from l2d_jax.training import manifest, workdir
from l2d_jax.training.methods import Method, method_of
from l2d_jax.weights import base_model, hub, locate, model_folder
from l2d_jax.weights.publish import TorchFolder, is_published

WITHOUT_PATH: dict[str, Any] = {"budget": 1, "solver": "euler"}  # how a language model without a path decodes


class Folder(NamedTuple):
    """What a folder says about its model, before any weight is read."""

    path: Path
    base: ModelConfig
    defaults: DecodeConfig
    path_config: PathConfig | None  # None: the language model alone
    trained: Config | None  # the run of a workdir, whose checkpoints hold what it trained; None: it is no workdir
    has_other_texts: bool = False  # whether the caller chose another tokenizer or chat template than that of training

    @property
    def base_name(self) -> str:
        """The base's name: of a workdir as its config has it, whatever folder it is opened from."""
        return self.base.name if self.trained is None else self.trained.model.name

    def find_base(self) -> base_model.BaseFiles:
        """Find and check the files of the base; raises `InputError`, which names a workdir."""
        with contextlib.nullcontext() if self.trained is None else about(self.path):
            return base_model.find_base(self.base)


def find(
    folder: AnyPath, *, dtype: str | None = None, tokenizer: str | None = None, chat_template: str | None = None
) -> Folder:
    """Find out what kind of model a folder holds; takes the arguments of `load` and raises the same errors."""
    found = _find(folder, dtype=dtype)
    if tokenizer is None and chat_template is None:
        return found
    base = dataclasses.replace(found.base, tokenizer=tokenizer or found.base.tokenizer, chat_template=chat_template)
    return found._replace(base=base, has_other_texts=True)


def _find(folder: AnyPath, *, dtype: str | None) -> Folder:
    name = os.fspath(folder)
    if hub.is_on_hub(name):
        path = locate.locate(name, files=hub.TEXT_FILES)
        path = locate.locate(name) if has_path(path) else path
    else:
        path = mirror.open_folder(folder)
        name = name if path == Path(folder) else str(path)
    if (path / "checkpoints").is_dir():
        config = workdir.recorded_config(path)
        config = dataclasses.replace(config, model=_base(vars(config.model), dtype))
        base = base_model.recorded_base(path, config.model)
        if config.train.method == "l2d":
            return Folder(path, base, config.decode, config.path, config)
        return Folder(path, base, dataclasses.replace(config.decode, **WITHOUT_PATH), None, config)
    if is_published(path):
        published, options = TorchFolder.open(path), {"tokenizer": model_folder.replaced_tokenizer(path)}
        base = _base({"name": published.base, **options}, dtype)
        return Folder(path, base, DecodeConfig(), published.config, None)
    if has_path(path):
        name = name if model_folder.holds_base(path) else model_folder.base_name(path)
        base = _base({"name": name, "tokenizer": model_folder.replaced_tokenizer(path)}, dtype)
        return Folder(path, base, DecodeConfig(), model_folder.read_path_config(path), None)
    return Folder(path, _base({"name": name}, dtype), DecodeConfig(**WITHOUT_PATH), None, None)


def has_path(folder: Path) -> bool:
    """Whether a folder has a diffusion path, with its language model or without."""
    return (folder / "path.json").exists() or is_published(folder)


def load(
    folder: AnyPath,
    *,
    mesh: Mesh | None = None,
    dtype: str | None = None,
    step: int | None = None,
    rows: int = 1,
    tokenizer: str | None = None,
    chat_template: str | None = None,
) -> LoadedModel:
    """Open a workdir of training, a model folder, or a language model without a path.

        model = l2d_jax.load("runs/quickstart")  # a workdir
        model = l2d_jax.load("HuggingFaceTB/SmolLM2-135M-Instruct")  # a plain language model

    Args:
      folder: a workdir or a model folder, local or in a bucket (`gs://`); the hub id of a published path; or a plain
        language model, which decodes with a budget of 1: a Hugging Face folder, a hub id, a GGUF file, or a folder with
        a LoRA adapter.
      mesh: the devices to use; None: all devices, divided for decoding `rows` sequences.
      dtype: type of weights and products, "float32", "bfloat16" or "int8"; None: the type used in training, or bfloat16
        for a plain language model.
      step: the checkpoint of a workdir to open; None: the newest one that is complete.
      rows: number of sequences that are decoded at a time.
      tokenizer: folder or hub id of another tokenizer; None: the tokenizer of the model.
      chat_template: a .jinja file, or a folder or hub id with another chat template; None: that of the tokenizer.

    Returns:
      The model with its tokenizer, ready for `generate`, `stream`, `score` and `trace`.

    Raises:
      InputError: if a file is missing or malformed, if files do not fit each other, or if the weights exceed the
        memory of the devices.
    """
    found = find(folder, dtype=dtype, tokenizer=tokenizer, chat_template=chat_template)
    if mesh is None:
        runtime.start_jax(MeshConfig())
    base = processes.take_turns(found.find_base)
    if mesh is None:
        weights = tree_bytes(LLM.declare(base.architecture, dtype=found.base.dtype))
        require_memory({"weights": weights}, "the type to int8, or take a smaller model")
        mesh = runtime.start_decoding(MeshConfig(), rows=rows, kv_heads=base.architecture.num_key_value_heads)
    processes.decide(lambda: check_base(found, base))
    if found.trained is not None:
        step, method = newest_step(found) if step is None else step, method_of(found.trained)
        assert step is not None
        model = method.open(base, _restore(found, method, step, base, mesh), mesh)
    else:
        llm = base.load(dtype=found.base.dtype, mesh=mesh)
        path = None if found.path_config is None else model_folder.load_path(found.path, base.architecture, mesh)
        model = Model.build(llm, path)
    return LoadedModel(model, base.tokenizer, base.stop_ids, found.defaults, step)


def restore_path(folder: Folder, base: base_model.BaseFiles, mesh: Mesh) -> tuple[DiffusionPath, int | None]:
    """Read the path of a folder whose base `check_base` has accepted; of a workdir also the step of its checkpoint.

    Raises `InputError` as `load` does.
    """
    if folder.trained is None:
        return model_folder.load_path(folder.path, base.architecture, mesh), None
    step, method = newest_step(folder), method_of(folder.trained)
    assert step is not None
    return _restore(folder, method, step, base, mesh), step


def _restore(folder: Folder, method: Method, step: int, base: base_model.BaseFiles, mesh: Mesh) -> Any:
    """What a workdir has trained, from its checkpoint at `step`."""
    declared = sharding.abstract(method.declare(base.architecture), mesh)
    with _open_checkpoints(folder) as checkpoints:
        return checkpoints.restore(step, {method.part: declared})[method.part]


def check_base(folder: Folder, base: base_model.BaseFiles) -> None:
    """Raise `InputError` if a base is not the one that was trained on, or if a path has changed since its export."""
    record = folder.path / base_model.BASE
    ignored = {"tokenizer"} if folder.has_other_texts else set()
    if folder.trained is None and folder.path_config is not None:
        model_folder.check_trained_path(folder.path, base, ignored=ignored)
    elif folder.trained is not None and record.exists():
        base.require_same(read_json(record).get("base_fingerprint"), file=record, ignored=ignored)


def model_fingerprint(folder: Folder, base: base_model.BaseFiles, step: int | None) -> dict[str, str]:
    """What the answers of a model depend on: its base, and what was trained, of a workdir at `step`."""
    trained = {}
    if step is not None:
        trained = {"trained weights": manifest.fingerprint(mirror.place(folder.path / "checkpoints"), step)}
    elif folder.path_config is not None:
        trained = {"trained weights": model_folder.check_trained_path(folder.path)}
    return base.fingerprint | trained


def _base(options: dict[str, Any], dtype: str | None) -> ModelConfig:
    return from_dict(ModelConfig, options if dtype is None else {**options, "dtype": dtype}, prefix="model")


def newest_step(folder: Folder) -> int | None:
    """A workdir's newest good checkpoint, once JAX has started; None for other folders; `InputError` if it has none."""
    if folder.trained is None:
        return None
    with _open_checkpoints(folder) as checkpoints:
        step = checkpoints.latest()
    require(step is not None, f"{folder.path / 'checkpoints'} holds no good checkpoint: train it first")
    return step


def _open_checkpoints(folder: Folder) -> Any:
    from l2d_jax.training.checkpoint import Checkpoints  # here: only workdirs need orbax

    return contextlib.closing(Checkpoints(folder.path / "checkpoints"))
