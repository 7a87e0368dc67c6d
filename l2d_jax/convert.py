"""Converts models: `python -m l2d_jax.convert import --base FOLDER --l2d FILE --hyperparameters FILE --out DIR`.

`import` makes a model folder from a Hugging Face folder, hub id or GGUF file, with the path of a checkpoint of the
authors' release beside it.
"""

import shutil
from pathlib import Path

from l2d_jax import command_line, models, release
from l2d_jax.architecture import Architecture
from l2d_jax.errors import InputError
from l2d_jax.files import output_folder, read_json
from l2d_jax.safetensors_file import SafetensorsFolder, write_safetensors
from l2d_jax.sources import locate

# What is taken over from the base's folder besides the weights; never code, never pickles.
KEPT = ("*.json", "*.txt", "*.jinja", "tokenizer.model")
REPLACED = ("model.safetensors.index.json", "path.json")  # of shards and of a path that are not taken over


def main() -> None:
    """Parse the command line and convert."""
    parser = command_line.Parser(prog="python -m l2d_jax.convert", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=command_line.Parser)
    importing = commands.add_parser("import", help="make a model folder")
    importing.add_argument("--base", required=True, help="a Hugging Face folder, a hub id or a GGUF file")
    importing.add_argument("--l2d", type=Path, help="a checkpoint of the authors' release")
    importing.add_argument("--hyperparameters", type=Path, help="its keyword arguments, as JSON")
    importing.add_argument("--out", type=Path, required=True, help="a new folder")
    options = parser.parse_args()
    if (options.l2d is None) != (options.hyperparameters is None):
        raise InputError("--l2d and --hyperparameters go together: give both or neither")
    import_model(options.base, options.out, l2d=options.l2d, hyperparameters=options.hyperparameters)
    print(f"wrote {options.out}")


def import_model(base: str, out: Path, *, l2d: Path | None = None, hyperparameters: Path | None = None) -> None:
    """Write a model folder, complete or not at all; every tensor keeps its bits.

    With a checkpoint of the release the LM's weights are the checkpoint's own, which holds the whole model.
    Raises `InputError` for anything malformed, missing or extra, naming file and tensor.
    """
    folder = locate(base)
    architecture = Architecture.from_hf(read_json(folder / "config.json"))
    with output_folder(out) as partial:
        for pattern in KEPT:
            for file in folder.glob(pattern):
                if file.name not in REPLACED:
                    shutil.copyfile(file, partial / file.name)
        if l2d is None or hyperparameters is None:
            source = SafetensorsFolder.open(folder)
            names = models.check_llm(source, architecture)
            write_safetensors(partial, release.named(source, names))
            return
        config = release.path_config(read_json(hyperparameters))
        checkpoint = release.open_checkpoint(l2d)
        own, trained = release.check_checkpoint(checkpoint, architecture, config)
        write_safetensors(partial, release.named(checkpoint, own))
        models.write_path(partial, dict(release.named(checkpoint, trained)), config, base=base)


if __name__ == "__main__":
    command_line.run(main)
