"""Converts models: `python -m l2d_jax.convert import …`, `… export …` and `… publish …`.

`import` makes a model folder from a Hugging Face folder, hub id or GGUF file, with the path of a checkpoint of the
authors' release, or a LoRA adapter of PEFT, beside it; or from a published folder, which PyTorch may have trained on.
`export` writes a model folder for other programs: the release (`l2d`, `l2d-full`), transformers (`hf`), PEFT (`peft`).
`publish` uploads what a run has trained to the hub, as a folder that this package and transformers alone can load.
"""

import dataclasses
from pathlib import Path

from l2d_jax import command_line
from l2d_jax.command_line import folder_or_bucket, local_path, model_name
from l2d_jax.config.schema import MeshConfig, ModelConfig
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, about, require
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.reports.publication import publish_run
from l2d_jax.storage import mirror
from l2d_jax.storage.partial import output_folder
from l2d_jax.weights import base_model, digests, locate, model_folder, publish, release
from l2d_jax.weights.export import FORMATS, copy_texts, export_model, write_llm
from l2d_jax.weights.peft import WEIGHTS, Adapter
from l2d_jax.weights.peft_config import adapter_base
from l2d_jax.weights.safetensors_file import SafetensorsFolder


def main() -> None:
    """Parse the command line and convert."""
    parser = command_line.Parser(prog="python -m l2d_jax.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=command_line.Parser)
    importing = commands.add_parser("import", help="make a model folder")
    base = "a Hugging Face folder, a hub id or a GGUF file"
    importing.add_argument("--base", type=model_name, required=True, help=base)
    importing.add_argument("--l2d", type=local_path, help="a checkpoint of the authors' release")
    importing.add_argument("--hyperparameters", type=local_path, help="its keyword arguments, as JSON")
    adapter = "a folder with a LoRA adapter of the base, as PEFT writes it"
    importing.add_argument("--adapter", type=local_path, help=adapter)
    exporting = commands.add_parser("export", help="write a model for other programs")
    model = "a model folder, or a workdir that has finished"
    exporting.add_argument("--model", type=model_name, required=True, help=model)
    exporting.add_argument("--format", required=True, choices=list(FORMATS), help="for which program")
    exporting.add_argument("--torch", action="store_true", help="l2d, l2d-full: as pytorch_model.bin; needs torch")
    for command in (importing, exporting):
        command.add_argument("--out", type=folder_or_bucket, required=True, help="a new folder")
    publishing = commands.add_parser("publish", help="upload a trained path to the hub")
    publishing.add_argument("--workdir", type=folder_or_bucket, required=True, help="of a training that has finished")
    publishing.add_argument("--repo", type=model_name, required=True, help="its name on the hub, org/name")
    at_base = "the base on the hub, org/name@revision, where it was trained on a folder; its newest revision"
    publishing.add_argument("--base", type=model_name, help=at_base)
    publishing.add_argument("--dry_run", type=local_path, help="a new folder: write there, and upload nothing")
    options = parser.parse_args()
    if options.command == "publish":
        print(publish_run(options.workdir, options.repo, base=options.base, dry_run=options.dry_run))
        return
    if options.command == "export":
        export_model(options.model, options.out, format=options.format, as_torch=options.torch)
    else:
        if (options.l2d is None) != (options.hyperparameters is None):
            raise InputError("--l2d and --hyperparameters go together: give both or neither")
        l2d = None if options.l2d is None else (options.l2d, options.hyperparameters)
        import_model(options.base, options.out, l2d=l2d, adapter=options.adapter)
    print(f"wrote {mirror.shown_places(str(options.out))}")


def import_model(base: str, out: Path, *, l2d: tuple[Path, Path] | None = None, adapter: Path | None = None) -> None:
    """Write a model folder, complete or not at all; every tensor keeps its bits. Raises `InputError`.

    `l2d` is a checkpoint of the release, whose LM replaces the base's, and its hyper-parameters.
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
            written = SafetensorsFolder.open(partial)  # without the tensors of the base that are not used
            digests.sign(partial / WEIGHTS, base_fingerprint=digests.source_fingerprint(written))
        if published is not None:
            fingerprint = base_model.find_base(ModelConfig(name=str(partial))).fingerprint
            path = published.load(runtime.start_jax(MeshConfig()))
            model_folder.save_path(partial, path, base=published.base, base_fingerprint=fingerprint)


if __name__ == "__main__":
    command_line.run(main)
