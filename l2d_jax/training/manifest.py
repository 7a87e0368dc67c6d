"""The manifest of a checkpoint: the size and hash of each file, and the shape and type of each array.

orbax restores whatever its files contain, so it does not notice a flipped bit. The manifest is written last, so a
folder without one was cut off. It is written only when every other file is on the disk, so it is also right after a
power cut. Its hashes detect accidents; they do not protect from an attacker.
"""

import json
from collections.abc import Mapping
from typing import Any, NotRequired, TypeAlias

import xxhash
from typing_extensions import TypedDict

from l2d_jax.errors import shorten
from l2d_jax.files import Fingerprint, check, digest
from l2d_jax.storage.bucket import Bucket, BucketError
from l2d_jax.storage.disk import Disk

NAME = "manifest.json"
Arrays: TypeAlias = dict[str, dict[str, dict[str, Any]]]  # [tree][name]: {"shape": [...], "dtype": "..."}


class _Content(TypedDict):
    step: int
    inputs: NotRequired[dict[str, str]]
    files: dict[str, dict[str, Any]]  # per file name: its size, and its hash under the name of the hash function
    arrays: Arrays


class DamagedError(Exception):
    """A checkpoint has changed since it was saved; the message says what is wrong."""


def array_specs(trees: Mapping[str, Mapping[str, Any]]) -> Arrays:
    """The shape and dtype of each array of named trees; a tree is a dictionary from names to arrays."""
    return {
        name: {leaf: {"shape": list(array.shape), "dtype": str(array.dtype)} for leaf, array in tree.items()}
        for name, tree in trees.items()
    }


def write_manifest(folder: Disk | Bucket, step: int, arrays: Arrays, inputs: Fingerprint) -> None:
    """Flush the files of a step to the disk and write their manifest, which records `inputs`; raises `OSError`."""
    folder.settle(str(step))
    kind, there = folder.checksum, folder.files(str(step))
    files = {name: {"size": file.size, kind: file.digest(kind)} for name, file in there.items()}
    content = {"step": step, "inputs": dict(inputs), "files": files, "arrays": arrays}
    text = json.dumps({"xxh3": _hash(content), "manifest": content}, indent=1) + "\n"
    folder.write(f"{step}/{NAME}", text.encode())


def read_manifest(folder: Disk | Bucket, step: int) -> tuple[Arrays, Fingerprint]:
    """The arrays of a step, and the inputs it was trained from, if known; raises `DamagedError`."""
    content = _content(folder, step)
    return content["arrays"], content.get("inputs", {})


def fingerprint(folder: Disk | Bucket, step: int) -> str:
    """A hash of all files of a step; call `verify` first."""
    return digest(_content(folder, step)["files"])


def verify(folder: Disk | Bucket, step: int) -> None:
    """Raise `DamagedError` unless all files of a step are as saved. A `BucketError` says nothing about the files."""
    wanted = _content(folder, step)["files"]
    try:
        files = folder.files(str(step))
        for name, saved in wanted.items():
            if name not in files:
                raise DamagedError(f"{name} is missing")
            if files[name].size < 0:
                raise DamagedError(f"{name} is a link that leads nowhere")
            if files[name].size != saved["size"]:
                raise DamagedError(f"{name} has {files[name].size} bytes, and had {saved['size']}")
            checksum = "xxh3" if "xxh3" in saved else "crc32c"
            if files[name].digest(checksum) != saved[checksum]:
                raise DamagedError(f"{name} has changed since it was saved")
    except BucketError:
        raise
    except OSError as error:
        raise DamagedError(f"{shorten(str(error.filename), 80)} cannot be read ({error.strerror})") from error


def _content(folder: Disk | Bucket, step: int) -> dict[str, Any]:
    try:
        whole = json.loads(folder.read(f"{step}/{NAME}").decode())
        if _hash(whole["manifest"]) != whole["xxh3"]:
            raise ValueError
        content: dict[str, Any] = check(whole["manifest"], _Content, NAME)
    except FileNotFoundError:
        raise DamagedError(f"it has no {NAME}: its save was cut off, or has not ended") from None
    except BucketError:
        raise
    except OSError as error:
        raise DamagedError(f"{NAME} cannot be read ({error.strerror})") from error
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DamagedError(f"{NAME} is cut off or has changed since it was saved") from None
    if content["step"] != step:
        raise DamagedError(f"its {NAME} is that of step {content['step']}")
    return content


def _hash(content: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))
