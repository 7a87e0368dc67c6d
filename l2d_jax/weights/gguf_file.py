"""The GGUF format (https://github.com/ggml-org/ggml, docs/gguf.md): metadata and tensors by name.

Notable: the format is read here, not by `gguf.GGUFReader`, which trusts every length in the file and makes a NumPy
array per token; `gguf` dequantises.
"""

import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import gguf
import numpy as np
from jaxtyping import Float32

from l2d_jax.errors import InputError

T = TypeVar("T")
SCALARS = dict(enumerate(("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<?"))) | {10: "<Q", 11: "<q", 12: "<d"}
STRING, ARRAY = 8, 9  # the two other kinds of metadata


@dataclass(frozen=True)
class QuantizedTensor:
    """The place and the quantisation of one tensor."""

    kind: gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # slowest first, as NumPy has it
    begin: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True)
class GGUFFile:
    """A GGUF file's metadata and tensors; every length and offset has been checked against the size of the file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, QuantizedTensor]

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Read all but the tensors' data; raises `InputError` for a file that is malformed or truncated."""
        try:
            with path.open("rb") as file:
                return cls(path, *_Cursor(path, file, path.stat().st_size).contents())
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except UnicodeDecodeError:
            raise InputError(f"{path} is malformed: a text in it is not UTF-8: download it again") from None

    def get(self, key: str, kind: type[T]) -> T:
        """One value of the metadata; raises `InputError` where it is absent or not a `kind`."""
        value = self.find(key, kind)
        if value is None:
            raise InputError(f"{self.path}: metadata {key} is missing: is this a language model's file?")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """One value of the metadata, None where it is absent; raises `InputError` where it is not a `kind`."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, kind):
            raise InputError(f"{self.path}: metadata {key} must be of type {kind.__name__}, got {str(value)[:40]}")
        return value

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor, dequantised; raises `InputError` for a quantisation that `gguf` cannot undo."""
        record = self.tensors[name]
        data = np.memmap(self.path, np.uint8, mode="r")[record.begin : record.end]
        try:
            values = gguf.dequantize(data.reshape(*record.shape[:-1], -1), record.kind)
        except NotImplementedError:
            raise InputError(f"{self.path}: {name} is {record.kind.name}, which cannot be dequantised") from None
        return np.asarray(values, np.float32).reshape(record.shape)


@dataclass
class _Cursor:
    """A position in a GGUF file that moves as values are read, and never past the end."""

    path: Path
    file: BinaryIO
    size: int  # bytes
    position: int = 0

    def contents(self) -> tuple[dict[str, Any], dict[str, QuantizedTensor]]:
        if self.take(4) != b"GGUF" or self.number("<I") not in (2, 3):
            raise InputError(f"{self.path} is not a GGUF file of version 2 or 3: check the path")
        tensor_count, value_count = self.number("<Q"), self.number("<Q")
        metadata = self.unique((self.text(), self.value(self.number("<I"))) for _ in range(value_count))
        entries = self.unique((self.text(), self.entry()) for _ in range(tensor_count))
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0:
            raise self.malformed(f"general.alignment must be positive, got {alignment}")
        start = -(-self.position // alignment) * alignment
        return metadata, {name: self.record(name, start, *entry) for name, entry in entries.items()}

    def unique(self, items: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in items:
            if name in values:
                raise self.malformed(f"{name} is repeated")
            values[name] = value
        return values

    def entry(self) -> tuple[list[int], int, int]:
        """Extents (fastest first), kind and offset of a tensor."""
        return [self.number("<Q") for _ in range(self.number("<I"))], self.number("<I"), self.number("<Q")

    def record(self, name: str, start: int, extents: list[int], kind: int, offset: int) -> QuantizedTensor:
        if kind not in gguf.GGML_QUANT_SIZES:
            raise self.malformed(f"{name} is of the unknown kind {kind}")
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        if not extents or extents[0] % block:
            raise self.malformed(f"{name} has extents {extents}, the first must be a multiple of {block}")
        end = start + offset + math.prod(extents) // block * block_bytes
        if end > self.size:
            raise self.malformed(f"{name} ends at byte {end} of {self.size} (truncated?)")
        return QuantizedTensor(gguf.GGMLQuantizationType(kind), tuple(reversed(extents)), start + offset, end)

    def take(self, count: int) -> bytes:
        self.position += count
        if self.position > self.size:
            raise self.malformed(f"byte {self.position} of {self.size} is asked for (truncated?)")
        return self.file.read(count)

    def number(self, code: str) -> Any:
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            if kind != ARRAY and count <= self.size - self.position:  # an item takes at least a byte
                return [self.value(kind) for _ in range(count)]
        raise self.malformed(f"metadata before byte {self.position} is too long or of an unknown kind ({kind})")

    def malformed(self, problem: str) -> InputError:
        return InputError(f"{self.path} is malformed: {problem}: download it again")
