"""Fingerprints of weights: a hash of every tensor, cached for files that have not changed since they were read."""

import hashlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np

from l2d_jax.errors import InputError
from l2d_jax.files import Fingerprint, cache_folder, check, digest, identity, read_json, require_same, write_whole
from l2d_jax.weights.mapping import TensorSource
from l2d_jax.weights.peft import Adapted
from l2d_jax.weights.safetensors_file import SafetensorsFolder, TensorRecord

SIGNATURE = "fingerprint.json"  # next to an adapter that this package trained


def source_fingerprint(source: TensorSource | None) -> dict[str, str]:
    """The fingerprints of a language model's weights and of its adapters; `source` None: random weights."""
    if source is None:
        return {"weights": "random"}
    if isinstance(source, Adapted):
        below, adapter = source_fingerprint(source.source), source.adapter
        tensors = source_fingerprint(adapter.source)["weights"]
        return below | {"adapters": digest([below.get("adapters"), adapter.config.options(), tensors])}
    assert isinstance(source, SafetensorsFolder)
    return {"weights": tensors_digest(source)}


def tensors_digest(source: SafetensorsFolder) -> str:
    """A hash of the names, dtypes, shapes and values of all tensors; it does not depend on order or shards."""
    files: dict[Path, list[tuple[str, TensorRecord]]] = {}
    for name, record in source.records.items():
        files.setdefault(record.path, []).append((name, record))
    return digest(sorted(line for path, records in files.items() for line in _file_lines(path, records)))


def _file_lines(path: Path, records: Sequence[tuple[str, TensorRecord]]) -> list[list[str]]:
    """Name, dtype and shape, and hash of each tensor in a file; from the cache if the file has not changed."""
    try:
        cached = cache_folder() / "digests" / f"{digest(identity(path))}.json"
        with suppress(OSError, ValueError, RecursionError):
            lines: list[list[str]] = check(json.loads(cached.read_text()), list[list[str]], cached)
            if [line[0] for line in lines if len(line) == 3] == [name for name, _ in records]:
                return lines
        data = np.memmap(path, np.uint8, mode="r")
        parts = [data[record.begin : record.end].data for _, record in records]
        with ThreadPoolExecutor(os.cpu_count()) as pool:  # hashing releases Python's lock
            hashes = [hashed.hexdigest() for hashed in pool.map(hashlib.sha256, parts)]
        pairs = zip(records, hashes, strict=True)
        lines = [[name, f"{record.dtype}{list(record.shape)}", hashed] for (name, record), hashed in pairs]
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from None
    with suppress(OSError):  # without the cache, the file is read again next time
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, json.dumps(lines) + "\n")
    return lines


def sign(file: Path, *, base_fingerprint: Fingerprint | None) -> None:
    """Write the hash of an adapter's tensors, and the fingerprint of its base, next to the adapter's file."""
    record = {"checksum": tensors_digest(SafetensorsFolder.open_file(file)), "base_fingerprint": base_fingerprint}
    (file.parent / SIGNATURE).write_text(json.dumps(record, indent=2) + "\n")


def check_signature(file: Path, base: TensorSource) -> None:
    """Raise `InputError` if a signed adapter has changed since it was written, or was trained on another base."""
    signature = file.parent / SIGNATURE
    if not signature.exists():
        return
    record = read_json(signature)
    if record.get("checksum") != tensors_digest(SafetensorsFolder.open_file(file)):
        raise InputError(f"{file} has changed since it was written ({SIGNATURE} says so): export it again")
    what = f"the base of {file.parent} is not the one that the adapter was trained on"
    remedy = f"put that one back, or remove {SIGNATURE} to use this one"
    require_same(record.get("base_fingerprint"), source_fingerprint(base), what=what, remedy=remedy)
