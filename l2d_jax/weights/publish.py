"""Published folders: a path as PyTorch loads it, by code of its own that lies beside it, and read back.

The code is `weights/pytorch`, which needs neither this package nor JAX. Tensors have the names of our leaves, with a
number for the layer, in PyTorch's layout [out, in].
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import PathConfig
from l2d_jax.data.tokenizer import stop_ids
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.weights import mapping
from l2d_jax.weights.hub import HUB
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors

CODE = Path(__file__).parent / "pytorch"
MODEL_TYPE = "l2d"


def is_published(folder: Path) -> bool:
    """Whether a folder holds a path as PyTorch loads it, and not a language model's files or ours."""
    file = folder / "config.json"
    return file.exists() and read_json(file).get("model_type") == MODEL_TYPE


def _torch_row(row: mapping.Row) -> mapping.Row:
    """The row of the same leaf in a published folder; of a low-rank update both matrices are [out, in], too."""
    ours, theirs = row.axes.split(" -> ")
    parts = re.findall(r"\([^)]*\)|\w+", theirs)
    theirs = " ".join(reversed(parts) if "rank" in parts else parts)
    return mapping.Row("path." + row.ours.replace("layers.", "layers.{}."), row.ours, f"{ours} -> {theirs}")


TORCH_ROWS = [_torch_row(row) for row in mapping.PATH_ROWS]


def write_torch_folder(
    folder: Path,
    path: DiffusionPath,
    architecture: Architecture,
    *,
    base: str,
    base_revision: str | None,
    base_config: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerFast | None,
) -> None:
    """Write a path, its config, its code and a tokenizer into an existing folder; raises `InputError`.

    All weights of the path are on this host. Its base, whose `config.json` and tokenizer (which also says what ends an
    answer) are given, is a hub id at a commit, or a folder by an absolute path or one relative to `folder`.
    """
    from l2d_jax.weights.pytorch.configuration_l2d import CODE as CLASSES  # here: transformers brings torch along

    if Architecture.from_hf(base_config) != architecture:
        raise InputError(f"the config of {base} is of another architecture than the path's: give the base of the path")
    config = {
        "model_type": MODEL_TYPE,
        "architectures": [CLASSES["AutoModelForCausalLM"].partition(".")[2]],
        "auto_map": CLASSES,
        "base_model_name_or_path": base,
        "base_revision": base_revision,
        "path": vars(path.config),
        "stop_ids": [] if tokenizer is None else list(stop_ids(tokenizer)),
        "text_config": dict(base_config),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(folder, mapping.tensors(path, TORCH_ROWS))
    for file in CODE.glob("*_l2d.py"):
        shutil.copyfile(file, folder / file.name)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


@dataclasses.dataclass(frozen=True)
class TorchFolder:
    """The checked files of a published folder; weights are read when they are needed."""

    architecture: Architecture  # of the base
    base: str  # as `find_base_and_adapters` takes it: an absolute folder, or a hub id with a revision
    config: PathConfig
    source: SafetensorsFolder

    @classmethod
    def open(cls, folder: Path) -> "TorchFolder":
        """Check a published folder, whose path PyTorch may have trained further; raises `InputError`."""
        file = folder / "config.json"
        raw = read_json(file)
        kind = raw.get("model_type")
        problem = f"{file}: model_type is {shown(kind)}, not {MODEL_TYPE!r}"
        require(kind == MODEL_TYPE, f"{problem}: give a folder that was published")
        problem = f"{file} names no base: the folder holds a language model that PyTorch has changed"
        require(bool(raw.get("base_model_name_or_path")), f"{problem}, and only PyTorch opens it")
        architecture = Architecture.from_hf(raw.get("text_config", {}), where=f"{file}: text_config")
        config = from_dict(PathConfig, raw.get("path", {}), prefix=f"{file}: path")
        source = SafetensorsFolder.open(folder)
        mapping.check_tensors(source, mapping.tensor_shapes(DiffusionPath.declare(config, architecture), TORCH_ROWS))
        base, revision = raw.get("base_model_name_or_path", ""), raw.get("base_revision")
        if os.path.isdir(nearby := folder / base):
            return cls(architecture, str(nearby.resolve()), config, source)
        return cls(architecture, base if revision is None else f"{HUB}{base}@{revision}", config, source)

    def load(self, mesh: Mesh) -> DiffusionPath:
        """Read the path onto a mesh."""
        declared = DiffusionPath.declare(self.config, self.architecture)
        return mapping.load_tree(declared, self.source, mesh, rows=TORCH_ROWS)
