"""Writes a model folder in the formats of other projects.

* `l2d`: the state dict of the authors' release, `l2d.safetensors`, with its hyper-parameters, `l2d.json`;
* `l2d-full`: the same with every LoRA layer of the path as a full weight, under the names of the release's full path;
* `hf`: the language model alone, as `transformers` loads it;
* `peft`: the language model's own LoRA adapter, as PEFT loads it.

Tensors keep their bits, except those that a format has to compute: W + (alpha / r) A B of `l2d-full`, in float32, and
an adapted weight of the language model, in the type of the base.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from l2d_jax import adapter, models, release, weights
from l2d_jax.architecture import SUPPORTED, Architecture
from l2d_jax.config import PathConfig
from l2d_jax.errors import InputError
from l2d_jax.files import output_folder, read_json
from l2d_jax.llm import LLM
from l2d_jax.safetensors_file import write_safetensors
from l2d_jax.sources import locate
from l2d_jax.weights import TensorSource

# What lies beside the weights and belongs to the language model; never code, never pickles.
KEPT = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
REPLACED = ("model.safetensors.index.json", "path.json", adapter.CONFIG)


@dataclass(frozen=True)
class Parts:
    """What a model folder holds, checked; its weights are read when they are needed."""

    name: str  # as the user gave it
    folder: Path  # of the language model
    architecture: Architecture
    llm: TensorSource
    path: tuple[PathConfig, TensorSource] | None

    @classmethod
    def open(cls, name: str) -> "Parts":
        """Find all parts of a model folder or of a workdir's export; raises `InputError` for what does not fit."""
        given = locate(name)
        if (given / "checkpoints").is_dir():
            given = given / "export"
            if not given.is_dir():
                raise InputError(f"{name} has no export yet: finish the training by the same command again")
        folder = given
        if not (given / "config.json").exists() and (given / "path.json").exists():
            folder = locate(models.base_name(given))
        architecture = Architecture.from_hf(read_json(folder / "config.json"))
        path = models.find_path(given, architecture) if (given / "path.json").exists() else None
        return cls(name, folder, architecture, models.open_weights(folder, architecture), path)

    def require_path(self) -> tuple[PathConfig, TensorSource]:
        """The path; raises `InputError` if there is none."""
        if self.path is None:
            raise InputError(f"{self.name} has no diffusion path: export it with --format hf")
        return self.path


def export(model: str, out: Path, *, format: str, as_torch: bool = False) -> None:
    """Write a model in one of `FORMATS`, complete or not at all.

    Args:
      model: a model folder or a workdir that has finished.
      out: a new or empty folder.
      format: a key of `FORMATS`.
      as_torch: write a state dict as `pytorch_model.bin`, which the release's own programs read.

    Raises:
      InputError: for anything that is missing, malformed or does not fit, and for a part that the model has not.
    """
    if as_torch and not format.startswith("l2d"):
        raise InputError(f"--torch is about the release's state dict: leave it out with --format {format}")
    parts = Parts.open(model)
    with output_folder(out) as partial_folder:
        FORMATS[format](parts, partial_folder, "pytorch_model.bin" if as_torch else "l2d.safetensors")


def copy_texts(folder: Path, out: Path) -> None:
    """Copy config, tokenizer and chat template of a language model."""
    for pattern in KEPT:
        for file in folder.glob(pattern):
            if file.name not in REPLACED:
                shutil.copyfile(file, out / file.name)


def write_llm(llm: TensorSource, architecture: Architecture, out: Path) -> None:
    """Write the language model's weights, each in the type it has there."""

    def tensor(name: str) -> np.ndarray:
        return llm.read(name).astype(llm.dtype(name))

    names = weights.expected(LLM.declare(architecture, dtype=np.float32), weights.LLM_ROWS)
    write_safetensors(out, ((name, partial(tensor, name)) for name in names))


def _release(parts: Parts, out: Path, file: str) -> None:
    config, path = parts.require_path()
    _write_release(parts, out / file, dict(release.named(path, path.names())), config)


def _full_release(parts: Parts, out: Path, file: str) -> None:
    config, path = parts.require_path()
    if config.layers == "dense":
        raise InputError(f"the path of {parts.name} has full weights already: export it with --format l2d")
    trained = release.merge(parts.llm, path, parts.architecture, config)
    _write_release(parts, out / file, trained, replace(config, layers="dense"))


def _write_release(parts: Parts, file: Path, trained: dict[str, release.Tensor], config: PathConfig) -> None:
    release.write_checkpoint(file, release.state_dict(parts.llm, trained, parts.architecture, config))
    family = {bias: name.removesuffix("ForCausalLM").lower() for name, bias in SUPPORTED.items()}
    options = {"family": family[parts.architecture.qkv_bias], "l2d_kwargs": release.options(config)}
    (file.parent / "l2d.json").write_text(json.dumps(options, indent=2) + "\n")


def _hugging_face(parts: Parts, out: Path, file: str) -> None:
    del file
    copy_texts(parts.folder, out)
    write_llm(parts.llm, parts.architecture, out)


def _peft(parts: Parts, out: Path, file: str) -> None:
    del file
    if not isinstance(parts.llm, adapter.Adapted):
        raise InputError(
            f"the language model of {parts.name} has no LoRA adapter of its own: export it with another format"
        )
    base = read_json(parts.folder / adapter.CONFIG).get("base_model_name_or_path") or str(parts.folder)
    adapter.write_adapter(out, parts.llm.adapter, base=base)


FORMATS: dict[str, Callable[[Parts, Path, str], None]] = {
    "l2d": _release,
    "l2d-full": _full_release,
    "hf": _hugging_face,
    "peft": _peft,
}
