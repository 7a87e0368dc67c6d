"""Safetensors files, alone or as the shards of one folder: read by tensor or by slice, and written.

Only safetensors are read: pickles (*.bin, *.pt) can run code when they are loaded. The library checks the whole header
when a file is opened: the tensors must tile the data (https://github.com/huggingface/safetensors, "Format"). Data are
memory-mapped, so reading a slice costs only that slice. NaN and infinities are refused in reading and writing. Other
flipped bits in the data are not detected, because the format has no checksum, nor are changes after opening.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import Shaped
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check, open_file, read_json
from l2d_jax.weights.finite import require_finite

DTYPES = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "BOOL": np.dtype(np.bool_),
    **{f"F{bits}": np.dtype(f"<f{bits // 8}") for bits in (16, 32, 64)},
    **{f"{kind}{bits}": np.dtype(f"<{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)},
}

LazyArray = np.ndarray | Callable[[], np.ndarray]  # a function makes the array when it is needed


@dataclass(frozen=True)
class TensorRecord:
    """The entry of a tensor in a safetensors header."""

    path: Path  # path of the file
    dtype: np.dtype  # `ml_dtypes.bfloat16` for BF16
    shape: tuple[int, ...]
    begin: int  # bytes from the start of the file
    end: int


@dataclass(frozen=True)
class SafetensorsFolder:
    """Tensors by name, from a file or from the shards that an index lists; all headers were checked."""

    path: Path  # the folder or the file, for messages
    records: Mapping[str, TensorRecord]

    @classmethod
    def open(cls, folder: Path) -> "SafetensorsFolder":
        """Read the headers of `model.safetensors`, else of the shards of its index; raises `InputError`."""
        single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
        if single.is_file() or index.is_file():
            return cls(folder, _read_header(single) if single.is_file() else _read_shards(folder, index))
        require(folder.is_dir(), f"there is no folder {folder}: check the path")
        pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth"))
        remedy = f"; {pickles[0]} is a pickle: load it with transformers and save_pretrained it" if pickles else ""
        raise InputError(f"{folder} has neither {single.name} nor {index.name}{remedy or ': give one that has'}")

    @classmethod
    def open_file(cls, path: Path) -> "SafetensorsFolder":
        """Read the header of one safetensors file; raises `InputError` as `open` does."""
        return cls(path, _read_header(path))

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> Shaped[np.ndarray, "..."]:
        """Read a copy of a tensor or of a slice of it, and no other data.

        Raises `InputError` if it is absent or not finite.
        """
        require(name in self.records, f"{self.path} has no tensor {name!r}: are these the weights of another model?")
        record = self.records[name]
        data = np.memmap(record.path, np.uint8, mode="r")[record.begin : record.end]
        copy = np.array(data.view(record.dtype).reshape(record.shape)[... if index is None else index])
        return require_finite(copy, name, record.path)


def write_file(path: Path, tensors: Mapping[str, np.ndarray], *, for_transformers: bool = True) -> None:
    """Write a safetensors file from arrays that are all in memory.

    Raises `InputError` if one is not finite.
    """
    for name, array in tensors.items():
        require_finite(array, name, "weights cannot be written")
    # In C order: save_file writes the memory of a transposed array unchanged, which would be another array.
    arrays = {name: np.asarray(array, order="C") for name, array in tensors.items()}
    save_file(arrays, path, metadata={"format": "pt"} if for_transformers else None)  # transformers requires it
    path.chmod(path.parent.stat().st_mode & 0o666)  # save_file makes it readable only for the owner


def write_safetensors(
    folder: Path, tensors: Iterable[tuple[str, LazyArray]], *, max_shard_bytes: int = 5_000_000_000
) -> None:
    """Write `model.safetensors`, or shards and their index, as transformers does; one shard is in memory at a time."""
    shard: dict[str, np.ndarray] = {}
    shards: list[dict[str, int]] = []  # size in bytes of each tensor, keyed by name

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
    weight_map: dict[str, str] = check(read_json(index).get("weight_map"), dict[str, str], f"{index}: weight_map")
    records: dict[str, TensorRecord] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard or "\\" in shard or not shard.endswith(".safetensors"):
            raise InputError(f"{index}: a shard must be a .safetensors file next to the index, got {shard!r}")
        require((folder / shard).is_file(), f"{index} lists {shard}, which is absent: download it")
        for name, record in _read_header(folder / shard).items():
            if name in records:
                raise InputError(f"{folder}: tensor {name!r} is in both {records[name].path.name} and {shard}")
            records[name] = record
    for name, shard in weight_map.items():
        if name not in records or records[name].path.name != shard:
            raise InputError(f"{index} places tensor {name!r} in {shard}, which lacks it: download both again")
    return records


def _read_header(path: Path) -> dict[str, TensorRecord]:
    """Read the records of a file: 8 bytes with the length of the header, the header, and tensors without gaps."""
    try:
        with open_file(path) as file, safe_open(path, framework="numpy") as header:
            end = 8 + int.from_bytes(file.read(8), "little")
            entries = [(name, header.get_slice(name)) for name in header.offset_keys()]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None
    except SafetensorError as error:
        problem = f"{path} has a wrong header or size ({shown(str(error).rpartition('header: ')[2])}"
        raise InputError(f"{problem}; truncated? a Git LFS pointer?): download it again") from None
    records = {}
    for name, entry in entries:
        code, shape = entry.get_dtype(), tuple(entry.get_shape())
        try:
            np.broadcast_to(np.zeros((), DTYPES[code]), shape)  # a view: it takes no memory
        except (KeyError, ValueError):
            problem = f"{path}: tensor {name!r} has dtype {code!r} and shape {shown(shape)}"
            raise InputError(f"{problem}; supported are {', '.join(DTYPES)} of 64 axes or fewer: convert it") from None
        begin, end = end, end + math.prod(shape) * DTYPES[code].itemsize
        records[name] = TensorRecord(path, DTYPES[code], shape, begin, end)
    return records
