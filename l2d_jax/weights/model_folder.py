"""Opens models: the frozen base by folder, hub id or GGUF file, and the path that lies beside it.

A model folder is an ordinary Hugging Face folder with two files more: `path.safetensors`, with the tensor names of the
authors' release, and `path.json`, with the options of the path and the name of its base.
"""

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import ModelConfig, PathConfig
from l2d_jax.data.tokenizer import require_tokenizer, stop_ids
from l2d_jax.distributed import processes, sharding
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import Fingerprint, digest, read_json, require_same, write_whole
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath, start_from
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import LLMAdapter, merge_adapter
from l2d_jax.model.quantization import quantize_layers
from l2d_jax.weights import hub, locate, mapping, peft, publish, tokenizer_files
from l2d_jax.weights.digests import check_signature, source_fingerprint, tensors_digest
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file

REPLACES = "replaces_tokenizer"  # in a published `path.json`: whether the tokenizer there is not the base's
BASE = "base.json"  # of a workdir whose base is a local folder or file: where that lies


@dataclasses.dataclass(frozen=True)
class BaseFiles:
    """The checked files of a base model, before any weight is read."""

    architecture: Architecture
    tokenizer: PreTrainedTokenizerFast | None  # None: the folder has none; only token ids can be used
    stop_ids: tuple[int, ...]  # the tokens that end an answer
    source: mapping.TensorSource | None  # None: random initial values

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """The hashes of weights, adapters, architecture and tokenizer; weights that have changed are read."""
        texts = None
        if self.tokenizer is not None:
            texts = [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template, self.stop_ids]
        architecture = digest(self.architecture.options())
        return source_fingerprint(self.source) | {"architecture": architecture, "tokenizer": digest(texts)}

    def require_same(self, recorded: Any, *, file: Path, ignored: Collection[str] = ()) -> None:
        """Raise `InputError` unless the base is the one whose fingerprint `file` records as `base_fingerprint`.

        Its `ignored` parts were replaced by the user's wish.
        """
        if isinstance(recorded, dict):
            recorded = {name: value for name, value in recorded.items() if name not in ignored}
        what = f"the base of {file.parent} is not the one that it was trained on"
        remedy = f"put that one back, or remove base_fingerprint from {file.name} to use this one"
        require_same(recorded, self.fingerprint, what=what, remedy=remedy)

    def load(self, *, dtype: str, mesh: Mesh, seed: int = 0, adapter: LLMAdapter | None = None) -> LLM:
        """Read the weights onto the mesh, and add `adapter` to them unless it is None."""
        declared = LLM.declare(self.architecture, dtype="bfloat16" if dtype == "int8" else dtype)
        if self.source is None:
            llm: LLM = sharding.initialize(declared, jax.random.key(seed), mesh)
        else:
            llm = mapping.load_tree(declared, self.source, mesh, rows=mapping.LLM_ROWS)
        if adapter is not None:
            llm = dataclasses.replace(llm, layers=merge_adapter(llm.layers, adapter))
        return cast_llm(llm, dtype=dtype, mesh=mesh)


def cast_llm(llm: LLM, *, dtype: str, mesh: Mesh) -> LLM:
    """Cast floating-point weights to another type; for int8 the arrays of `llm` are donated."""
    declared = LLM.declare(llm.architecture, dtype="bfloat16" if dtype == "int8" else dtype)
    if llm.embed.dtype != declared.embed.dtype:
        llm = jax.jit(lambda tree: jax.tree.map(lambda a: a.astype(declared.embed.dtype), tree))(llm)
    if dtype != "int8":
        return llm
    placed = sharding.shardings(LLM.declare(llm.architecture, dtype="int8").layers, mesh)
    shrink = jax.jit(quantize_layers, out_shardings=placed, donate_argnums=0)
    return dataclasses.replace(llm, layers=shrink(llm.layers))


