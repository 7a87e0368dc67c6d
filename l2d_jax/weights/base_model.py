"""Opens the base model (the frozen language model) by folder, hub id or GGUF file: its tokenizer and its weights."""

import dataclasses
import json
import os
import re
from collections.abc import Collection
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import ModelConfig
from l2d_jax.data.tokenizer import require_tokenizer, stop_ids
from l2d_jax.distributed import sharding
from l2d_jax.errors import InputError, about, require, shown
from l2d_jax.files import Fingerprint, digest, read_json, require_same, write_whole
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import LLMAdapter, merge_adapter
from l2d_jax.model.quantization import quantize_layers
from l2d_jax.weights import hub, locate, mapping, peft, tokenizer_files
from l2d_jax.weights.digests import check_signature, source_fingerprint
from l2d_jax.weights.safetensors_file import SafetensorsFolder

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROTARY = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
BASE = "base.json"  # in a workdir whose base is a local folder or file: the path of the base


@dataclasses.dataclass(frozen=True)
class BaseFiles:
    """The checked files of a base model, before any weights are read."""

    architecture: Architecture
    tokenizer: PreTrainedTokenizerFast | None  # None: the folder has none, and only token ids can be used
    stop_ids: tuple[int, ...]  # the tokens that end an answer
    source: mapping.TensorSource | None  # None: random initial values

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of weights, adapters, architecture and tokenizer; only weights that have changed are read."""
        texts = None
        if self.tokenizer is not None:
            texts = [self.tokenizer.backend_tokenizer.to_str(), self.tokenizer.chat_template, self.stop_ids]
        architecture = digest(self.architecture.options())
        return source_fingerprint(self.source) | {"architecture": architecture, "tokenizer": digest(texts)}

    def require_same(self, recorded: Any, *, file: Path, ignored: Collection[str] = ()) -> None:
        """Raise `InputError` unless the base has the fingerprint that `file` records as `base_fingerprint`.

        `ignored` are parts that the user has replaced on purpose.
        """
        if isinstance(recorded, dict):
            recorded = {name: value for name, value in recorded.items() if name not in ignored}
        what = f"the base of {file.parent} is not the one that it was trained on"
        remedy = f"put that one back, or remove base_fingerprint from {file.name} to use this one"
        require_same(recorded, self.fingerprint, what=what, remedy=remedy)

    def load(self, *, dtype: str, mesh: Mesh, seed: int = 0, adapter: LLMAdapter | None = None) -> LLM:
        """Read the weights onto the mesh, and attach `adapter` unless it is None."""
        declared = LLM.declare(self.architecture, dtype="bfloat16" if dtype == "int8" else dtype)
        if self.source is None:
            llm: LLM = sharding.initialize(declared, jax.random.key(seed), mesh)
        else:
            llm = mapping.load_tree(declared, self.source, mesh, rows=mapping.LLM_ROWS)
        if adapter is not None:
            llm = dataclasses.replace(llm, layers=merge_adapter(llm.layers, adapter))
        return cast_llm(llm, dtype=dtype, mesh=mesh)


def find_base(config: ModelConfig) -> BaseFiles:
    """Find and check the files of the base, and the architecture in the config; raises `InputError`."""
    if config.name == "random":
        architecture = read_architecture(config)
        tokenizer = tokenizer_files.open_tokenizer(config, None, vocabulary=architecture.vocab_size)
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
    tokenizer = tokenizer_files.open_tokenizer(config, texts, vocabulary=vocabulary)
    ends = _stop_ids(language_model.folder, vocabulary)
    if tokenizer is not None:
        if config.tokenizer is not None:  # the model's stop ids may be ordinary words in it
            ends = tuple(token for token in ends if token in tokenizer.added_tokens_decoder)
        ends += stop_ids(tokenizer)
    return BaseFiles(architecture, tokenizer, tuple(dict.fromkeys(ends)), source)


def find_tokenizer(config: ModelConfig) -> PreTrainedTokenizerFast:
    """The tokenizer that `find_base` would find, without downloading weights; raises `InputError` if there is none."""
    folder = None
    if config.name != "random":
        folder = locate.find_base_and_adapters(config.name, files=hub.TEXT_FILES).tokenizer_folder
    vocabulary = read_architecture(config).vocab_size
    return require_tokenizer(tokenizer_files.open_tokenizer(config, folder, vocabulary=vocabulary))


def read_architecture(config: ModelConfig) -> Architecture:
    """The architecture in the config, else that of the base's folder; no weights are read."""
    if config.architecture is not None:
        return Architecture.from_hf(config.architecture)
    file = locate.find_base_and_adapters(config.name, files=hub.TEXT_FILES).folder / "config.json"
    return Architecture.from_hf(read_json(file), where=file)


