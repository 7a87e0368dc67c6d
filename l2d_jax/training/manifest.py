"""The manifest of a checkpoint: the size and hash of each file, and the shape and type of each array.

orbax restores whatever its files say, so a flipped bit goes unnoticed. The manifest is written last, so that a folder
without one is known to have been cut off; and only once every other file is on the disk, so that it is right after a
power cut too. Its hashes notice accidents; they do not protect from an attacker.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import xxhash

from l2d_jax.files import sync, write_whole
from l2d_jax.fingerprint import Fingerprint, digest

NAME = "manifest.json"

Arrays: TypeAlias = dict[str, dict[str, dict[str, Any]]]  # by tree and by name: {"shape": [...], "dtype": "..."}


class DamagedError(Exception):
    """A checkpoint that is not as it was saved; the message says what is wrong."""


def array_specs(trees: Mapping[str, Mapping[str, Any]]) -> Arrays:
    """The shape and type of each array of named trees; a tree is a dictionary of arrays by name."""
    return {
        name: {leaf: {"shape": list(array.shape), "dtype": str(array.dtype)} for leaf, array in tree.items()}
        for name, tree in trees.items()
    }


def write_manifest(folder: Path, step: int, arrays: Arrays, inputs: Fingerprint) -> None:
    """Put the complete files of a step on the disk, and write their manifest; raises `OSError`.

    `inputs` is the fingerprint of what the step was trained from.
    """
    files = {}
    for path in sorted(folder.rglob("*")):
        sync(path)
        if not path.is_dir():
            files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "xxh3": _hash_file(path)}
    content = {"step": step, "inputs": dict(inputs), "files": files, "arrays": arrays}
    write_whole(folder / NAME, json.dumps({"xxh3": _hash(content), "manifest": content}, indent=1) + "\n")
    sync(folder.parent)


def read_manifest(folder: Path) -> tuple[Arrays, Fingerprint]:
    """The arrays of the step in `folder`, and what it was trained from (nothing, if a former version saved it).

    Raises `DamagedError` if the manifest is missing, cut off or altered.
    """
    content = _content(folder)
    return content["arrays"], content.get("inputs", {})


def fingerprint(folder: Path) -> str:
    """A hash of all files of a step, of which `verify` says that they are as they were saved."""
    return digest(_content(folder)["files"])


def verify(folder: Path) -> None:
    """Read every file of the step in `folder`; raises `DamagedError` unless all are as they were saved.

    Files that are not in the manifest are ignored.
    """
    for name, saved in _content(folder)["files"].items():
        path = folder / name
        try:
            size = path.stat().st_size
            if size != saved["size"]:
                raise DamagedError(f"{name} has {size} bytes, and had {saved['size']}")
            if _hash_file(path) != saved["xxh3"]:
                raise DamagedError(f"{name} has changed since it was saved")
        except FileNotFoundError:
            raise DamagedError(f"{name} is missing") from None
        except OSError as error:
            raise DamagedError(f"{name} cannot be read ({error.strerror})") from error


def _content(folder: Path) -> dict[str, Any]:
    try:
        whole = json.loads((folder / NAME).read_text())
        if _hash(whole["manifest"]) != whole["xxh3"]:
            raise ValueError
    except FileNotFoundError:
        raise DamagedError(f"it has no {NAME}: its save was cut off, or has not ended") from None
    except OSError as error:
        raise DamagedError(f"{NAME} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{NAME} is cut off or has changed since it was saved") from None
    content: dict[str, Any] = whole["manifest"]
    if str(content["step"]) != folder.name:
        raise DamagedError(f"its {NAME} is that of step {content['step']}")
    return content


def _hash_file(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def _hash(content: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))