def read_architecture(config: ModelConfig) -> Architecture:
    """The architecture that the config gives, otherwise that of the base's folder; no weight is read."""
    if config.architecture is not None:
        return Architecture.from_hf(config.architecture)
    file = locate.find_base_and_adapters(config.name, files=hub.TEXT_FILES).folder / "config.json"
    return Architecture.from_hf(read_json(file), where=file)


def find_base(config: ModelConfig) -> BaseFiles:
    """Find and check the files of the base, and the architecture in the config; raises `InputError`."""
    if config.name == "random":
        architecture = read_architecture(config)
        tokenizer = tokenizer_files.find_tokenizer(config, None, vocabulary=architecture.vocab_size)
        return BaseFiles(architecture, tokenizer, stop_ids(tokenizer) if tokenizer else (), None)
    language_model = locate.find_base_and_adapters(config.name)
    file = language_model.folder / "config.json"
    architecture = Architecture.from_hf(read_json(file), where=file)
    ours = vars(architecture if config.architecture is None else Architecture.from_hf(config.architecture))
    pairs = ((name, ours[name], there) for name, there in vars(architecture).items())
    others = ", ".join(f"{name} {here} here, {there} there" for name, here, there in pairs if here != there)
    remedy = "set --config.model.architecture=None to take the folder's"
    require(not others, f"config.model.architecture differs from {file}: {others}: {remedy}")
    source = open_weights(language_model, architecture)
    texts, vocabulary = language_model.tokenizer_folder, architecture.vocab_size
    tokenizer = tokenizer_files.find_tokenizer(config, texts, vocabulary=vocabulary)
    ends = _stop_ids(language_model.folder, vocabulary)
    if tokenizer is not None:
        if config.tokenizer is not None:  # in which the ids of the model's may be ordinary words
            ends = tuple(token for token in ends if token in tokenizer.added_tokens_decoder)
        ends += stop_ids(tokenizer)
    return BaseFiles(architecture, tokenizer, tuple(dict.fromkeys(ends)), source)


def find_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer that `find_base` finds, without a download of weights; raises `InputError` where there is none."""
    folder = None
    if config.name != "random":
        folder = locate.find_base_and_adapters(config.name, files=hub.TEXT_FILES).tokenizer_folder
    vocabulary = read_architecture(config).vocab_size
    return require_tokenizer(tokenizer_files.find_tokenizer(config, folder, vocabulary=vocabulary))


def new_path(config: PathConfig, llm: LLM, mesh: Mesh, *, seed: int) -> DiffusionPath:
    """A path with the release's initial values, each shard created where it belongs."""
    path = sharding.initialize(DiffusionPath.declare(config, llm.architecture), jax.random.key(seed), mesh)
    return start_from(path, llm) if config.layers == "dense" and config.dense_init == "lm" else path


def open_weights(language_model: locate.BaseAndAdapters, architecture: Architecture) -> mapping.TensorSource:
    """The LM's tensors, to which adapters are added on reading; raises `InputError` for tensors that do not fit."""
    source: mapping.TensorSource = SafetensorsFolder.open(language_model.folder)
    check_llm(source, architecture)
    for folder in language_model.adapters:
        adapter = peft.Adapter.open(folder, architecture)
        check_signature(folder / peft.WEIGHTS, source)
        source = peft.Adapted(source, adapter)
    return source


def check_llm(source: mapping.TensorSource, architecture: Architecture) -> None:
    """Raise `InputError` unless a source has an LM's tensors and no others (but a tied head and rotary buffers)."""
    ignored = {name for name in source.records if name.endswith("rotary_emb.inv_freq")}
    ignored |= {"lm_head.weight"} if architecture.tied else set()
    mapping.check_tensors(source, mapping.llm_shapes(architecture), ignored=ignored)


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
    """Write `path.json` beside a path's tensors, and beside a tokenizer that may replace the base's."""
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
        for make in tensors.values():  # process 0 needs the parts that are here
            make()