def _stop_ids(folder: Path, vocabulary: int) -> tuple[int, ...]:
    """The stop token ids of generation_config.json, else of config.json, as in transformers; raises `InputError`."""
    file = folder / "generation_config.json"
    if not file.exists() or "eos_token_id" not in read_json(file):
        file = folder / "config.json"
    eos = read_json(file).get("eos_token_id")
    ids = eos if isinstance(eos, list) else [] if eos is None else [eos]
    if not all(type(token) is int and 0 <= token < vocabulary for token in ids):
        rule = f"eos_token_id must be one or a list of the ids 0 to {vocabulary - 1}"
        raise InputError(f"{file}: {rule}, got {shown(eos)}: fix it, or download it again")
    return tuple(ids)


def open_weights(language_model: locate.BaseAndAdapters, architecture: Architecture) -> mapping.TensorSource:
    """Open the LM's tensors; adapters are added when they are read. Raises `InputError` for tensors that do not fit."""
    source: mapping.TensorSource = SafetensorsFolder.open(language_model.folder)
    with about(language_model.folder):
        check_llm(source, architecture)
    for folder in language_model.adapters:
        adapter = peft.Adapter.open(folder, architecture)
        check_signature(folder / peft.WEIGHTS, source)
        source = peft.Adapted(source, adapter)
    return source


def check_llm(source: mapping.TensorSource, architecture: Architecture) -> None:
    """Raise `InputError` unless a source has exactly the tensors of an LM.

    Two exceptions: rotary frequencies are ignored, as in transformers, which computes them from the config. A tied head
    must equal the embedding, because transformers 5 would use a different head and transformers 4 would not.
    """
    ignored = set(filter(ROTARY.fullmatch, source.records))
    copied = {HEAD} & source.records.keys() if architecture.tied else set()
    mapping.check_tensors(source, mapping.llm_shapes(architecture), ignored=ignored | copied)
    if copied and not mapping.holds_the_same(source, HEAD, EMBEDDING):
        problem = f"{HEAD} differs from {EMBEDDING}, and config.json ties them"
        raise InputError(f"{problem}: set tie_word_embeddings to false there to use both, or remove {HEAD}")


def cast_llm(llm: LLM, *, dtype: str, mesh: Mesh) -> LLM:
    """Cast floating-point weights to another dtype; for int8, the arrays of `llm` are donated."""
    declared = LLM.declare(llm.architecture, dtype="bfloat16" if dtype == "int8" else dtype)
    if llm.embed.dtype != declared.embed.dtype:
        llm = jax.jit(lambda tree: jax.tree.map(lambda a: a.astype(declared.embed.dtype), tree))(llm)
    if dtype != "int8":
        return llm
    placed = sharding.shardings(LLM.declare(llm.architecture, dtype="int8").layers, mesh)
    shrink = jax.jit(quantize_layers, out_shardings=placed, donate_argnums=0)
    return dataclasses.replace(llm, layers=shrink(llm.layers))


def record_base(workdir: Path, config: ModelConfig, base_fingerprint: Fingerprint | None = None) -> None:
    """Record the base of a run in its workdir, unless the base is random; raises `OSError`."""
    (workdir / BASE).unlink(missing_ok=True)
    record = {**locate.base_record(config.name, workdir), "base_fingerprint": base_fingerprint}
    # A different base is refused when it is opened.
    if locate.ON_HUB in record or (locate.NEARBY in record and Path(record["base"]).exists()):
        write_whole(workdir / BASE, json.dumps(record, indent=2) + "\n")


def recorded_base(workdir: Path, config: ModelConfig) -> ModelConfig:
    """The config of a run's base, with the location that its workdir records; raises `InputError`.

    Workdirs of earlier versions may have no record; then the base in their config is a path relative to the working
    directory. A tokenizer or chat template that the config names is read from the copy in the workdir.
    """
    if (texts := workdir / tokenizer_files.FOLDER).is_dir():
        config = dataclasses.replace(config, tokenizer=str(texts), chat_template=None)
    file, is_here = workdir / BASE, os.path.exists(os.path.expanduser(config.name))
    if not file.exists():
        if hub.HUB_ID.fullmatch(config.name) and not is_here:
            raise locate.missing_base(config.name, file)
        return config
    try:
        return dataclasses.replace(config, name=locate.read_base_name(file))
    except InputError:
        if is_here:  # the base was moved, and is where the config says
            return config
        raise
