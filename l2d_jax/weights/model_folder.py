"""Reads and writes the diffusion path of a model folder.

A model folder is an ordinary Hugging Face folder with two more files: `path.safetensors`, with the tensor names of the
authors' release, and `path.json`, with the options of the path and the name of its base.
"""

import dataclasses
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed import processes, sharding
from l2d_jax.errors import InputError, about
from l2d_jax.files import Fingerprint, digest, read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath, PathLayers, matrices
from l2d_jax.model.llm import LLM
from l2d_jax.model.quantization import QuantizedWeight, from_bits
from l2d_jax.weights import locate, mapping, publish, tokenizer_files
from l2d_jax.weights.base_model import BaseFiles
from l2d_jax.weights.digests import tensors_digest
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file

REPLACES = "replaces_tokenizer"  # key in a published `path.json`: whether the folder's tokenizer replaces the base's


def new_path(config: PathConfig, llm: LLM, mesh: Mesh, *, seed: int) -> DiffusionPath:
    """A path with the release's initial values; each shard is created on its device."""
    path = sharding.initialize(DiffusionPath.declare(config, llm.architecture), jax.random.key(seed), mesh)
    return start_from(path, llm) if config.layers == "dense" and config.dense_init == "lm" else path


def start_from(path: DiffusionPath, llm: LLM) -> DiffusionPath:
    """Initialise a path with full layers from the LM's weights (paper appendix, full f_d)."""
    weights = {
        name: w.restore(jnp.float32) if isinstance(w, QuantizedWeight) else jnp.array(from_bits(w), jnp.float32)
        for name, w in ((name, getattr(llm.layers, name)) for name in matrices(path.config))
    }
    q_bias = None if path.layers.q_bias is None else jnp.array(llm.layers.q_bias, jnp.float32)
    return dataclasses.replace(path, layers=PathLayers(modulation=path.layers.modulation, **weights, q_bias=q_bias))


def write_path(
    folder: Path, tensors: Mapping[str, Any], config: PathConfig, *, base: str, base_fingerprint: Fingerprint | None
) -> None:
    """Write `path.safetensors` and `path.json` into an existing folder, from the path's tensors by release name."""
    write_file(folder / "path.safetensors", {name: np.asarray(make()) for name, make in tensors.items()})
    write_record(folder, config, base=base, base_fingerprint=base_fingerprint)


def write_record(
    folder: Path,
    config: PathConfig,
    *,
    base: str,
    base_fingerprint: Fingerprint | None,
    replaces_tokenizer: bool = False,
) -> None:
    """Write `path.json` next to a path's tensors, and next to a tokenizer if one replaces the base's."""
    record = {**locate.base_record(base, folder), "base_fingerprint": base_fingerprint, "path": vars(config)}
    record |= {REPLACES: True} if replaces_tokenizer else {}
    record["checksum"] = _path_checksum(record, _path_source(folder))
    (folder / "path.json").write_text(json.dumps(record, indent=2) + "\n")


def save_path(folder: Path, path: DiffusionPath, *, base: str, base_fingerprint: Fingerprint | None = None) -> None:
    """Write a path into an existing folder, on process 0; all processes must call this."""
    tensors = dict(mapping.tensors(path, mapping.PATH_ROWS))
    if processes.is_first():
        write_path(folder, tensors, path.config, base=base, base_fingerprint=base_fingerprint)
    else:
        for make in tensors.values():  # process 0 needs the shards of this process
            make()


def replaced_tokenizer(folder: Path) -> str | None:
    """The folder with the tokenizer that replaces the base's; None: the base's tokenizer is used."""
    is_there = (folder / tokenizer_files.NAME).exists() and not holds_base(folder)
    if is_there and publish.is_published(folder):
        file = folder / "path.json"
        is_there = file.exists() and read_json(file).get(REPLACES) is True
    return str(folder) if is_there else None


def holds_base(folder: Path) -> bool:
    """Whether a folder with a path also contains its language model. A published folder's config is the path's."""
    return (folder / "config.json").exists() and not publish.is_published(folder)


def base_name(folder: Path) -> str:
    """The base on which a path was trained; raises `InputError` for random weights, which are not stored."""
    return locate.read_base_name(folder / "path.json", what="the base that the path was trained on")


def read_path_config(folder: Path) -> PathConfig:
    """Read the options of a model folder's path; raises `InputError` for unknown options or values out of range."""
    file = folder / "path.json"
    with about(file):
        return from_dict(PathConfig, read_json(file).get("path", {}), prefix="path")


def check_trained_path(folder: Path, base: BaseFiles | None = None, *, ignored: Collection[str] = ()) -> str:
    """The hash of a path and its options.

    Raises `InputError` if they have changed since they were written, or if the path was trained on another base. Paths
    of earlier versions do not record their base.
    """
    file, source = folder / "path.json", _path_source(folder)
    record = read_json(file) if file.exists() else {}  # PyTorch does not write it
    checksum = _path_checksum(record, source)
    if record.get("checksum", checksum) != checksum:
        remedy = "import it" if publish.is_published(folder) else "export the path again"
        raise InputError(f"{source.path} or {file} has changed since they were written: {remedy}")
    if base is not None:
        base.require_same(record.get("base_fingerprint"), file=file, ignored=ignored)
    return checksum


def _path_source(folder: Path) -> SafetensorsFolder:
    name = "model.safetensors" if publish.is_published(folder) else "path.safetensors"
    return SafetensorsFolder.open_file(folder / name)


def _path_checksum(record: Mapping[str, Any], source: SafetensorsFolder) -> str:
    return digest({"path": record.get("path"), "tensors": tensors_digest(source)})


def find_path(folder: Path, architecture: Architecture) -> tuple[PathConfig, mapping.TensorSource]:
    """The options and tensors of a model folder's path; raises an `InputError` that names what does not fit."""
    config = read_path_config(folder)
    source = SafetensorsFolder.open_file(folder / "path.safetensors")
    with about(folder):
        mapping.check_tensors(source, mapping.path_shapes(config, architecture))
    return config, source


def load_path(folder: Path, architecture: Architecture, mesh: Mesh) -> DiffusionPath:
    """Read the path of a model folder or of a published folder; raises `InputError` as `find_path` does."""
    if publish.is_published(folder):
        return publish.TorchFolder.open(folder).load(mesh)
    config, source = find_path(folder, architecture)
    return mapping.load_tree(DiffusionPath.declare(config, architecture), source, mesh, rows=mapping.PATH_ROWS)
