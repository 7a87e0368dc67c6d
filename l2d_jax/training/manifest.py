"""The manifest of a checkpoint: the size and hash of each file, and the shape and type of each array.

orbax restores whatever its files say, so a flipped bit goes unnoticed. The manifest is written last, so that a folder
without one is known to have been cut off; and only once every other file is on the disk, so that it is right after a
power cut too. Its hashes notice accidents; they do not protect from an attacker.
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
Arrays: TypeAlias = dict[str, dict[str, dict[str, Any]]]  # by tree and by name: {"shape": [...], "dtype": "..."}


class _Content(TypedDict):
    step: int
    inputs: NotRequired[dict[str, str]]
    files: dict[str, dict[str, Any]]  # by name: the size, and the hash under its kind
    arrays: Arrays


class DamagedError(Exception):
    """A checkpoint that is not as it was saved; the message says what is wrong."""


def array_specs(trees: Mapping[str, Mapping[str, Any]]) -> Arrays:
    """The shape and type of each array of named trees; a tree is a dictionary of arrays by name."""
    return {
        name: {leaf: {"shape": list(array.shape), "dtype": str(array.dtype)} for leaf, array in tree.items()}
        for name, tree in trees.items()
    }


def write_manifest(folder: Disk | Bucket, step: int, arrays: Arrays, inputs: Fingerprint) -> None:
    """Put the files of a step, trained from `inputs`, on the disk, and write their manifest; raises `OSError`."""
    folder.settle(str(step))
    kind, there = folder.checksum, folder.files(str(step))
    files = {name: {"size": file.size, kind: file.digest(kind)} for name, file in there.items()}
    content = {"step": step, "inputs": dict(inputs), "files": files, "arrays": arrays}
    text = json.dumps({"xxh3": _hash(content), "manifest": content}, indent=1) + "\n"
    folder.write(f"{step}/{NAME}", text.encode())


def read_manifest(folder: Disk | Bucket, step: int) -> tuple[Arrays, Fingerprint]:
    """The arrays of a step, and what it was trained from, if that is known; raises `DamagedError`."""
    content = _content(folder, step)
    return content["arrays"], content.get("inputs", {})


def fingerprint(folder: Disk | Bucket, step: int) -> str:
    """A hash of all files of a step, of which `verify` says that they are as they were saved."""
    return digest(_content(folder, step)["files"])


def verify(folder: Disk | Bucket, step: int) -> None:
    """Raise `DamagedError` unless all files of a step are as they were saved; `BucketError` says nothing of them."""
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
