"""A folder on a disk of this machine, with the same methods as a folder in a bucket (`storage/bucket.py`).

Names are paths relative to the folder, with slashes. No method renames a folder, because file systems that mount a
bucket refuse that.
"""

import base64
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, ClassVar, NamedTuple

import xxhash

from l2d_jax.errors import InputError
from l2d_jax.files import open_file, read_bytes, sync, write_whole


class File(NamedTuple):
    """The entry of a file in a listing."""

    size: int  # bytes; -1 for a broken link
    digest: Callable[[str], str]  # its checksum: "xxh3", or "crc32c" in base 64 as in buckets; raises `OSError`


@dataclass(frozen=True)
class Disk:
    """A folder, which need not exist. All methods raise `OSError`."""

    root: Path
    checksum: ClassVar[str] = "xxh3"  # the fastest one

    def __str__(self) -> str:
        return str(self.root)

    def names(self) -> list[str]:
        """The names of files and folders directly in this folder; empty if the folder does not exist."""
        return [path.name for path in self.root.iterdir()] if self.root.is_dir() else []

    def files(self, folder: str) -> dict[str, File]:
        """All files below a folder, keyed by their relative names."""
        top = self.root / folder
        paths = [path for path in sorted(top.rglob("*")) if not path.is_dir()]
        return {path.relative_to(top).as_posix(): File(_size(path), partial(_digest, path)) for path in paths}

    def read(self, name: str) -> bytes:
        """Read a file; raises `FileNotFoundError`."""
        return read_bytes(self.root / name)

    def write(self, name: str, data: bytes) -> None:
        """Replace a file in an existing folder, completely or not at all."""
        write_whole(self.root / name, data)

    def move(self, folder: str, to: str) -> None:
        """Move a folder's files, one by one, into a new folder."""
        for name in self.files(folder):
            target = self.root / to / name
            target.parent.mkdir(parents=True, exist_ok=True)
            (self.root / folder / name).rename(target)
        (self.root / to).mkdir(exist_ok=True)  # in case the folder was empty
        self.remove(folder)

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it; does nothing if it does not exist."""
        path = self.root / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)

    def settle(self, folder: str) -> None:
        """Flush a folder and everything below it to the disk."""
        for path in (self.root, self.root / folder, *(self.root / folder).rglob("*")):
            sync(path)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:  # a broken link
        return -1


def _digest(path: Path, checksum: str) -> str:
    with open_file(path) as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() if checksum == "xxh3" else _crc32c(file)


def _crc32c(file: BinaryIO) -> str:
    try:
        from google_crc32c import Checksum
    except ImportError:
        raise InputError("files of a bucket are checked by the extra gcs: pip install 'l2d_jax[gcs]'") from None
    checksum = Checksum()
    while piece := file.read(2**20):
        checksum.update(piece)
    return base64.b64encode(checksum.digest()).decode()
