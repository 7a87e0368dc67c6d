"""Published folders: a path in a format that PyTorch can load with code in the same folder. They can be read back.

The code is `weights/pytorch`, which needs neither this package nor JAX. Tensors have the names of our leaves, plus the
number of the layer, in PyTorch's layout [out, in].
"""

import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Len
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast
from typing_extensions import TypedDict

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import PathConfig
from l2d_jax.data.tokenizer import stop_ids
from l2d_jax.errors import InputError, about, require, shown
from l2d_jax.files import check, check_path, read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.weights import mapping
from l2d_jax.weights.hub import HUB, HUB_ID
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors

CODE = Path(__file__).parent / "pytorch"
MODEL_TYPE = "l2d"


class _PublishedConfig(TypedDict):
    """The entries of a published `config.json` that are read."""

    model_type: Literal["l2d"]
    base_model_name_or_path: Annotated[str, Len(1)]
    base_revision: NotRequired[str | None]
    path: dict[str, Any]
    text_config: dict[str, Any]


def is_published(folder: Path) -> bool:
    """Whether a folder is a published path, and not a language model or a model folder."""
    file = folder / "config.json"
    return file.exists() and read_json(file).get("model_type") == MODEL_TYPE


def _torch_row(row: mapping.Row) -> mapping.Row:
    """The row for the same leaf in a published folder; both matrices of a low-rank update are also [out, in]."""
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

    All weights of the path must be on this host. The base is a hub id with a commit, or a folder with an absolute path
    or a path relative to `folder`. Its `config.json` and tokenizer are given; the tokenizer also says what ends an
    answer.
    """
    from l2d_jax.weights.pytorch.configuration_l2d import CODE as CLASSES  # here, because transformers imports torch

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
    base: str  # argument of `find_base_and_adapters`: an absolute folder, or a hub id with a revision
    config: PathConfig
    source: SafetensorsFolder

    @classmethod
    def open(cls, folder: Path) -> "TorchFolder":
        """Check a published folder; its path may have been trained further in PyTorch. Raises `InputError`."""
        file = folder / "config.json"
        found = read_json(file)
        is_changed = found.get("model_type") == MODEL_TYPE and found.get("base_model_name_or_path") in (None, "")
        problem = f"{file} names no base: the folder holds a language model that PyTorch has changed"
        require(not is_changed, f"{problem}, and only PyTorch opens it")
        raw: dict[str, Any] = check(found, _PublishedConfig, file, remedy="give a folder that was published")
        architecture = Architecture.from_hf(raw["text_config"], where=f"{file}: text_config")
        with about(file):
            config = from_dict(PathConfig, raw["path"], prefix="path")
        source = SafetensorsFolder.open(folder)
        with about(folder):
            declared = DiffusionPath.declare(config, architecture)
            mapping.check_tensors(source, mapping.tensor_shapes(declared, TORCH_ROWS))
        base, revision = raw["base_model_name_or_path"], raw.get("base_revision")
        check_path(base, f"{file}: base_model_name_or_path")
        if os.path.isdir(nearby := folder / base):
            return cls(architecture, str(nearby.resolve()), config, source)
        is_known = HUB_ID.fullmatch(base) is not None or os.path.exists(os.path.expanduser(base))
        require(is_known, f"{file}: the base {shown(base)} is neither here nor a hub id: give its folder, or org/name")
        return cls(architecture, base if revision is None else f"{HUB}{base}@{revision}", config, source)

    def load(self, mesh: Mesh) -> DiffusionPath:
        """Read the path onto a mesh."""
        declared = DiffusionPath.declare(self.config, self.architecture)
        return mapping.load_tree(declared, self.source, mesh, rows=TORCH_ROWS)
