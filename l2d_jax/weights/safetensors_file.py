"""Safetensors files, alone or as the shards of one folder: read by tensor or by slice, and written.

Only safetensors are read: pickles (*.bin, *.pt) can run code as they load. A header is checked in full as it is opened
(the tensors must tile the data, see https://github.com/huggingface/safetensors, "Format"), and here, since the
library's check names neither file nor tensor and lets unknown fields and 70 axes pass. A slice costs that slice. No
check sees a flipped bit in the data, for which the format has no checksum, nor a change after the file was opened.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors.numpy import save_file

from l2d_jax.errors import InputError
from l2d_jax.files import parse_json, read_json

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"{kind}{bits}": np.dtype(f"<{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
}
TRANSFORMERS = {"format": "pt"}  # transformers refuses a file without this entry
MAX_HEADER = 20_000_000  # bytes, 200,000 tensors: real ones stay below 1 MB, and parsing takes 15 times the memory
MAX_ELEMENTS = 2**48  # per tensor, an extent of 0 counted as 1: NumPy can hold the shape


@dataclass(frozen=True)
class TensorRecord:
    """What a safetensors header says about one tensor."""

    path: Path  # of the file
    dtype: np.dtype  # `ml_dtypes.bfloat16` for BF16
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True)
class SafetensorsFolder:
    """Tensors by name, from one file or from the shards that an index lists; every header has been checked."""

    path: Path  # the folder or the one file: what messages name
    records: Mapping[str, TensorRecord]

    @classmethod
    def open(cls, folder: Path) -> "SafetensorsFolder":
        """Read the headers of `model.safetensors`, else of the shards of its index; raises `InputError`."""
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file() or index.is_file():
            return cls(folder, _read_header(single) if single.is_file() else _read_shards(folder, index))
        if not folder.is_dir():
            raise InputError(f"there is no folder {folder}: check the path")
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        remedy = f"; {pickles[0]} is a pickle: load it with transformers and save_pretrained it" if pickles else ""
        raise InputError(f"{folder} has neither {single.name} nor {index.name}{remedy or ': give one that has'}")

    @classmethod
    def open_file(cls, path: Path) -> "SafetensorsFolder":
        """Read the header of one safetensors file; raises `InputError` as `open` does."""
        return cls(path, _read_header(path))

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Shaped[np.ndarray, "..."]:
        """A copy of one tensor or of a slice of it, reading no other data; raises `InputError` where it is absent."""
        if name not in self.records:
            raise InputError(f"{self.path} has no tensor {name!r}: are these the weights of another model?")
        record = self.records[name]
        data = np.memmap(record.path, np.uint8, mode="r")[record.begin : record.end]
        return np.array(data.view(record.dtype).reshape(record.shape)[... if index is None else index])


def write_file(
    path: Path, tensors: Mapping[str, np.ndarray], *, metadata: Mapping[str, str] | None = TRANSFORMERS
) -> None:
    """Write one safetensors file; every array is in memory at the time."""
    # In C order: save_file writes the memory of a transposed array as it lies, which is another array.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    save_file(arrays, path, metadata=None if metadata is None else dict(metadata))
    path.chmod(path.parent.stat().st_mode & 0o666)  # save_file leaves it to the owner alone


def write_safetensors(
    folder: Path,
    tensors: Iterable[tuple[str, np.ndarray | Callable[[], np.ndarray]]],
    *,
    max_shard_bytes: int = 5_000_000_000,
) -> None:
    """Write `model.safetensors`, or shards and their index, as transformers does; one shard is in memory at a time."""
    shard: dict[str, np.ndarray] = {}
    shards: list[dict[str, int]] = []  # the bytes of each tensor, by name

    def write_shard() -> None:
        write_file(folder / f"{len(shards)}.safetensors", shard)
        shards.append({name: array.nbytes for name, array in shard.items()})
        shard.clear()

    for name, source in tensors:
        array = source() if callable(source) else source
        assert name not in {*shard}.union(*shards), f"tensor {name!r} is given twice"
        if shard and sum(a.nbytes for a in shard.values()) + array.nbytes > max_shard_bytes:
            write_shard()
        shard[name] = array
    write_shard()
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    if len(shards) == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, names in zip(files, shards, strict=True) for name in sorted(names)}
        index = {"metadata": {"total_size": sum(sum(s.values()) for s in shards)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
    for i, file in enumerate(files):
        (folder / f"{i}.safetensors").rename(folder / file)


def _read_shards(folder: Path, index: Path) -> dict[str, TensorRecord]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise InputError(f"{index}: weight_map must map names of tensors to names of files: download it again")
    records: dict[str, TensorRecord] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index}: a shard must be a .safetensors file beside the index, got {shard!r}")
        if not (folder / shard).is_file():
            raise InputError(f"{index} lists {shard}, which is absent: download it")
        for name, record in _read_header(folder / shard).items():
            if name in records:
                raise InputError(f"{folder}: tensor {name!r} is in both {records[name].path.name} and {shard}")
            records[name] = record
    for name, shard in weight_map.items():
        if name not in records or records[name].path.name != shard:
            raise InputError(f"{index} places tensor {name!r} in {shard}, which lacks it: download both again")
    return records


def _read_header(path: Path) -> dict[str, TensorRecord]:
    """The checked records of one file: the header's length (8 bytes), the header (JSON), the data."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = 8 + int.from_bytes(file.read(8), "little")
            if size < 8 or start > 8 + MAX_HEADER:
                problem = f"a header of {start - 8} bytes, not 1 to {MAX_HEADER}"
                raise InputError(f"{path} is not safetensors ({problem}; a Git LFS pointer?): download it again")
            header = parse_json(file.read(start - 8), path)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    header.pop("__metadata__", None)
    records = {name: _parse_record(path, name, spec, start) for name, spec in header.items()}
    end = start
    for name, record in sorted(records.items(), key=lambda item: (item[1].begin, item[1].end)):
        if record.begin != end:
            gap = "overlaps the one before" if record.begin < end else "leaves a gap before it"
            raise InputError(f"{path}: tensor {name!r} {gap} (byte {record.begin}, not {end}): download it again")
        end = record.end
    if end != size:
        raise InputError(f"{path} has {size} bytes, its header describes {end} (truncated?): download it again")
    return records


def _parse_record(path: Path, name: str, spec: Any, start: int) -> TensorRecord:
    """One entry of a header, its dtype, shape and size checked; `start` is where the data begins."""
    where = f"{path}: tensor {name!r}"
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape", "data_offsets"}:
        raise InputError(f"{where} must have dtype, shape and data_offsets, got {str(spec)[:80]}: download it again")
    dtype, shape, offsets = spec["dtype"], spec["shape"], spec["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise InputError(f"{where} has dtype {str(dtype)[:80]!r}, which is not one of {', '.join(DTYPES)}: convert it")
    if not _are_counts(shape) or len(shape) > 8 or math.prod(max(n, 1) for n in shape) > MAX_ELEMENTS:
        rule = f"a shape has at most 8 extents >= 0 and {MAX_ELEMENTS} elements"
        raise InputError(f"{where}: {rule}, got {str(shape)[:80]}")
    size = math.prod(shape) * DTYPES[dtype].itemsize
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[1] - offsets[0] != size:
        raise InputError(f"{where}: {dtype} of shape {shape} takes {size} bytes, data_offsets are {str(offsets)[:80]}")
    return TensorRecord(path, DTYPES[dtype], tuple(shape), start + offsets[0], start + offsets[1])


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
