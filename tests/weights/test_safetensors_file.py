"""Safetensors in both layouts, and what is malformed."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_file, write_safetensors

BF16 = ml_dtypes.bfloat16


def example_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "float32": rng.normal(size=(5, 3)).astype(np.float32),
        "bfloat16": rng.normal(size=(4, 6, 2)).astype(BF16),
        "transposed": rng.normal(size=(3, 7)).astype(np.float32).T,
        "integers": rng.integers(-9, 9, size=(7,)),
        "flags": np.array([True, False, True]),
        "scalar": np.asarray(1.5, BF16),
        "empty": np.zeros((0, 4), np.float16),
    }


def raw(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """The bytes of a safetensors file, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(dtype: object = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def assert_equal(source: SafetensorsFolder, tensors: dict[str, np.ndarray]) -> None:
    assert source.records.keys() == tensors.keys()
    for name, expected in tensors.items():
        array, record = source.read(name), source.records[name]
        assert (record.shape, record.dtype) == (expected.shape, expected.dtype), name
        assert (array.shape, array.dtype) == (expected.shape, expected.dtype), name
        np.testing.assert_array_equal(array, expected)


# --- round trips ---


def test_one_file_holds_what_was_written(tmp_path: Path) -> None:
    write_safetensors(tmp_path, example_tensors().items())
    assert [path.name for path in tmp_path.iterdir()] == ["model.safetensors"]
    assert_equal(SafetensorsFolder.open(tmp_path), example_tensors())
    assert_equal(SafetensorsFolder.open_file(tmp_path / "model.safetensors"), example_tensors())
    for name, array in load_file(tmp_path / "model.safetensors").items():  # the reference implementation
        np.testing.assert_array_equal(array, example_tensors()[name])


def test_shards_stay_below_their_limit_and_are_indexed(tmp_path: Path) -> None:
    tensors = {f"t{i}": np.full((i, 8), i, BF16) for i in range(1, 12)}
    made = ((name, lambda array=array: array) for name, array in tensors.items())
    write_safetensors(tmp_path, made, max_shard_bytes=300)
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    assert len(shards) > 2
    for shard in shards:
        assert sum(array.nbytes for array in load_file(tmp_path / shard).values()) <= 300
    index = read_json(tmp_path / "model.safetensors.index.json")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in tensors.values())
    assert index["weight_map"].keys() == tensors.keys()
    assert_equal(SafetensorsFolder.open(tmp_path), tensors)


def test_a_tensor_above_the_limit_has_a_shard_of_its_own(tmp_path: Path) -> None:
    tensors = {name: np.ones(100, np.float32) for name in "ab"}
    write_safetensors(tmp_path, tensors.items(), max_shard_bytes=10)
    weight_map = read_json(tmp_path / "model.safetensors.index.json")["weight_map"]
    assert weight_map == {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}


def test_files_say_that_they_are_for_transformers_and_are_readable_by_all_who_read_the_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_file(tmp_path / "x.safetensors", {"a": np.ones(2)})
    data = (tmp_path / "x.safetensors").read_bytes()
    assert json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"] == {"format": "pt"}
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o644


def test_a_slice_is_what_numpy_would_cut(tmp_path: Path) -> None:
    write_safetensors(tmp_path, example_tensors().items())
    source, expected = SafetensorsFolder.open(tmp_path), example_tensors()["bfloat16"]
    for index in [np.s_[1:3, :, 1:2], np.s_[:, 2:5], np.s_[2:2], np.s_[1:]]:
        index = index if isinstance(index, tuple) else (index,)
        np.testing.assert_array_equal(source.read("bfloat16", index), expected[index])
    read = source.read("bfloat16")
    read[:] = 0  # a copy: the file does not change
    np.testing.assert_array_equal(source.read("bfloat16"), expected)


def test_an_absent_tensor_is_named(tmp_path: Path) -> None:
    write_safetensors(tmp_path, example_tensors().items())
    source = SafetensorsFolder.open(tmp_path)
    with pytest.raises(InputError, match="no tensor 'lm_head'"):
        source.read("lm_head")


# --- malformed files ---

