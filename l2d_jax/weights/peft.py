"""LoRA adapters of the language model, in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

An adapter lies beside the weights of a model folder and stays apart from them on disk. Where weights are read, each is
W + (alpha / r) B A, computed in float32 and rounded once to the type of the model (Hu et al. 2021, section 4.1).
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NotRequired

import numpy as np
from annotated_types import Interval, Len
from typing_extensions import TypedDict

from l2d_jax.config.schema import PROJECTIONS, LoraConfig
from l2d_jax.errors import InputError, shown
from l2d_jax.files import check, read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import MATRICES
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.weights import mapping
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
ROWS = [  # the table of an `LLMAdapter`
    *mapping.matrix_rows(MATRICES, f"{PREFIX}%s.lora_A.weight", "%s.a", "I rank -> rank (I)"),
    *mapping.matrix_rows(MATRICES, f"{PREFIX}%s.lora_B.weight", "%s.b", "rank O -> (O) rank"),
]
# Options of PEFT that would change the result, each with the only value that is implemented here.
PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
PLAIN |= dict.fromkeys(("fan_in_fan_out", "use_dora", "lora_bias"), False)
PLAIN |= dict.fromkeys(("modules_to_save", "layers_to_transform", "trainable_token_indices"))


class _PeftConfig(TypedDict):
    """The other entries of `adapter_config.json` that are read."""

    r: Annotated[int, Interval(ge=1, le=2**16)]
    lora_alpha: Annotated[float, Interval(gt=0, le=1e6)]
    target_modules: Annotated[list[Literal[PROJECTIONS]], Len(1)]  # type: ignore[valid-type]
    use_rslora: NotRequired[bool | None]


@dataclass(frozen=True)
class AdapterConfig:
    """The shape of an adapter."""

    rank: int
    alpha: float
    modules: tuple[str, ...]  # of `PROJECTIONS`
    rank_stabilized: bool = False  # alpha / sqrt(rank) in place of alpha / rank (Kalajdzievski 2023)

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices."""
        return self.alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)


@dataclass(frozen=True)
class Adapter:
    """The checked files of an adapter; its weights are read when they are needed."""

    config: AdapterConfig
    source: mapping.TensorSource

    @classmethod
    def open(cls, folder: Path, architecture: Architecture) -> "Adapter":
        """Check the files of an adapter; raises `InputError` for unsupported options and tensors that do not fit."""
        file = folder / CONFIG
        raw = read_json(file)
        for name, value in PLAIN.items():
            if raw.get(name, value) not in (value, value or None):
                raise InputError(f"{file}: {name} = {shown(raw[name])} is not supported, only {value!r}")
        remedy = f"give it as PEFT saves it, with layers of {', '.join(PROJECTIONS)}"
        found = check(raw, _PeftConfig, file, remedy=remedy)
        modules = tuple(sorted(set(found["target_modules"])))
        config = AdapterConfig(found["r"], found["lora_alpha"], modules, bool(found.get("use_rslora")))
        source = SafetensorsFolder.open_file(folder / WEIGHTS)
        mapping.check_tensors(source, adapter_shapes(config, architecture))
        return cls(config, source)

    def product(self, layer: str, index: tuple[slice, ...]) -> np.ndarray:
        """scale x B A of one layer of the LM, or the slice `index` of it, in float32."""
        up = self.source.read(f"{PREFIX}{layer}.lora_B.weight", (index[0],)).astype(np.float32)
        down = self.source.read(f"{PREFIX}{layer}.lora_A.weight", (slice(None), index[1])).astype(np.float32)
        return np.float32(self.config.scale) * (up @ down)

    def write(self, folder: Path, *, base: str) -> None:
        """Write the adapter into another existing folder; its tensors keep their bits."""
        write_adapter(folder, self.config, {n: self.source.read(n) for n in self.source.records}, base=base)


@dataclass(frozen=True)
class Adapted:
    """The tensors of a base, to which an adapter is added: in float32, unless rounded to the type of the file."""

    source: mapping.TensorSource
    adapter: Adapter
    is_rounded: bool = False

    @property
    def records(self) -> Mapping[str, Any]:
        """Those of the source."""
        return self.source.records

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """One tensor or a slice of it."""
        tensor, layer = self.source.read(name, index), name.removesuffix(".weight")
        if f"{PREFIX}{layer}.lora_A.weight" in self.adapter.source.records:
            whole = tuple(map(slice, self.records[name].shape))
            tensor = tensor.astype(np.float32) + self.adapter.product(layer, whole if index is None else index)
        return tensor.astype(self.records[name].dtype) if self.is_rounded else tensor


def adapter_shapes(config: AdapterConfig, architecture: Architecture) -> mapping.Shapes:
    """Name and shape of every tensor of an adapter."""
    options = LoraConfig(rank=config.rank, modules=config.modules)
    return mapping.tensor_shapes(LLMAdapter.declare(options, architecture), ROWS)


def write_adapter(folder: Path, config: AdapterConfig, tensors: Mapping[str, np.ndarray], *, base: str) -> None:
    """Write an adapter's two files into an existing folder, as PEFT reads them; `base` is a hub id or absolute path."""
    options = PLAIN | {"task_type": "CAUSAL_LM", "base_model_name_or_path": base, "inference_mode": True}
    options |= {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rank_stabilized}
    options |= {"lora_dropout": 0.0, "target_modules": list(config.modules)}
    (folder / CONFIG).write_text(json.dumps(options, indent=2) + "\n")
    write_file(folder / WEIGHTS, tensors)
