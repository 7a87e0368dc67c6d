"""LoRA adapters of the language model, in PEFT's files: `adapter_config.json` and `adapter_model.safetensors`.

An adapter is stored separately from the weights of its base. When weights are read, each is W + (alpha / r) B A,
computed in float32 and rounded once to the dtype of the model (Hu et al. 2021, section 4.1). The tensors of the file
say which layers have an update. The config must select each of these layers, with the same rank. A layer without
tensors has no update.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from l2d_jax.config.schema import LoraConfig
from l2d_jax.errors import about, require
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import MATRICES
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.weights import hub, mapping
from l2d_jax.weights.finite import require_finite
from l2d_jax.weights.peft_config import CONFIG, PeftConfig, product_scale
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file

WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
ROWS = [  # the table of an `LLMAdapter`
    *mapping.matrix_rows(MATRICES, f"{PREFIX}%s.lora_A.weight", "%s.a", "I rank -> rank (I)"),
    *mapping.matrix_rows(MATRICES, f"{PREFIX}%s.lora_B.weight", "%s.b", "rank O -> (O) rank"),
]
# Options and the values that PEFT writes for a plain adapter.
PLAIN: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}
PLAIN |= dict.fromkeys(("fan_in_fan_out", "use_dora", "lora_bias"), False)
PLAIN |= dict.fromkeys(("modules_to_save", "layers_to_transform", "trainable_token_indices"))
PLAIN |= {"task_type": "CAUSAL_LM", "inference_mode": True, "lora_dropout": 0.0}


@dataclass(frozen=True)
class AdapterConfig:
    """The shape of an adapter."""

    rank: int  # of all updates except those in `scales`, which may differ
    alpha: float
    modules: tuple[str, ...]  # last parts of the names of updated layers
    rank_stabilized: bool = False  # scale by alpha / sqrt(rank) instead of alpha / rank (Kalajdzievski 2023)
    scales: Mapping[str, float] = field(default_factory=dict)  # factors of layers that differ from `scale`

    @property
    def scale(self) -> float:
        """The factor of the product of the two matrices, unless `scales` has another one."""
        return product_scale(self.rank, self.alpha, rank_stabilized=self.rank_stabilized)

    def options(self) -> dict[str, Any]:
        """The fields as a dictionary, without `scales` if it is empty: earlier versions do not know it."""
        return {name: value for name, value in asdict(self).items() if value or name != "scales"}


@dataclass(frozen=True)
class Adapter:
    """The checked files of an adapter; its weights are read when they are needed."""

    config: AdapterConfig
    source: mapping.TensorSource
    raw: Mapping[str, Any]  # its `adapter_config.json`

    @classmethod
    def open(cls, folder: Path, architecture: Architecture) -> "Adapter":
        """Check the files of an adapter; raises `InputError` for unsupported options and tensors that do not fit."""
        options, source = PeftConfig.open(folder), SafetensorsFolder.open_file(folder / WEIGHTS)
        present, scales = source.records, dict[str, float]()
        shapes: mapping.Shapes = {}
        for name, (outputs, inputs) in _linear_shapes(architecture).items():
            a, b = (f"{PREFIX}{name}.lora_{part}.weight" for part in "AB")
            if a not in present and b not in present:
                continue
            problem = f"{source.path} has an update of {name}, which {CONFIG} next to it does not select"
            require(options.selects(name), f"{problem}: add that name to target_modules, or remove the tensors")
            ranks = options.ranks(name)
            rank = next((rank for rank in ranks if a in present and rank in present[a].shape[:1]), ranks[0])
            shapes |= {a: (rank, inputs), b: (outputs, rank)}
            scales[name] = options.scale(name, rank)
        with about(folder):
            mapping.check_tensors(source, shapes)
        require(len(scales) > 0, f"{source.path} has no tensors: take the weights that belong to {CONFIG}")
        modules = tuple(sorted({name.rpartition(".")[2] for name in scales}))
        found = options.found
        plain = AdapterConfig(found["r"], found["lora_alpha"], modules, options.rank_stabilized)
        others = {name: scale for name, scale in scales.items() if scale != plain.scale}
        return cls(replace(plain, scales=others), source, options.raw)

    @cached_property
    def layers(self) -> frozenset[str]:
        """The names of the updated layers."""
        return frozenset(name.removeprefix(PREFIX).partition(".lora_")[0] for name in self.source.records)

    def product(self, layer: str, index: tuple[slice, ...]) -> np.ndarray:
        """scale x B A for one layer of the LM, or a slice of it, in float32."""
        up = self.source.read(f"{PREFIX}{layer}.lora_B.weight", (index[0],)).astype(np.float32)
        down = self.source.read(f"{PREFIX}{layer}.lora_A.weight", (slice(None), index[1])).astype(np.float32)
        return np.float32(self.config.scales.get(layer, self.config.scale)) * (up @ down)

    def write(self, folder: Path, *, base: str) -> None:
        """Write the adapter into another existing folder, with unchanged tensors and options."""
        _write(folder, PLAIN | dict(self.raw), {n: self.source.read(n) for n in self.source.records}, base=base)


@dataclass(frozen=True)
class Adapted:
    """The tensors of a base with an adapter added, in float32 or rounded to the dtype of the file."""

    source: mapping.TensorSource
    adapter: Adapter
    is_rounded: bool = False

    @property
    def records(self) -> Mapping[str, Any]:
        """The records of the source."""
        return self.source.records

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a tensor or a slice of it, with the adapter added."""
        tensor, layer = self.source.read(name, index), name.removesuffix(".weight")
        if layer not in self.adapter.layers:
            return tensor
        whole = tuple(map(slice, self.records[name].shape))
        with np.errstate(over="ignore"):  # reported as an error below
            total = tensor.astype(np.float32) + self.adapter.product(layer, whole if index is None else index)
            total = total.astype(self.records[name].dtype) if self.is_rounded else total
        return require_finite(total, name, "the base with its adapter")


def adapter_shapes(config: AdapterConfig, architecture: Architecture) -> mapping.Shapes:
    """Names and shapes of all tensors of an adapter."""
    options = LoraConfig(rank=config.rank, modules=config.modules)
    return mapping.tensor_shapes(LLMAdapter.declare(options, architecture), ROWS)


def _linear_shapes(architecture: Architecture) -> mapping.Shapes:
    """The numbers of outputs and inputs of each linear layer of the decoder blocks, keyed by name."""
    shapes = mapping.llm_shapes(architecture)
    return {name.removesuffix(".weight"): shape for name, shape in shapes.items() if name.endswith("_proj.weight")}


def write_adapter(folder: Path, config: AdapterConfig, tensors: Mapping[str, np.ndarray], *, base: str) -> None:
    """Write an adapter's two files into an existing folder, as PEFT reads them; `base` is a hub id or absolute path."""
    options = {"r": config.rank, "lora_alpha": config.alpha, "use_rslora": config.rank_stabilized}
    _write(folder, PLAIN | options | {"target_modules": list(config.modules)}, tensors, base=base)


def _write(folder: Path, options: Mapping[str, Any], tensors: Mapping[str, np.ndarray], *, base: str) -> None:
    """Write both files. The revision of a hub base, org/name@revision, is a separate option in PEFT."""
    name, revision = (base, None) if Path(base).is_absolute() else hub.split_revision(base)
    named = {"base_model_name_or_path": name, "revision": revision}
    (folder / CONFIG).write_text(json.dumps({**options, **named}, indent=2) + "\n")
    write_file(folder / WEIGHTS, tensors)
