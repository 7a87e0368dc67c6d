"""Where a language model comes from: the folder of its weights, and the LoRA adapters that are added to them.

A folder that holds an adapter alone, as PEFT and LoRA training leave it, names its base, which may be such a folder
again; a relative name is relative to the working directory, as for PEFT. The chain is followed to the weights, and
nothing is added up on disk.
"""

from dataclasses import dataclass
from pathlib import Path

from l2d_jax import adapter
from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.sources import locate


@dataclass(frozen=True)
class Lineage:
    """The parts of a language model, none of which has been read."""

    folder: Path  # of config and weights
    adapters: tuple[Path, ...]  # folders of those to add, in this order

    @property
    def texts(self) -> Path:
        """The folder of the tokenizer: the last that has one."""
        folders = [self.folder, *self.adapters]
        return next((folder for folder in reversed(folders) if (folder / "tokenizer.json").exists()), self.folder)


def follow(name: str) -> Lineage:
    """The lineage of a folder, hub id or GGUF file; raises `InputError` where a folder of the chain is missing."""
    adapters: list[Path] = []
    folder = _locate(name, adapters)
    while not (folder / "config.json").exists() and adapter.has_adapter(folder):
        if folder in adapters:
            raise InputError(f"{folder} is its own base: mend base_model_name_or_path in its {adapter.CONFIG}")
        adapters.insert(0, folder)
        folder = _locate(named_base(folder / adapter.CONFIG, "base_model_name_or_path"), adapters)
    if adapter.has_adapter(folder):
        adapters.insert(0, folder)
    return Lineage(folder, tuple(adapters))


def named_base(file: Path, key: str, *, what: str | None = None) -> str:
    """The base that a file names under a key; raises `InputError` for random weights, which are in no folder.

    `what` says in words what the file has to name.
    """
    name = read_json(file).get(key)
    if not isinstance(name, str) or not name:
        raise InputError(f"{file} must name {what or f'the base in {key}'}, got {name!r}: add it")
    if name == "random":
        raise InputError(f"the base of {file.parent} is random weights, which only a workdir can make again: give that")
    return name


def _locate(name: str, adapters: list[Path]) -> Path:
    try:
        folder = locate(name)
    except InputError as error:
        if not adapters:
            raise
        raise InputError(f"the base of {adapters[0]}: {error}; a relative path is read from here") from None
    config = folder / "config.json"
    if (folder / "checkpoints").is_dir() and config.exists() and "train" in read_json(config):
        raise InputError(f"{folder} is a workdir of training, not a language model: give its {folder / 'export'}")
    return folder
