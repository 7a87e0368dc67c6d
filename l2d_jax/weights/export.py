"""Writes a model folder in the formats of other projects.

* `l2d`: the state dict of the authors' release, `l2d.safetensors`, with its hyper-parameters, `l2d.json`;
* `l2d-full`: the same, with every LoRA layer of the path as a full weight, under the names of the release's full path;
* `hf`: the language model alone, as `transformers` loads it;
* `peft`: the LoRA adapter of the language model, as PEFT loads it.

Tensors keep their bits, except those that a format must compute: W + (alpha / r) A B in `l2d-full`, in float32, and
adapted weights of the language model, in the dtype of the base. Only `peft` keeps an adapter separate from the base.
"""

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from pathlib import Path

from jax.sharding import Mesh

from l2d_jax.config.schema import MeshConfig, ModelConfig, PathConfig
from l2d_jax.data import tokenizer
from l2d_jax.distributed import processes, runtime
from l2d_jax.errors import InputError, require
from l2d_jax.files import Fingerprint, read_json
from l2d_jax.model.architecture import SUPPORTED, Architecture
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.storage import mirror
from l2d_jax.storage.partial import output_folder, scratch_folder
from l2d_jax.weights import base_model, digests, hub, mapping, model_folder, peft, publish, release, tokenizer_files
from l2d_jax.weights.locate import BaseAndAdapters, absolute_name, find_base_and_adapters, locate
from l2d_jax.weights.peft_config import CONFIG, adapter_base
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors

REPLACED = ("model.safetensors.index.json", "path.json", CONFIG)


@dataclass(frozen=True)
class Parts:
    """The checked parts of a model folder; weights are read when they are written."""

    name: str  # as the user gave it
    language_model: BaseAndAdapters
    architecture: Architecture
    llm: mapping.TensorSource  # each tensor in the dtype of its file, with its adapters
    path: tuple[PathConfig, mapping.TensorSource] | None

    @classmethod
    def open(cls, name: str) -> "Parts":
        """Find the parts of a model folder, or of the export of a workdir; raises `InputError` if they do not fit."""
        folder = locate(name)
        if (folder / "checkpoints").is_dir():
            folder = folder / "export"
            mirror.fetch(folder)
            require(folder.is_dir(), f"{name} has no export yet: finish the training by the same command again")
        has_path = (folder / "path.json").exists()
        is_alone = has_path and not model_folder.holds_base(folder)
        language_model = find_base_and_adapters(model_folder.base_name(folder) if is_alone else str(folder))
        if is_alone and (texts := model_folder.replaced_tokenizer(folder)):
            language_model = replace(language_model, texts=Path(texts))
        file = language_model.folder / "config.json"
        architecture = Architecture.from_hf(read_json(file), where=file)
        path = model_folder.find_path(folder, architecture) if has_path else None
        if has_path:
            model_folder.check_trained_path(folder)
        llm = base_model.open_weights(language_model, architecture)
        if isinstance(llm, peft.Adapted):
            llm = replace(llm, is_rounded=True)
        return cls(name, language_model, architecture, llm, path)


def export_model(model: str, out: Path, *, format: str, as_torch: bool = False) -> None:
    """Export a model folder, or a finished workdir, in one of `FORMATS`, completely or not at all.

    Raises `InputError`.
    """
    if as_torch and not format.startswith("l2d"):
        raise InputError(f"--torch is about the release's state dict: leave it out with --format {format}")
    with scratch_folder() as scratch:
        name, folder = model, locate(model)
        if publish.is_published(folder):  # the path's tensors are renamed as in the release
            name = str(scratch)
            model_folder.check_trained_path(folder)
            published = publish.TorchFolder.open(folder)
            model_folder.save_path(scratch, published.load(runtime.start_jax(MeshConfig())), base=published.base)
            if model_folder.replaced_tokenizer(folder):
                tokenizer_files.copy_tokenizer(folder, scratch)
        parts = replace(Parts.open(name), name=model)
        with output_folder(out) as partial_folder:
            FORMATS[format](parts, partial_folder, "pytorch_model.bin" if as_torch else "l2d.safetensors")


def copy_texts(language_model: BaseAndAdapters, out: Path) -> None:
    """Copy the config, tokenizer and chat template of a language model."""
    for file in itertools.chain.from_iterable(map(language_model.folder.glob, hub.TEXT_FILES)):
        if file.name not in REPLACED:
            shutil.copyfile(file, out / file.name)
    tokenizer_files.copy_tokenizer(language_model.tokenizer_folder, out)


