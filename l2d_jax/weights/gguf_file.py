"""The GGUF format (https://github.com/ggml-org/ggml, docs/gguf.md): metadata and tensors by name.

Notable: the format is read here, not by `gguf.GGUFReader`, which trusts every length in the file and makes a NumPy
array per token; `gguf` dequantises. Tensors must lie as llama.cpp demands it: in the order of their entries, each where
the one before ends, rounded up to the alignment. The format has no checksum, so that no check sees a changed bit of
data or of a value that is in range, two tensors of one shape under exchanged names, nor all tensors of one kind under
the name of another kind of the same size.
"""

import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import gguf
import numpy as np
from jaxtyping import Float32

from l2d_jax.errors import InputError, shown

T = TypeVar("T")
SCALARS = dict(zip((*range(7), 10, 11, 12), ("<B", "<b", "<H", "<h", "<I", "<i", "<f", "<Q", "<q", "<d"), strict=True))
BOOL, STRING, ARRAY = 7, 8, 9  # the other kinds of metadata
MAX_ITEMS = 2**24  # of an array: vocabularies have some 2**18
MAX_ELEMENTS = 2**48  # of a tensor


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
        if value is not None and not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            raise InputError(f"{self.path}: metadata {key} must be of type {kind.__name__}, got {shown(value)}")
        return value

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """One tensor, dequantised; raises `InputError` for values that are not finite."""
        record = self.tensors[name]
        data = np.memmap(self.path, np.uint8, mode="r")[record.begin : record.end]
        values = np.asarray(gguf.dequantize(data.reshape(*record.shape[:-1], -1), record.kind), np.float32)
        if not np.isfinite(values).all():
            raise InputError(f"{self.path}: {name} has values that are not finite: download it again")
        return values.reshape(record.shape)


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
        metadata = self.unique(value_count, lambda _: self.value(self.number("<I")))
        tensors = self.unique(tensor_count, self.tensor)
        alignment = metadata.get("general.alignment", 32)
        if alignment not in [2**i for i in range(3, 17)] or isinstance(alignment, float):
            raise self.malformed(f"general.alignment must be a power of two, 8 or more, got {shown(alignment)}")
        start = last = end = -(-self.position // alignment) * alignment
        for name, tensor in tensors.items():
            begin, last = start + tensor.begin, start + tensor.end
            if last > self.size:
                raise self.malformed(f"{name} ends at byte {last} of {self.size} (truncated?)")
            if begin != end:
                raise self.malformed(f"{name} begins at byte {begin}, not {end} as the one before ends")
            tensors[name] = replace(tensor, begin=begin, end=last)
            end = start + -(-tensor.end // alignment) * alignment
        if tensors and self.size not in (last, end):
            raise self.malformed(f"it has {self.size} bytes, and its tensors end at {last}")
        kinds = {tensor.kind for tensor in tensors.values()}
        for size in map(gguf.GGML_QUANT_SIZES.get, kinds):
            names = sorted(kind.name for kind in kinds if gguf.GGML_QUANT_SIZES[kind] == size)
            if len(names) > 1:  # nothing could tell that one was put for the other
                raise self.malformed(f"it has tensors of {' and '.join(names)}, which pass for each other")
        return metadata, tensors

    def unique(self, count: int, read: Callable[[str], Any]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for _ in range(count):
            name = self.text()
            if name in values:
                raise self.malformed(f"{name} is repeated")
            values[name] = read(name)
        return values

    def tensor(self, name: str) -> QuantizedTensor:
        """An entry of the table of tensors, placed from the start of the data."""
        count = self.number("<I")
        if not 1 <= count <= 4:
            raise self.malformed(f"a tensor must have 1 to 4 extents, the one before byte {self.position} has {count}")
        extents, kind, begin = [self.number("<Q") for _ in range(count)], self.number("<I"), self.number("<Q")
        if kind not in gguf.GGML_QUANT_SIZES:
            raise self.malformed(f"{name} is of the unknown kind {kind}")
        if not _can_dequantise(kind):
            raise self.malformed(f"{name} is {gguf.GGMLQuantizationType(kind).name}, which cannot be dequantised")
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        if extents[0] % block or not 0 < math.prod(extents) <= MAX_ELEMENTS:
            rule = f"the first must be a multiple of {block}, their product positive"
            raise self.malformed(f"{name} has extents {extents}, {rule}")
        end = begin + math.prod(extents) // block * block_bytes
        return QuantizedTensor(gguf.GGMLQuantizationType(kind), tuple(reversed(extents)), begin, end)

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
        if kind == BOOL and (value := self.number("<B")) in (0, 1):
            return bool(value)
        if kind in SCALARS and kind != BOOL:
            return self.number(SCALARS[kind])
        if kind == ARRAY:
            kind, count = self.number("<I"), self.number("<Q")
            if kind != ARRAY and count <= min(MAX_ITEMS, self.size - self.position):  # an item takes at least a byte
                return [self.value(kind) for _ in range(count)]
        raise self.malformed(f"metadata before byte {self.position} is too long or of an unknown kind ({kind})")

    def malformed(self, problem: str) -> InputError:
        return InputError(f"{self.path} is malformed: {problem}: download it again")


@cache
def _can_dequantise(kind: int) -> bool:
    quantisation = gguf.GGMLQuantizationType(kind)
    try:
        gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[quantisation][1]), np.uint8), quantisation)
    except NotImplementedError:
        return False
    return True
