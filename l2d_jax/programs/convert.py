"""Writes model folders, and models for other programs."""

import dataclasses
from argparse import Namespace
from pathlib import Path

from l2d_jax.config.schema import MeshConfig, ModelConfig
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, about, require
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.storage import mirror
from l2d_jax.storage.partial import output_folder
from l2d_jax.weights import base_model, digests, locate, model_folder, publish, release
from l2d_jax.weights.export import copy_texts, export_model, write_llm
from l2d_jax.weights.peft import WEIGHTS, Adapter
from l2d_jax.weights.peft_config import adapter_base
from l2d_jax.weights.safetensors_file import SafetensorsFolder


def run(options: Namespace) -> None:
    """Import, export or publish, and print what was written."""
    if options.command == "publish":
        from l2d_jax.reports.publication import publish_run  # here: it draws figures, which takes matplotlib

        print(publish_run(options.workdir, options.repo, base=options.base, dry_run=options.dry_run))
        return
    if options.command == "export":
        export_model(options.model, options.out, format=options.format, as_torch=options.torch)
    else:
        l2d = None if options.l2d is None else (options.l2d, options.hyperparameters)
        import_model(options.base, options.out, l2d=l2d, adapter=options.adapter)
    print(f"wrote {mirror.shown_places(str(options.out))}")


def import_model(base: str, out: Path, *, l2d: tuple[Path, Path] | None = None, adapter: Path | None = None) -> None:
    """Write a model folder, completely or not at all; every tensor keeps its bits. Raises `InputError`.

    `l2d` is a checkpoint of the release and its hyper-parameters; the LM in the checkpoint replaces the base's.
    """
    published = None
    if publish.is_published(located := locate.locate(base)):
        published = publish.TorchFolder.open(located)
        require(l2d is None and adapter is None, f"{base} is a published path already: leave --l2d and --adapter out")
    language_model = locate.find_base_and_adapters(base if published is None else published.base)
    if published is not None and model_folder.replaced_tokenizer(located):
        language_model = dataclasses.replace(language_model, texts=located)
    folder, adapters = language_model.folder, language_model.adapters
    architecture = Architecture.from_hf(read_json(folder / "config.json"), where=folder / "config.json")
    if len(adapters) > 1 or (adapters and adapter is not None):
        command = f"python -m l2d_jax.convert export --model {base} --format hf --out DIR"
        problem = f"a model folder has one adapter, and {base} has {len(adapters)} already"
        raise InputError(f"{problem}: add them up first ({command}) and give that folder")
    adapter = adapters[0] if adapters else adapter
    if adapter is not None and l2d is not None:
        raise InputError(f"the weights of {l2d[0]} include those of the LM: leave the adapter in {adapter} out")
    with output_folder(out) as partial:
        copy_texts(language_model, partial)
        if l2d is not None:
            with about(l2d[1]):
                config = release.parse_hyperparameters(read_json(l2d[1]))
            checkpoint = release.open_checkpoint(l2d[0])
            with about(l2d[0]):
                _, trained = release.check_checkpoint(checkpoint, architecture, config)
            write_llm(checkpoint, architecture, partial)
            with_path = base_model.find_base(ModelConfig(name=str(partial))).fingerprint
            tensors = release.lazy_tensors(checkpoint, trained)
            model_folder.write_path(partial, tensors, config, base=base, base_fingerprint=with_path)
            return
        source = SafetensorsFolder.open(folder)
        with about(folder):
            base_model.check_llm(source, architecture)
        write_llm(source, architecture, partial)
        if adapter is not None:
            digests.check_signature(adapter / WEIGHTS, source)
            recorded = adapter_base(adapter) if adapters else None
            Adapter.open(adapter, architecture).write(partial, base=recorded or locate.absolute_name(base))
            written = SafetensorsFolder.open(partial)  # without unused tensors of the base
            digests.sign(partial / WEIGHTS, base_fingerprint=digests.source_fingerprint(written))
        if published is not None:
            fingerprint = base_model.find_base(ModelConfig(name=str(partial))).fingerprint
            path = published.load(runtime.start_jax(MeshConfig()))
            model_folder.save_path(partial, path, base=published.base, base_fingerprint=fingerprint)
