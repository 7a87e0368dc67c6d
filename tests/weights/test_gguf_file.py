"""GGUF files: what is malformed. What comes back from those that are not is in `test_gguf_model`."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from l2d_jax.errors import InputError
from l2d_jax.weights.gguf_file import GGUFFile
from tests.support.tiny_gguf import HIDDEN, KINDS, MERGES, TEMPLATE, write_gguf


def read(path: Path) -> None:
    """All that the file holds."""
    file = GGUFFile.open(path)
    for name in file.tensors:
        file.read(name)


def change(data: bytes, old: bytes, new: bytes) -> bytes:
    assert data.count(old) >= 1
    return data.replace(old, new, 1)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def retyped(data: bytes, extent: int, kind: int) -> bytes:
    """With another extent and kind of the tensor output_norm.weight."""
    old, name = struct.pack("<IQI", 1, HIDDEN, 0), text("output_norm.weight")
    return change(data, name + old, name + struct.pack("<IQI", 1, extent, kind))


MERGE_LIST = struct.pack("<IIQ", 9, 8, len(MERGES))
KIND_LIST = struct.pack("<IIQ", 9, 5, len(KINDS))
MALFORMED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "cannot mmap an empty file"),
    "other magic": (lambda data: b"GGML" + data[4:], "is not a whole GGUF file .'GGUF magic invalid'"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "appears to be version 1"),
    "big-endian": (lambda data: data[:4] + struct.pack(">IQQ", 3, 1, 1) + data[24:], "is not a whole GGUF file"),
    "truncated metadata": (lambda data: data[:200], "buffer is smaller than requested size"),
    "truncated in a list of numbers": (
        lambda data: data[: data.index(KIND_LIST) + 36],
        "buffer is smaller than requested size|greater than buffer length",
    ),
    "truncated tensor": (lambda data: data[:-40], "buffer is smaller than requested size"),
    "absurd number of tensors": (
        lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:],
        "is not a whole GGUF file",
    ),
    "absurd text": (
        lambda data: change(data, text("gpt2"), struct.pack("<Q", 2**60) + b"gpt2"),
        "buffer is smaller than requested size",
    ),
    "absurd array": (lambda data: change(data, MERGE_LIST, struct.pack("<IIQ", 9, 0, 2**60)), f"of {2**60} items"),
    "absurd array of numbers": (
        lambda data: change(data, KIND_LIST, struct.pack("<IIQ", 9, 5, 2**40)),
        f"of {2**40} items",
    ),
    "long array of numbers": (
        lambda data: change(data, KIND_LIST, struct.pack("<IIQ", 9, 5, 2**20)),
        "buffer is smaller than requested size",
    ),
    "array of arrays": (lambda data: change(data, MERGE_LIST, struct.pack("<IIQ", 9, 9, 1)), "an array of arrays"),
    "unknown kind of value": (
        lambda data: change(
            data, text("tokenizer.ggml.pre") + struct.pack("<I", 8), text("tokenizer.ggml.pre") + b"\x63\0\0\0"
        ),
        "99 is not a valid GGUFValueType",
    ),
    "no utf-8": (lambda data: change(data, b"gpt2", b"\xff\xff\xff\xff"), "'utf-8' codec can't decode"),
    "repeated key": (
        lambda data: change(data, b"tokenizer.ggml.bos", b"tokenizer.ggml.eos"),
        "Duplicate tokenizer.ggml.eos_token_id",
    ),
    "repeated tensor": (
        lambda data: change(data, b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"),
        "duplicated tensor with name blk.0.attn_q.weight",
    ),
    "unknown quantisation": (lambda data: retyped(data, HIDDEN, 999), "999.* is not a valid GGMLQuantizationType"),
    "quantisation that cannot be undone": (
        lambda data: retyped(data, HIDDEN, gguf.GGMLQuantizationType.I32),
        "Dequantization for I32 is not yet implemented: give a file of another quantisation",
    ),
    "no extents": (
        lambda data: change(
            data, text("output_norm.weight") + struct.pack("<IQ", 1, HIDDEN), text("output_norm.weight") + bytes(4)
        ),
        "is not a whole GGUF file",
    ),
    "no elements": (lambda data: retyped(data, 0, 2), "output_norm.weight is empty"),
    "absurd extent": (lambda data: retyped(data, 2**62, 0), "is not a whole GGUF file"),
    "uneven blocks": (
        lambda data: retyped(data, HIDDEN - 1, gguf.GGMLQuantizationType.Q8_0),
        r"size \(31\) is not a multiple of Q8_0 block size \(32\)",
    ),
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_named_with_the_rule_it_breaks(tmp_path: Path, case: str) -> None:
    edit, message = MALFORMED[case]
    path = tmp_path / "x.gguf"
    write_gguf(path)
    path.write_bytes(edit(path.read_bytes()))
    with pytest.raises(InputError, match=message) as error:
        read(path)
    assert str(path) in str(error.value)


def test_arrays_in_arrays_are_refused_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + text("a") + struct.pack("<I", 9) + 5000 * struct.pack("<IQ", 9, 1)
    )
    with pytest.raises(InputError, match="an array of arrays"):
        GGUFFile.open(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent.gguf: No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")


@pytest.mark.parametrize("alignment", [0, 24, "32"])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: int | str) -> None:
    write_gguf(tmp_path / "x.gguf", metadata={"general.alignment": alignment})
    with pytest.raises(InputError, match=r"x.gguf is not a whole GGUF file .*alignment"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_no_prefix_of_a_file_causes_anything_but_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for length in range(0, len(data), 1999):
        path.write_bytes(data[:length])
        with pytest.raises(InputError):
            GGUFFile.open(path)


# --- tables of tensors ---


def entries(data: bytes, path: Path) -> dict[str, tuple[int, int, int]]:
    """Where the number of extents, the kind and the offset of each tensor stand in a file."""
    found = {}
    for name, tensor in GGUFFile.open(path).tensors.items():
        at = data.index(text(name)) + len(text(name))
        found[name] = at, at + 4 + 8 * len(tensor.shape), at + 8 + 8 * len(tensor.shape)
    return found


def put(data: bytes, at: int, code: str, value: int) -> bytes:
    return data[:at] + struct.pack(code, value) + data[at + struct.calcsize(code) :]


@pytest.mark.slow
def test_every_redirected_tensor_is_refused(tmp_path: Path) -> None:
    """To the data of another, over its neighbours, beyond a gap, or by an exchange of two offsets."""
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    offsets = {name: at for name, (_, _, at) in entries(data, path).items()}
    values = {name: struct.unpack_from("<Q", data, at)[0] for name, at in offsets.items()}
    redirected = [
        put(data, at, "<Q", value)
        for name, at in offsets.items()
        for value in {*list(values.values())[:4], values[name] + 32, values[name] + 4, max(0, values[name] - 32)}
        if value != values[name]
    ]
    for one, other in zip(offsets, [*offsets][1:], strict=False):
        redirected.append(put(put(data, offsets[one], "<Q", values[other]), offsets[other], "<Q", values[one]))
    assert len(redirected) > 100
    for changed in redirected:
        path.write_bytes(changed)
        with pytest.raises(InputError, match=r"begins at byte|buffer is smaller than requested|no greater than buffer"):
            GGUFFile.open(path)


def test_bytes_behind_the_last_tensor_are_refused_but_for_its_padding(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, tensors={"blk.1.ffn_norm.weight": None, "odd": np.ones(5, np.float32)})
    data = path.read_bytes()
    odd = GGUFFile.open(path).tensors["odd"]
    last = odd.data_offset + odd.n_bytes
    assert len(data) == last + 12
    path.write_bytes(data[:last])
    assert GGUFFile.open(path).read("odd").tolist() == [1] * 5
    path.write_bytes(data + bytes(32))
    with pytest.raises(InputError, match=r"has \d+ bytes, and its tensors end at"):
        GGUFFile.open(path)


@pytest.mark.parametrize("count", [0, 5, 2**31])
def test_a_wrong_number_of_extents_is_refused(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(put(data, entries(data, path)["token_embd.weight"][0], "<I", count))
    with pytest.raises(InputError, match="is not a whole GGUF file"):
        GGUFFile.open(path)


def test_a_tensor_without_extents_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, tensors={"odd": np.ones(1, np.float32)})
    data = change(path.read_bytes(), text("odd") + struct.pack("<IQ", 1, 1), text("odd") + bytes(4))
    path.write_bytes(change(data, text(TEMPLATE), text(TEMPLATE + 8 * " ")))
    with pytest.raises(InputError, match="odd is empty"):
        GGUFFile.open(path)


def test_an_offset_near_2_64_is_refused_without_a_warning(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(put(data, entries(data, path)["token_embd.weight"][2], "<Q", 2**64 - 32))
    with pytest.raises(InputError, match="overflow encountered"):
        GGUFFile.open(path)
    assert not recwarn.list


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("F32", "I32", "I32 is not yet implemented: give a file of another quantisation"),
        ("F16", "BF16", "two of BF16, F32, F16 have one size and pass for each other"),
        ("Q4_0", "IQ4_NL", "two of IQ4_NL, F32, Q4_0 have one size and pass for each other"),
    ],
)
def test_a_kind_is_not_taken_for_another_of_its_size(tmp_path: Path, kind: str, other: str, message: str) -> None:
    path, kinds = tmp_path / "x.gguf", gguf.GGMLQuantizationType
    write_gguf(path, quantisation=kinds[kind])
    data = path.read_bytes()
    path.write_bytes(put(data, entries(data, path)["token_embd.weight"][1], "<I", kinds[other]))
    with pytest.raises(InputError, match=message):
        GGUFFile.open(path)


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, tensors={"output_norm.weight": np.full(HIDDEN, np.nan, np.float32)})
    with pytest.raises(InputError, match=r"output_norm.weight has values that are not finite"):
        read(path)