OK = entry()
MALFORMED = {
    "empty": (b"", "header too small"),
    "lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "too large.*Git LFS"),
    "truncated header": (raw({"a": OK})[:40], "invalid header length"),
    "no json": (raw(b"{'a': 1}"), "key must be a string at line 1"),
    "deep json": (raw(b'{"a":' + b"[" * 100_000), "recursion limit exceeded"),
    "missing field": (raw({"a": {"dtype": "F32", "shape": [2]}}), "missing field `data_offsets`"),
    "unknown dtype": (raw({"a": entry("F5")}, bytes(8)), "unknown variant `F5`"),
    "unsupported dtype": (raw({"a": entry("F8_E4M3", (8,))}, bytes(8)), "'a' has dtype 'F8_E4M3'.*BF16"),
    "too many extents": (raw({"a": entry(shape=(2, *[1] * 70))}, bytes(8)), "'a' has .* shape .* of 64 axes or fewer"),
    "absurd shape": (raw({"a": entry("U8", (0, 2**62, 2**62), (0, 0))}), "'a' has .* shape"),
    "absurd extent": (raw({"a": entry("U8", (0, 2**64 - 1), (0, 0))}), "'a' has .* shape"),
    "overlap": (raw({"a": OK, "b": entry(offsets=(4, 12))}, bytes(12)), "invalid offset for tensor `b`"),
    "gap": (raw({"a": OK, "b": entry(offsets=(12, 20))}, bytes(20)), "invalid offset for tensor `b`"),
    "truncated data": (raw({"a": OK}, bytes(7)), "file not fully covered"),
    "tail": (raw({"a": OK}, bytes(9)), "file not fully covered"),
    "long name": (raw({"a\n" * 500: OK, "b" * 999: entry(offsets=(4, 12))}, bytes(12)), "invalid offset for tensor"),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_named_with_the_rule_it_breaks(tmp_path: Path, case: str) -> None:
    data, message = MALFORMED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message) as error:
        SafetensorsFolder.open(tmp_path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


UNUSUAL = {
    "extra field": raw({"a": OK | {"strides": [1]}, "b": entry("BF16", (), (8, 10)), "c": entry("I8", (0, 3), (8, 8))}),
    "other order": raw({"b": entry("I16", (1, 1), (8, 10)), "a": OK}),
    "repeated tensor": raw(b'{"a": ["F32", [2], [0, 8]], "b": ["U8", [2], [8, 10]], "b": ["F16", [1], [8, 10]]}'),
    "lists": raw({"__metadata__": None, "a": ["F32", [2], [0, 8]], "b": entry({"U8": None}, (2,), (8, 10))}),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_an_unusual_header_is_read_as_the_library_reads_it(tmp_path: Path, case: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(UNUSUAL[case] + np.array([1.5, -2], np.float32).tobytes() + b"\x80\x3f")
    assert_equal(SafetensorsFolder.open(tmp_path), load_file(path))


@pytest.mark.slow
def test_no_prefix_and_no_changed_byte_of_a_file_causes_anything_but_an_input_error(tmp_path: Path) -> None:
    write_safetensors(tmp_path, example_tensors().items())
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    for length in range(len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(InputError):
            SafetensorsFolder.open(tmp_path)
    for i in range(8 + int.from_bytes(data[:8], "little")):
        for byte in b'\xff0"':
            path.write_bytes(data[:i] + bytes([byte]) + data[i + 1 :])
            try:
                source = SafetensorsFolder.open(tmp_path)
            except InputError:
                continue
            for name in source.records:
                source.read(name)


# --- malformed folders ---


def write_shards(folder: Path, weight_map: object, **shards: dict[str, np.ndarray]) -> None:
    for name, tensors in shards.items():
        write_file(folder / f"{name}.safetensors", tensors)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


ONE = {"a": np.ones(2, np.float32)}
INDICES = {
    "absent shard": ({"a": "x.safetensors", "b": "y.safetensors"}, {"x": ONE}, "lists y.safetensors, which is absent"),
    "absent tensor": ({"a": "x.safetensors", "b": "x.safetensors"}, {"x": ONE}, "places tensor 'b' in x.safetensors"),
    "other shard": (
        {"a": "y.safetensors", "b": "x.safetensors"},
        {"x": ONE, "y": {"b": ONE["a"]}},
        "places tensor 'a' in y.safetensors",
    ),
    "tensor in two": (
        {"a": "x.safetensors", "b": "y.safetensors"},
        {"x": ONE, "y": ONE | {"b": ONE["a"]}},
        "'a' is in both x.safetensors and y.safetensors",
    ),
    "list": (["a"], {"x": ONE}, r"weight_map: must be a valid dictionary, got \['a'\]"),
    "number": ({"a": 1}, {"x": ONE}, "weight_map: a must be a valid string, got 1"),
    "none": (None, {"x": ONE}, "weight_map: must be a valid dictionary, got None"),
    "pickle": ({"a": "x.bin"}, {"x": ONE}, "next to the index, got 'x.bin'"),
}


@pytest.mark.parametrize("case", INDICES)
def test_a_contradictory_index_is_named(tmp_path: Path, case: str) -> None:
    weight_map, shards, message = INDICES[case]
    write_shards(tmp_path, weight_map, **shards)
    with pytest.raises(InputError, match=message) as error:
        SafetensorsFolder.open(tmp_path)
    assert str(tmp_path) in str(error.value)


@pytest.mark.parametrize("absolute", [True, False])
def test_a_shard_may_not_lie_outside_the_folder(tmp_path: Path, absolute: bool) -> None:
    write_file(tmp_path / "x.safetensors", ONE)
    (tmp_path / "folder").mkdir()
    shard = str(tmp_path / "x.safetensors") if absolute else "../x.safetensors"
    write_shards(tmp_path / "folder", {"a": shard})
    with pytest.raises(InputError, match="next to the index, got"):
        SafetensorsFolder.open(tmp_path / "folder")


def test_a_windows_path_is_no_shard_name(tmp_path: Path) -> None:
    write_shards(tmp_path, {"a": "..\\x.safetensors"}, **{"..\\x": ONE})
    with pytest.raises(InputError, match="next to the index, got"):
        SafetensorsFolder.open(tmp_path)


def test_links_to_files_elsewhere_are_followed_as_the_hub_s_cache_needs(tmp_path: Path) -> None:
    write_file(tmp_path / "blob", ONE)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.safetensors").symlink_to(tmp_path / "blob")
    assert_equal(SafetensorsFolder.open(tmp_path / "folder"), ONE)


def test_a_folder_without_safetensors_says_what_it_has(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        SafetensorsFolder.open(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InputError, match=r"pytorch_model.bin is a pickle"):
        SafetensorsFolder.open(tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        SafetensorsFolder.open(tmp_path / "absent")
    with pytest.raises(InputError, match=r"cannot read .*absent.safetensors: No such file"):
        SafetensorsFolder.open_file(tmp_path / "absent.safetensors")
