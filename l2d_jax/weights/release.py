"""The authors' PyTorch release: its hyper-parameters, its checkpoints and the aliases in them.

A checkpoint is the state dict of the whole model: the frozen LM, the path, and aliases of the weights that both share.
"""

import dataclasses
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import ml_dtypes
import numpy as np

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import PathConfig
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import package_table
from l2d_jax.model.architecture import Architecture
from l2d_jax.weights import mapping
from l2d_jax.weights.finite import require_finite
from l2d_jax.weights.mapping import TensorSource
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file

ARGUMENTS = "weights/release.toml"  # the release's keyword arguments
Tensors: TypeAlias = dict[str, Callable[[], np.ndarray]]  # each is made when it is needed


def parse_hyperparameters(raw: Mapping[str, Any]) -> PathConfig:
    """Read the path's options from the release's keyword arguments, at top level or under `l2d_kwargs`.

    Raises `InputError`.
    """
    options = raw.get("l2d_kwargs", raw)
    require(isinstance(options, Mapping), f"l2d_kwargs must be the release's keyword arguments, got {shown(options)}")
    names = package_table(ARGUMENTS)["names"]
    for name, value in package_table(ARGUMENTS)["fixed"].items():
        if options.get(name, value) != value:
            raise InputError(f"hyper-parameter {name} = {shown(options[name])} is not supported, only {value!r}")
    ours = {name: options[theirs] for theirs, name in names.items() if theirs in options}
    for theirs, name in names.items():
        if name not in (*ours, "lora_rank", "lora_alpha", "classes", "class_dropout"):
            raise InputError(f"hyper-parameter {theirs} is missing: give the release's keyword arguments")
    rule = f"hyper-parameter separate_flow_params_with_lora must be true or false, got {shown(ours['layers'])}"
    require(isinstance(ours["layers"], bool), rule)
    ours["layers"] = "lora" if ours["layers"] else "dense"
    rank = ours["lora_rank"] = ours.get("lora_rank") or PathConfig.lora_rank
    if ours.get("lora_alpha") in (None, -1):
        ours["lora_alpha"] = 2 * rank  # the release's meaning of None
    ours["classes"] = ours.get("classes") or 0
    return from_dict(PathConfig, ours, prefix="hyper-parameters")


def options(config: PathConfig) -> dict[str, Any]:
    """All keyword arguments of the release for a path."""
    given = package_table(ARGUMENTS)
    ours = {theirs: getattr(config, name) for theirs, name in given["names"].items()}
    return {**given["fixed"], **given["others"], **ours, "separate_flow_params_with_lora": config.layers == "lora"}


def write_checkpoint(file: Path, tensors: Tensors) -> None:
    """Write a state dict, made in memory: `.safetensors`, or `.bin` for the release's programs, which needs torch."""
    torch = None if file.suffix == ".safetensors" else _import_torch(file)
    names = {make: name for name, make in reversed(tensors.items())}  # the first name of each
    made = {make: require_finite(make(), name, "weights cannot be written") for make, name in names.items()}
    if torch is None:
        write_file(file, {name: made[make] for name, make in tensors.items()}, for_transformers=False)
    else:
        converted = {make: _tensor(array, torch) for make, array in made.items()}
        torch.save({name: converted[make] for name, make in tensors.items()}, file)  # aliases share their memory


def open_checkpoint(file: Path) -> TensorSource:
    """Open a state dict as a source of tensors: `.safetensors`, or `.pt` and `.bin` with `weights_only=True`."""
    require(file.is_file(), f"no checkpoint {file}: give a .safetensors, .pt or .bin file")
    if file.suffix == ".safetensors":
        return SafetensorsFolder.open_file(file)
    torch = _import_torch(file)
    try:
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises pickle, zip and runtime errors of many kinds for a bad file
        raise InputError(f"{file} is not a file of plain tensors: {' '.join(str(error).split())[:200]}") from error
    if isinstance(state, Mapping) and isinstance(state.get("model_state_dict"), Mapping):
        state = state["model_state_dict"]
    if not isinstance(state, Mapping) or not all(isinstance(value, torch.Tensor) for value in state.values()):
        raise InputError(f"{file} is not a state dict of names and tensors: give pytorch_model.bin of the release")
    return ArraySource(file, {name: _array(value, torch) for name, value in state.items()})


