"""Files of JSON, in which no key may be repeated, and files and folders that are complete or absent."""

import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from l2d_jax.errors import InputError


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; raises `InputError` if the file is unreadable or malformed, or repeats a key."""
    try:
        return parse_json(path.read_bytes(), path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None


def parse_json(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, which is from the file at `path`; raises `InputError` as `read_json` does."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"repeated key {Counter(key for key, _ in pairs).most_common(1)[0][0]!r}")
        return dict(pairs)

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: malformed JSON ({str(error).partition(chr(10))[0]}): download it again") from None
    if not isinstance(value, dict):
        raise InputError(f"{path}: malformed JSON ({type(value).__name__} in place of an object): download it again")
    return value


def cache_folder() -> Path:
    """The one folder for what can be computed again: compiled programs, converted GGUF files, estimates.

    It is `$L2D_JAX_CACHE`, else `$XDG_CACHE_HOME/l2d_jax`, else `~/.cache/l2d_jax`.
    """
    if chosen := os.environ.get("L2D_JAX_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "l2d_jax"


def write_whole(path: Path, text: str) -> None:
    """Replace a file by `text`, on the disk: a kill or a loss of power leaves the old file or the new one, whole."""
    written = path.with_name(f"{path.name}.partial")
    with written.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)
    sync(path.parent)


def complete_lines(path: Path) -> list[str]:
    """The lines of a file with their line ends, without a last line that was cut off; none if there is no file."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of files, is on the disk and not in memory alone."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` that takes its place on success and is removed on an error: complete or absent.

    A killed process leaves `.NAME.*.partial` behind. Raises `InputError` if `path` exists or cannot be made.
    """
    path = path.resolve()
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"output goes into a new or empty folder, and {path} is neither: remove it or choose another")
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
    except OSError as error:
        raise InputError(f"cannot create a folder in {path.parent} ({error.strerror}): choose another place") from None
    try:
        yield partial
        partial.rename(path)  # takes the place of an empty folder, and of nothing else
    finally:
        shutil.rmtree(partial, ignore_errors=True)
