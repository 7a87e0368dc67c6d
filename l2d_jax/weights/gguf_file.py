"""The GGUF format (https://github.com/ggml-org/ggml, docs/gguf.md): metadata and tensors by name.

Notable: the library `gguf` reads and dequantises. Tensors must be placed as llama.cpp requires: in the order of their
entries, each where the one before ends, rounded up to the alignment. The format has no checksum. So these faults cannot
be detected: a changed bit in the data or in a value that stays in range, two tensors of the same shape with exchanged
names, and all tensors of one kind under the name of another kind of the same size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, SupportsInt, TypeVar

import gguf
import numpy as np
from jaxtyping import Float32
from numpy.typing import DTypeLike

from l2d_jax.errors import InputError, shown

T = TypeVar("T")
MAX_ITEMS = 2**20  # largest array; vocabularies have about 2**18 entries


@dataclass(frozen=True)
class GGUFFile:
    """The metadata and tensors of a GGUF file; all lengths and offsets were checked against the size of the file."""

    path: Path
    metadata: Mapping[str, Any]  # str, int, float, bool, or a list of one of these
    tensors: Mapping[str, gguf.ReaderTensor]

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Read everything except the tensors' data; raises `InputError` for a malformed or truncated file."""
        try:
            with np.errstate(over="raise"):
                reader = _Reader(path)
            _check_tensors(reader)
            metadata = {key: field.contents() for key, field in reader.fields.items()}
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        except NotImplementedError as error:
            raise InputError(f"{path}: {error}: give a file of another quantisation") from None
        except Exception as error:  # gguf raises no narrower type
            raise InputError(f"{path} is not a whole GGUF file ({shown(str(error))}): download it again") from None
        return cls(path, metadata, {tensor.name: tensor for tensor in reader.tensors})

    def get(self, key: str, kind: type[T]) -> T:
        """A value of the metadata; raises `InputError` if it is absent or not of type `kind`."""
        value = self.find(key, kind)
        if value is None:
            raise InputError(f"{self.path}: metadata {key} is missing: is this a language model's file?")
        return value

    def find(self, key: str, kind: type[T]) -> T | None:
        """A value of the metadata, or None if it is absent; raises `InputError` if it is not of type `kind`."""
        value = self.metadata.get(key)
        if value is not None and not (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
            raise InputError(f"{self.path}: metadata {key} must be of type {kind.__name__}, got {shown(value)}")
        return value

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor in NumPy's order, slowest axis first."""
        return tuple(self.tensors[name].shape[::-1].tolist())

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """Read a tensor, dequantised; raises `InputError` for values that are not finite."""
        values = np.asarray(gguf.dequantize(self.tensors[name].data, self.tensors[name].tensor_type), np.float32)
        if not np.isfinite(values).all():
            raise InputError(f"{self.path}: {name} has values that are not finite: download it again")
        return values


class _Reader(gguf.GGUFReader):
    """The library's reader with checks: by itself it follows a damaged length past the end of the file."""

    def _get(self, offset: int, dtype: DTypeLike, count: SupportsInt = 1, *_: Any, **__: Any) -> np.ndarray:
        return np.frombuffer(self.data, dtype, int(count), offset)

    def _get_field_parts(self, offset: int, kind: SupportsInt) -> tuple[Any, ...]:
        if kind == gguf.GGUFValueType.ARRAY:
            item, count = self._get(offset, "<u4,<u8")[0]
            if item == gguf.GGUFValueType.ARRAY or count > MAX_ITEMS:
                raise ValueError(f"an array of arrays, or of {count} items")
        return super()._get_field_parts(offset, int(kind))


def _check_tensors(reader: gguf.GGUFReader) -> None:
    """Raise an exception unless the tensors fill the file in order, and all can be dequantised."""
    last = end = int(reader.data_offset)
    for tensor in reader.tensors:
        if tensor.data_offset != end or not tensor.n_elements or not tensor.data.ndim:
            raise ValueError(f"{tensor.name} is empty or begins at byte {tensor.data_offset}, not {end}")
        last = end + tensor.n_bytes
        end = gguf.GGUFWriter.ggml_pad(last, int(reader.alignment))
    if reader.tensors and len(reader.data) not in (last, end):
        raise ValueError(f"it has {len(reader.data)} bytes, and its tensors end at {last}")
    sizes = {tensor.tensor_type: gguf.GGML_QUANT_SIZES[tensor.tensor_type] for tensor in reader.tensors}
    for kind, (_, size) in sizes.items():
        gguf.dequantize(np.zeros((1, size), np.uint8), kind)
    if len(set(sizes.values())) < len(sizes):
        raise ValueError(f"two of {', '.join(kind.name for kind in sizes)} have one size and pass for each other")