@dataclasses.dataclass(frozen=True)
class ArraySource:
    """A `TensorSource` over arrays in memory."""

    path: Path  # the file they come from, for messages
    records: Mapping[str, np.ndarray]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> np.ndarray:
        """Read a tensor or a slice of it; raises `InputError` if it is not finite."""
        return require_finite(self.records[name][... if index is None else index], name, self.path)


def aliases(own: Collection[str], trained: Iterable[str]) -> dict[str, str]:
    """The aliases in a state dict of an LM with the tensors `own` and a path: alias -> tensor with the same bits."""
    same = {} if "lm_head.weight" in own else {"lm_head.weight": "model.embed_tokens.weight"}
    for stem in (name.removesuffix(".A") for name in trained if name.endswith(".A")):
        originals = {f"{stem.replace('.flow_', '.')}.{kind}": kind for kind in ("weight", "bias")}
        same |= {f"{stem}.wrapped_layer.{kind}": name for name, kind in originals.items() if name in own}
    return same


def check_checkpoint(
    source: TensorSource, architecture: Architecture, config: PathConfig
) -> tuple[list[str], list[str]]:
    """The names of the LM's and the path's tensors in a state dict; raises `InputError` if they do not fit."""
    own, trained = mapping.llm_shapes(architecture), mapping.path_shapes(config, architecture)
    same = aliases(own, trained)
    mapping.check_tensors(source, own | trained | {alias: own[name] for alias, name in same.items()})
    for alias, name in same.items():
        a, b = source.read(alias), source.read(name)
        if (a.dtype, a.shape, a.tobytes()) != (b.dtype, b.shape, b.tobytes()):
            raise InputError(f"tensor {alias} differs from {name}, whose alias it is: the checkpoint is damaged")
    return list(own), list(trained)


def state_dict(llm: TensorSource, trained: Tensors, architecture: Architecture) -> Tensors:
    """The release's state dict, including aliases, from an LM and the tensors of a path; all keep their bits."""
    own = lazy_tensors(llm, mapping.llm_shapes(architecture))
    return own | trained | {alias: own[name] for alias, name in aliases(own, trained).items()}


def merge_lora(llm: TensorSource, path: TensorSource, architecture: Architecture, config: PathConfig) -> Tensors:
    """The tensors of a LoRA path under the names of a dense one: W + (alpha / r) A B, in float32."""

    def merged(name: str) -> np.ndarray:
        stem, _, kind = name.rpartition(".")
        if f"{stem}.A" not in path.records:
            return path.read(name)
        tensor = np.asarray(llm.read(name.replace(".flow_", ".")), np.float32)
        if kind == "bias":
            return tensor
        a, b = (np.asarray(path.read(f"{stem}.{part}"), np.float32) for part in "AB")
        return tensor + np.float32(config.lora_alpha / config.lora_rank) * (a @ b).T

    names = mapping.path_shapes(dataclasses.replace(config, layers="dense"), architecture)
    return {name: partial(merged, name) for name in names}


def lazy_tensors(source: TensorSource, names: Iterable[str]) -> Tensors:
    """Tensors of a source, read when they are needed."""
    return {name: partial(source.read, name) for name in names}


def _import_torch(file: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise InputError(f"{file} needs torch: pip install '.[torch]', or use a .safetensors file") from None
    return torch


def _tensor(array: np.ndarray, torch: Any) -> Any:
    if array.dtype == ml_dtypes.bfloat16:  # torch cannot read such arrays: pass the bits as integers
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(np.array(array))


def _array(tensor: Any, torch: Any) -> np.ndarray:
    if tensor.dtype == torch.bfloat16:  # NumPy has no bfloat16: pass the bits as integers
        return tensor.contiguous().view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.contiguous().numpy()