def write_llm(llm: mapping.TensorSource, architecture: Architecture, out: Path) -> None:
    """Write the language model's weights, each in the dtype of its source."""
    write_safetensors(out, release.lazy_tensors(llm, mapping.llm_shapes(architecture)).items())


def save_adapter(folder: Path, trained: LLMAdapter, *, base: str, base_fingerprint: Fingerprint | None = None) -> None:
    """Write a trained adapter into an existing folder in PEFT's format. Process 0 writes; all processes must call."""
    config = peft.AdapterConfig(trained.config.rank, trained.config.alpha, trained.config.modules)
    tensors = {name: make() for name, make in mapping.tensors(trained, peft.ROWS)}
    if processes.is_first():
        peft.write_adapter(folder, config, tensors, base=absolute_name(base))
        digests.sign(folder / peft.WEIGHTS, base_fingerprint=base_fingerprint)


def save_llm(folder: Path, trained: LLM, base: ModelConfig, *, mesh: Mesh) -> None:
    """Write a trained model in the format of transformers, in `config.model.dtype`; all processes must call this."""
    trained = base_model.cast_llm(trained, dtype=base.dtype, mesh=mesh)
    tensors = mapping.tensors(trained, mapping.LLM_ROWS)
    if not processes.is_first():
        for _, make in tensors:  # process 0 needs the shards of this process
            make()
        return
    if base.name == "random":
        tokenizer.byte_tokenizer().save_pretrained(folder)
        options = dict(base.architecture or {})
        raw = {"model_type": SUPPORTED[options["architectures"][0]].model_type} | options
    else:
        language_model = find_base_and_adapters(base.name)
        copy_texts(language_model, folder)
        raw = read_json(language_model.folder / "config.json")
    kind = {"torch_dtype" if "torch_dtype" in raw else "dtype": base.dtype}
    (folder / "config.json").write_text(json.dumps(raw | kind, indent=2) + "\n")
    write_safetensors(folder, tensors)


def _release(parts: Parts, out: Path, file: str, *, is_full: bool = False) -> None:
    if parts.path is None:
        raise InputError(f"{parts.name} has no diffusion path: export it with --format hf")
    config, path = parts.path
    later = {f.name for f in fields(Architecture) if f.default is not MISSING}
    if unknown := [name for name in parts.architecture.options() if name in later]:
        problem = f"the base of {parts.name} has {', '.join(unknown)}, and the release knows Llama and Qwen 2"
        raise InputError(f"{problem}: export it with --format hf")
    for name in ("start", "reader", "time_scale"):
        if (found := getattr(config, name)) != (known := getattr(PathConfig, name)):
            problem = f"the path of {parts.name} has {name} {found!r}, which the release does not know"
            raise InputError(f"{problem}: train one with config.path.{name} {known!r}")
    trained = release.lazy_tensors(path, path.records)
    if is_full:
        if config.layers == "dense":
            raise InputError(f"the path of {parts.name} has full weights already: export it with --format l2d")
        trained = release.merge_lora(parts.llm, path, parts.architecture, config)
        config = replace(config, layers="dense")
    release.write_checkpoint(out / file, release.state_dict(parts.llm, trained, parts.architecture))
    options = {"family": "qwen2" if parts.architecture.qkv_bias else "llama", "l2d_kwargs": release.options(config)}
    (out / "l2d.json").write_text(json.dumps(options, indent=2) + "\n")


def _hugging_face(parts: Parts, out: Path, _file: str) -> None:
    copy_texts(parts.language_model, out)
    write_llm(parts.llm, parts.architecture, out)


def _peft(parts: Parts, out: Path, _file: str) -> None:
    folders = parts.language_model.adapters
    count = f"{len(folders)} stacked LoRA adapters" if folders else "no LoRA adapter"
    require(len(folders) == 1, f"the language model of {parts.name} has {count}: export it with another format")
    named = adapter_base(folders[0])
    folder = parts.language_model.folder
    peft.Adapter.open(folders[0], parts.architecture).write(out, base=named or absolute_name(str(folder)))
    digests.sign(out / peft.WEIGHTS, base_fingerprint=digests.source_fingerprint(SafetensorsFolder.open(folder)))


FORMATS: dict[str, Callable[[Parts, Path, str], None]] = {"l2d": _release, "l2d-full": partial(_release, is_full=True)}
FORMATS |= {"hf": _hugging_face, "peft": _peft}
