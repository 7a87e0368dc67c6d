"""GGUF files: what is malformed. What comes back from those that are not is in `test_gguf_model`."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from l2d_jax.errors import InputError
from l2d_jax.weights.gguf_file import GGUFFile
from tests.support.tiny_gguf import HIDDEN, MERGES, write_gguf


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


MALFORMED: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda data: b"", "truncated"),
    "other magic": (lambda data: b"GGML" + data[4:], "not a GGUF file"),
    "version 1": (lambda data: data[:4] + struct.pack("<I", 1) + data[8:], "not a GGUF file of version 2 or 3"),
    "truncated metadata": (lambda data: data[:200], "truncated"),
    "truncated tensor": (lambda data: data[:-40], "blk.1.* ends at byte .*truncated"),
    "absurd number of tensors": (lambda data: data[:8] + struct.pack("<Q", 2**60) + data[16:], "malformed"),
    "absurd text": (lambda data: change(data, text("gpt2"), struct.pack("<Q", 2**60) + b"gpt2"), "truncated"),
    "absurd array": (
        lambda data: change(data, struct.pack("<IIQ", 9, 8, len(MERGES)), struct.pack("<IIQ", 9, 0, 2**60)),
        "too long",
    ),
    "array of arrays": (
        lambda data: change(data, struct.pack("<IIQ", 9, 8, len(MERGES)), struct.pack("<IIQ", 9, 9, 1)),
        "unknown kind",
    ),
    "unknown kind of value": (
        lambda data: change(
            data, text("tokenizer.ggml.pre") + struct.pack("<I", 8), text("tokenizer.ggml.pre") + b"\x63\0\0\0"
        ),
        "unknown kind .99.",
    ),
    "no utf-8": (lambda data: change(data, b"gpt2", b"\xff\xff\xff\xff"), "not UTF-8"),
    "repeated key": (
        lambda data: change(data, b"tokenizer.ggml.bos", b"tokenizer.ggml.eos"),
        "eos_token_id is repeated",
    ),
    "repeated tensor": (lambda data: change(data, b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "is repeated"),
    "unknown quantisation": (
        lambda data: change(
            data,
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN, 0),
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN, 999),
        ),
        "output_norm.weight is of the unknown kind 999",
    ),
    "quantisation that cannot be undone": (
        lambda data: change(
            data,
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN, 0),
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN, gguf.GGMLQuantizationType.I8),
        ),
        "output_norm.weight is I8, which cannot be dequantised",
    ),
    "no extents": (
        lambda data: change(
            data, text("output_norm.weight") + struct.pack("<IQ", 1, HIDDEN), text("output_norm.weight") + bytes(4)
        ),
        "malformed",
    ),
    "uneven blocks": (
        lambda data: change(
            data,
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN, 0),
            text("output_norm.weight") + struct.pack("<IQI", 1, HIDDEN - 1, gguf.GGMLQuantizationType.Q8_0),
        ),
        "must be a multiple of 32",
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
    with pytest.raises(InputError, match="unknown kind"):
        GGUFFile.open(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*absent.gguf: No such file"):
        GGUFFile.open(tmp_path / "absent.gguf")


@pytest.mark.parametrize("alignment", [0, 24, "32"])
def test_an_alignment_is_a_power_of_two(tmp_path: Path, alignment: int | str) -> None:
    write_gguf(tmp_path / "x.gguf", metadata={"general.alignment": alignment})
    with pytest.raises(InputError, match=r"general.alignment must be a power of two, 8 or more, got"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_no_prefix_of_a_file_causes_anything_but_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for length in range(0, len(data), 997):
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
        with pytest.raises(InputError, match=r"begins at byte|ends at byte"):
            GGUFFile.open(path)


def test_bytes_behind_the_last_tensor_are_refused_but_for_its_padding(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path, tensors={"blk.1.ffn_norm.weight": None, "odd": np.ones(5, np.float32)})
    data = path.read_bytes()
    last = GGUFFile.open(path).tensors["odd"].end
    assert len(data) == last + 12
    path.write_bytes(data[:last])
    assert GGUFFile.open(path).read("odd").tolist() == [1] * 5
    path.write_bytes(data + bytes(32))
    with pytest.raises(InputError, match=r"has \d+ bytes, and its tensors end at"):
        GGUFFile.open(path)


@pytest.mark.parametrize("count", [0, 5, 2**31])
def test_a_tensor_has_one_to_four_extents(tmp_path: Path, count: int) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(put(data, entries(data, path)["token_embd.weight"][0], "<I", count))
    with pytest.raises(InputError, match=rf"must have 1 to 4 extents, .* has {count}"):
        GGUFFile.open(path)


@pytest.mark.parametrize(
    ("kind", "other", "message"),
    [
        ("F32", "I32", "is I32, which cannot be dequantised"),
        ("F16", "BF16", "tensors of BF16 and F16, which pass for each other"),
        ("Q4_0", "IQ4_NL", "tensors of IQ4_NL and Q4_0, which pass for each other"),
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
