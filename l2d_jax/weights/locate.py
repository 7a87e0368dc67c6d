"""Where weights come from: folders in Hugging Face's layout, hub ids and GGUF files, whose conversions are cached."""

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from l2d_jax.errors import InputError
from l2d_jax.files import cache_folder, output_folder, read_json
from l2d_jax.weights import gguf_model, peft
from l2d_jax.weights.gguf_file import GGUFFile
from l2d_jax.weights.safetensors_file import write_safetensors

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model"]  # neither pickles nor code
NEARBY = "base_from_here"  # in a file that names its base: the path from the file's folder to it


def locate(name: str) -> Path:
    """The folder that `name` stands for: itself, the conversion of a GGUF file, or a download from the hub.

    Conversions are in bfloat16, and are kept in `files.cache_folder`.
    Raises `InputError` where there is no such folder or file, or where the download fails.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.suffix == ".gguf":
        return _converted(path)
    if not HUB_ID.fullmatch(name):
        raise InputError(f"{name!r} is neither a folder, nor a .gguf file, nor a hub id (org/name): check the path")
    import huggingface_hub  # here: only this branch needs it, and it reads the environment as it is imported

    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except Exception as error:  # the client raises those of its HTTP library, which changes, and many others
        reason = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise InputError(f"no folder {name!r}, nor could the hub give it ({reason}): give a local folder") from None


def convert_gguf(path: Path, out: Path, *, dtype: gguf_model.Dtype = "bfloat16") -> None:
    """Write a GGUF file as a Hugging Face folder into the existing empty folder `out`: config, weights, tokenizer.

    Raises `InputError` for a malformed file and for what this project does not support.
    """
    file = GGUFFile.open(path)
    for name, text in gguf_model.read_documents(file, dtype).items():
        (out / name).write_text(text, encoding="utf-8")
    write_safetensors(out, gguf_model.read_weights(file, dtype))


def _converted(path: Path) -> Path:
    """The cached conversion of a GGUF file, made on first use."""
    if not path.is_file():
        raise InputError(f"there is no file {path}: check the path")
    state = path.stat()
    identity = f"{path.resolve()}\n{state.st_size}\n{state.st_mtime_ns}\n{gguf_model.CONVERSION}"
    folder = cache_folder() / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    if not folder.is_dir():
        try:
            with output_folder(folder) as partial:
                convert_gguf(path, partial)
        except (InputError, OSError):
            if not folder.is_dir():  # else another process was faster
                raise
    return folder


@dataclass(frozen=True)
class BaseAndAdapters:
    """The folders of a language model: its base, and the LoRA adapters that are added to it."""

    folder: Path  # of the base: config and weights
    adapters: tuple[Path, ...]  # in the order in which they are added

    @property
    def tokenizer_folder(self) -> Path:
        """The last folder that has a tokenizer: an adapter may have been trained with its own."""
        folders = [self.folder, *self.adapters]
        return next((folder for folder in reversed(folders) if (folder / "tokenizer.json").exists()), self.folder)


def find_base_and_adapters(name: str) -> BaseAndAdapters:
    """Follow adapters to the base that each names; raises `InputError` where a folder on the way is missing."""
    adapters: list[Path] = []
    folder = _locate(name, adapters)
    while not (folder / "config.json").exists() and peft.has_adapter(folder):
        if folder in adapters:
            raise InputError(f"{folder} is its own base: mend base_model_name_or_path in its {peft.CONFIG}")
        adapters.insert(0, folder)
        folder = _locate(read_base_name(folder / peft.CONFIG, "base_model_name_or_path"), adapters)
    if peft.has_adapter(folder):
        adapters.insert(0, folder)
    return BaseAndAdapters(folder, tuple(adapters))


def absolute_name(name: str) -> str:
    """The absolute path of a base in a local folder or GGUF file; a hub id or "random" as it is."""
    path = Path(name).expanduser()
    is_local = path.is_dir() or (path.suffix == ".gguf" and path.is_file())
    return str(path.resolve()) if is_local and name != "random" else name


def base_record(name: str, folder: Path) -> dict[str, str]:
    """The entries by which a file in `folder` names a base, wherever the file is read from: see `read_base_name`.

    A local base is recorded by its absolute path, which holds when the folder alone is moved, and by the path from the
    folder, which holds when both are moved together, or are mounted elsewhere. A hub id stays as it is.
    """
    absolute = absolute_name(name)
    nearby = {NEARBY: os.path.relpath(absolute, folder.resolve())} if Path(absolute).is_absolute() else {}
    return {"base": absolute, **nearby}


def read_base_name(file: Path, key: str = "base", *, what: str | None = None) -> str:
    """The base that a file names under a key.

    Where the file has no `base_from_here` (PEFT's, and those of former versions), a path is relative to the working
    directory.
    Raises `InputError` for random weights, which are in no folder, and for a local base that is missing.

    Args:
      file: a JSON file.
      key: under which it names its base.
      what: what the file has to name, in words.
    """
    record = read_json(file)
    name, nearby = record.get(key), record.get(NEARBY)
    if not isinstance(name, str) or not name:
        raise InputError(f"{file} must name {what or f'the base in {key}'}, got {name!r}: add it")
    if name == "random":
        raise InputError(f"the base of {file.parent} is random weights, which only a workdir can make again: give that")
    if not isinstance(nearby, str) or Path(name).exists():
        return name
    if not (file.parent / nearby).exists():
        problem = f"the base of {file.parent} is neither at {name} nor at {nearby} from there"
        raise InputError(f"{problem}: put it back, or give its folder as {key} in {file}")
    return str((file.parent / nearby).resolve())


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