def record_base(workdir: Path, config: ModelConfig, base_fingerprint: Fingerprint | None = None) -> None:
    """Write which base a run has into its workdir, unless it is random; raises `OSError`."""
    (workdir / BASE).unlink(missing_ok=True)
    record = {**locate.base_record(config.name, workdir), "base_fingerprint": base_fingerprint}
    # Another is refused when it is opened.
    if locate.ON_HUB in record or (locate.NEARBY in record and Path(record["base"]).exists()):
        write_whole(workdir / BASE, json.dumps(record, indent=2) + "\n")


def recorded_base(workdir: Path, config: ModelConfig) -> ModelConfig:
    """The config of a run's base, named by the place where its workdir records that it lies; raises `InputError`.

    Workdirs of former versions may record none: the base in their config is a path from the working directory. A
    tokenizer or chat template that the config names is read from the workdir's own copy.
    """
    if (texts := workdir / tokenizer_files.FOLDER).is_dir():
        config = dataclasses.replace(config, tokenizer=str(texts), chat_template=None)
    file, is_here = workdir / BASE, os.path.exists(os.path.expanduser(config.name))
    if not file.exists():
        if locate.HUB_ID.fullmatch(config.name) and not is_here:
            raise locate.missing_base(config.name, file)
        return config
    try:
        return dataclasses.replace(config, name=locate.read_base_name(file))
    except InputError:
        if is_here:  # moved, and found as the config says
            return config
        raise


def replaced_tokenizer(folder: Path) -> str | None:
    """The folder with the tokenizer that goes along with a path in place of the base's; None: the base's."""
    is_there = (folder / tokenizer_files.NAME).exists() and not holds_base(folder)
    if is_there and publish.is_published(folder):
        file = folder / "path.json"
        is_there = file.exists() and read_json(file).get(REPLACES) is True
    return str(folder) if is_there else None


def holds_base(folder: Path) -> bool:
    """Whether a folder with a path has its language model, too; in a published one the config is the path's."""
    return (folder / "config.json").exists() and not publish.is_published(folder)


def base_name(folder: Path) -> str:
    """The base that a path was trained on; raises `InputError` for random weights, which are in no folder."""
    return locate.read_base_name(folder / "path.json", what="the base that the path was trained on")


def read_path_config(folder: Path) -> PathConfig:
    """The options of a model folder's path; raises `InputError` for unknown options and values out of range."""
    return from_dict(PathConfig, read_json(folder / "path.json").get("path", {}), prefix=f"{folder}/path.json: path")


def check_trained_path(folder: Path, base: BaseFiles | None = None, *, ignored: Collection[str] = ()) -> str:
    """The hash of a path and its options; paths of former versions do not say what they were trained on.

    Raises `InputError` if they have changed since they were written, or if the path was trained on another base.
    """
    file, source = folder / "path.json", _path_source(folder)
    record = read_json(file) if file.exists() else {}  # PyTorch writes none
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
    """The options and tensors of a model folder's path; raises an `InputError` that names all that do not fit."""
    config = read_path_config(folder)
    source = SafetensorsFolder.open_file(folder / "path.safetensors")
    mapping.check_tensors(source, mapping.path_shapes(config, architecture))
    return config, source


def load_path(folder: Path, architecture: Architecture, mesh: Mesh) -> DiffusionPath:
    """Read the path of a model folder, or of a published one; raises `InputError` as `find_path` does."""
    if publish.is_published(folder):
        return publish.TorchFolder.open(folder).load(mesh)
    config, source = find_path(folder, architecture)
    return mapping.load_tree(DiffusionPath.declare(config, architecture), source, mesh, rows=mapping.PATH_ROWS)


def _stop_ids(folder: Path, vocabulary: int) -> tuple[int, ...]:
    """Stop token ids of generation_config.json or else config.json, as in transformers; raises `InputError`."""
    file = folder / "generation_config.json"
    if not file.exists() or "eos_token_id" not in read_json(file):
        file = folder / "config.json"
    eos = read_json(file).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        rule = f"eos_token_id must be one or a list of the ids 0 to {vocabulary - 1}"
        raise InputError(f"{file}: {rule}, got {shown(eos)}: mend it, or download it again")
    return tuple(ids)
