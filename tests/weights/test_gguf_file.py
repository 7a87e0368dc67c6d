"""GGUF files: what is malformed. What comes back from those that are not is in `test_gguf_model`."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
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


@pytest.mark.parametrize("alignment", [0, "32"])
def test_an_alignment_is_a_positive_number(tmp_path: Path, alignment: int | str) -> None:
    write_gguf(tmp_path / "x.gguf", metadata={"general.alignment": alignment})
    with pytest.raises(InputError, match=r"general.alignment must be positive"):
        GGUFFile.open(tmp_path / "x.gguf")


def test_no_prefix_of_a_file_causes_anything_but_an_input_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    write_gguf(path)
    data = path.read_bytes()
    for length in range(0, len(data), 997):
        path.write_bytes(data[:length])
        with pytest.raises(InputError):
            GGUFFile.open(path)
