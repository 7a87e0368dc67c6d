"""Fingerprints of weights: what changes them, what does not, and what is read again."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from l2d_jax.errors import InputError
from l2d_jax.weights import digests
from l2d_jax.weights.digests import check_signature, sign, source_fingerprint, tensors_digest
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("L2D_JAX_CACHE", str(folder))
    return folder


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"layer.{i}": rng.normal(size=(4, 8)).astype(np.float32) for i in range(6)}


def write(folder: Path, arrays: dict[str, np.ndarray], *, shard: int = 10**9) -> SafetensorsFolder:
    folder.mkdir(parents=True)
    write_safetensors(folder, arrays.items(), max_shard_bytes=shard)
    return SafetensorsFolder.open(folder)


def test_the_same_tensors_are_the_same_in_any_shards_order_and_place(tmp_path: Path) -> None:
    arrays = tensors()
    found = {
        tensors_digest(write(tmp_path / "one", arrays)),
        tensors_digest(write(tmp_path / "shards", arrays, shard=200)),
        tensors_digest(write(tmp_path / "order", dict(reversed(arrays.items())))),
    }
    assert len(found) == 1
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1


@pytest.mark.parametrize(
    "change",
    [
        lambda arrays: arrays["layer.3"].__setitem__((1, 2), np.nextafter(arrays["layer.3"][1, 2], np.float32(9))),
        lambda arrays: arrays.__setitem__("layer.9", arrays.pop("layer.3")),
        lambda arrays: arrays.__setitem__("layer.3", arrays["layer.3"].reshape(8, 4)),
        lambda arrays: arrays.__setitem__("layer.3", arrays["layer.3"].view(np.int32)),
        lambda arrays: arrays.update({"layer.3": arrays["layer.4"], "layer.4": arrays["layer.3"]}),
    ],
    ids=["bit", "name", "shape", "type", "swapped"],
)
def test_any_change_is_another_fingerprint(change, tmp_path: Path) -> None:
    arrays = tensors()
    before = tensors_digest(write(tmp_path / "before", arrays))
    change(arrays)
    assert tensors_digest(write(tmp_path / "after", arrays)) != before


def test_a_file_is_read_once_until_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(tmp_path / "x", tensors())
    first = tensors_digest(source)
    monkeypatch.setattr(digests, "hashlib", None)  # it would be needed to read
    assert tensors_digest(source) == first
    monkeypatch.undo()
    file = tmp_path / "x" / "model.safetensors"
    state = file.stat()
    save_file(tensors(1), file)
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # whoever sets the time back, too
    assert file.stat().st_size >= state.st_size - 100
    assert tensors_digest(SafetensorsFolder.open(tmp_path / "x")) != first


def test_a_cache_that_cannot_be_written_or_is_damaged_costs_time_alone(tmp_path: Path, cache: Path) -> None:
    source = write(tmp_path / "x", tensors())
    first = tensors_digest(source)
    (entry,) = (cache / "digests").iterdir()
    entry.write_text("[")
    assert tensors_digest(source) == first
    shutil.rmtree(cache)
    cache.touch()
    assert tensors_digest(source) == first


def test_random_weights_have_a_fingerprint() -> None:
    assert source_fingerprint(None) == {"weights": "random"}


def test_a_signed_adapter_is_refused_once_it_or_its_base_has_changed(tmp_path: Path) -> None:
    base = write(tmp_path / "base", tensors())
    other = write(tmp_path / "other", tensors(1))
    file = tmp_path / "adapter_model.safetensors"
    save_file(tensors(2), file)
    check_signature(file, other)  # not signed
    sign(file, base_fingerprint=source_fingerprint(base))
    check_signature(file, base)
    with pytest.raises(InputError, match=r"not the one that the adapter was trained on \(weights \w+, now \w+\)"):
        check_signature(file, other)
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(InputError, match="has changed since it was written"):
        check_signature(file, base)
