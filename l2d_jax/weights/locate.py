"""Finds weights: folders in Hugging Face's layout, hub ids, and GGUF files, whose conversions are cached."""

import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import cache_folder, digest, identity, read_json
from l2d_jax.storage import mirror
from l2d_jax.storage.bucket import SCHEME
from l2d_jax.storage.partial import output_folder
from l2d_jax.weights import gguf_model, hub, peft
from l2d_jax.weights.gguf_file import GGUFFile
from l2d_jax.weights.hub import HUB_ID
from l2d_jax.weights.peft_config import CONFIG, adapter_base
from l2d_jax.weights.safetensors_file import write_safetensors

NEARBY = "base_from_here"  # key in a file that names a base: the relative path from the file's folder to the base
RANDOM = "random weights, which only a workdir can make again: give that"
ON_HUB = "base_on_hub"  # key in such a file: whether the base is a hub id


def locate(name: str, *, files: list[str] = hub.FILES) -> Path:
    """The folder of `name`: itself, the conversion of a GGUF file, or a download of `files` from the hub.

    If the first part of a name is a local folder, the name is a path and is not looked up on the hub, where somebody
    else may have registered it.
    """
    hub_id = name.removeprefix(hub.HUB)
    if name.startswith(SCHEME):
        return mirror.open_folder(name)
    if hub_id == name:
        path = Path(os.path.expanduser(name))
        if os.path.isdir(path):
            return path
        if path.suffix == ".gguf":
            return _converted(path)
        if HUB_ID.fullmatch(name) and os.path.isdir(path.parent):
            raise InputError(f"{path.parent} has no folder {path.name}: check the path, or give {hub.HUB}{name}")
    kinds = "neither a folder, nor a .gguf file, nor a hub id (org/name)"
    require(HUB_ID.fullmatch(hub_id) is not None, f"{shown(name)} is {kinds}: check the path")
    return hub.download(hub_id, files)


def convert_gguf(path: Path, out: Path, *, dtype: gguf_model.Dtype = "bfloat16") -> None:
    """Convert a GGUF file to a Hugging Face folder, in the existing empty folder `out`; raises `InputError`."""
    file = GGUFFile.open(path)
    for name, text in gguf_model.read_documents(file, dtype).items():
        (out / name).write_text(text, encoding="utf-8")
    write_safetensors(out, gguf_model.read_weights(file, dtype))


def _converted(path: Path) -> Path:
    require(os.path.isfile(path), f"there is no file {path}: check the path")
    folder = cache_folder() / f"{path.stem}-{digest([*identity(path), gguf_model.CONVERSION])[:16]}"
    if not folder.is_dir():
        try:
            with output_folder(folder) as partial:
                convert_gguf(path, partial)
        except (InputError, OSError):
            if not folder.is_dir():  # otherwise another process was faster
                raise
    return folder


@dataclass(frozen=True)
class BaseAndAdapters:
    """The folders of a language model: its base and its LoRA adapters."""

    folder: Path  # folder of the base: config and weights
    adapters: tuple[Path, ...]  # in the order in which they are added
    texts: Path | None = None  # folder of a tokenizer that replaces theirs

    @property
    def tokenizer_folder(self) -> Path:
        """The last folder with a tokenizer: an adapter may have been trained with another tokenizer than its base."""
        if self.texts is not None:
            return self.texts
        folders = (*reversed(self.adapters), self.folder)
        return next((folder for folder in folders if (folder / "tokenizer.json").exists()), self.folder)


def find_base_and_adapters(name: str, *, files: list[str] = hub.FILES) -> BaseAndAdapters:
    """Follow adapters to the bases that they name; raises `InputError` if a folder on the way is missing."""
    adapters: list[Path] = []
    folder = _locate(name, adapters, files)
    while (folder / CONFIG).exists() or (folder / peft.WEIGHTS).exists():
        require(folder not in adapters, f"{folder} is its own base: fix base_model_name_or_path in its {CONFIG}")
        adapters.insert(0, folder)
        if (folder / "config.json").exists():
            break
        base = adapter_base(folder)
        if base is None:
            raise InputError(f"{folder / CONFIG} names no base: give it as base_model_name_or_path")
        require(base != "random", f"the base of {folder} is {RANDOM}")
        folder = _locate(base, adapters, files)
    return BaseAndAdapters(folder, tuple(adapters))


def absolute_name(name: str) -> str:
    """The absolute path of a base in a local folder or GGUF file; a hub id or "random" is returned unchanged."""
    path = Path(os.path.expanduser(name))  # os.path, because methods of Path raise errors for names with other bytes
    is_local = os.path.isdir(path) or (path.suffix == ".gguf" and os.path.isfile(path))
    return str(path.resolve()) if is_local and name != "random" else name.removeprefix(hub.HUB)


def base_record(name: str, folder: Path) -> dict[str, Any]:
    """The entries with which a file in `folder` names a base, so that it is found even after folders were moved."""
    absolute = absolute_name(name)
    if Path(absolute).is_absolute():
        return {"base": absolute, NEARBY: os.path.relpath(absolute, folder.resolve())}
    return {"base": absolute, ON_HUB: True} if HUB_ID.fullmatch(absolute) else {"base": absolute}


def read_base_name(file: Path, *, what: str = "the base in base") -> str:
    """The base that a file names; a hub id begins with `HUB`. Raises an `InputError` that calls the base `what`.

    Files of earlier versions do not say whether `org/name` is a folder or a hub id; there it is a path relative to the
    working directory.
    """
    record = read_json(file)
    name, nearby = record.get("base"), record.get(NEARBY)
    if not isinstance(name, str) or not name or not isinstance(nearby, str | None):
        problem = f"base {shown(name)} and {NEARBY} {shown(nearby)}" if nearby else shown(name)
        raise InputError(f"{file} must name {what}, got {problem}: add it")
    if name == "random":
        raise InputError(f"the base of {file.parent} is {RANDOM}")
    if record.get(ON_HUB) is True:
        return hub.HUB + name
    if name.startswith(SCHEME) or os.path.exists(os.path.expanduser(name)):
        return name
    if nearby is None:
        raise missing_base(name, file)
    problem = f"the base of {file.parent} is neither at {shown(name)} nor at {shown(nearby)} from there"
    require(os.path.exists(file.parent / nearby), f"{problem}: put it back, or give its folder as base in {file}")
    return str((file.parent / nearby).resolve())


def missing_base(name: str, file: Path) -> InputError:
    """The error for a missing base whose record is absent or was written by an earlier version."""
    remedy = f'give its folder as "base" in {file}'
    if HUB_ID.fullmatch(name):
        remedy += f', with "{ON_HUB}": true if it is a hub id'
    return InputError(f"the base of {file.parent} is {shown(name)}, and there is no such folder here: {remedy}")


def _locate(name: str, adapters: list[Path], files: list[str]) -> Path:
    try:
        folder = locate(name, files=files)
    except InputError as error:
        if not adapters:
            raise
        raise InputError(f"the base of {adapters[0]}: {error}; a relative path is read from here") from None
    for file in itertools.chain.from_iterable(map(folder.glob, hub.FILES)):
        # Reading a FIFO would never end, and a broken link would look like an absent file.
        require(file.is_file(), f"{file} is no file, or a link to none: remove it, or download the model again")
    config = folder / "config.json"
    if (folder / "checkpoints").is_dir() and config.exists() and "train" in read_json(config):
        raise InputError(f"{folder} is a workdir of training, not a language model: give its {folder / 'export'}")
    return folder
