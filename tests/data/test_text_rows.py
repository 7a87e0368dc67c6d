"""Rows of JSON and CSV files are what the files say: text is text, whatever it looks like."""

import gzip
import json
import random
from pathlib import Path

import datasets
import pytest

from l2d_jax.data.rows import read_file
from l2d_jax.errors import InputError
from tests.data.test_tokenizer import CALL

LOOKS = [
    "2024-01-31",
    "2024-01-31T10:00:00Z",
    "10:30",
    "5",
    "1e5",
    "-0",
    "true",
    "null",
    "NaN",
    "",
    " ",
    "1_000",
    "\u2028",
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(folder: Path, text: str | bytes, name: str = "train.jsonl") -> Path:
    file = folder / name
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return file


def lines(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize("look", LOOKS)
def test_text_is_text(tmp_path: Path, look: str) -> None:
    rows = [{"question": "When?", "answer": look, "options": [look], "more": {look or "a": look}} for _ in range(3)]
    assert list(read_file(write(tmp_path, lines(rows)))) == rows
    assert read_file(write(tmp_path, lines(rows))).features["answer"] == datasets.Value("string")


def test_columns_of_one_kind_are_arrows_and_others_json(tmp_path: Path) -> None:
    rows = [{"i": i, "f": i / 2, "b": True, "n": None, "mixed": i if i else "0", "big": 2**53 + i} for i in range(3)]
    rows[1]["late"] = "x"
    read = read_file(write(tmp_path, lines(rows)))
    assert list(read) == [{**row, "late": row.get("late")} for row in rows]
    kinds = {name: getattr(feature, "dtype", "json") for name, feature in read.features.items()}
    arrow = {"i": "int64", "f": "float64", "b": "bool", "n": "string", "big": "int64", "late": "string"}
    assert kinds == arrow | {"mixed": "json"}


def test_a_column_may_be_empty_in_the_first_block_and_text_later(tmp_path: Path) -> None:
    rows = [{"a": None, "b": 1} for _ in range(2500)] + [{"a": "2024-01-31", "b": "1"}]
    assert list(read_file(write(tmp_path, lines(rows)))) == rows


def test_objects_keep_their_own_keys(tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "name": "x"}]},
        {"messages": []},
    ]
    assert list(read_file(write(tmp_path, lines(rows)))) == rows


@pytest.mark.parametrize(
    "text",
    [
        '\ufeff{"a": "1"}\n{"a": "2"}\n',
        '{"a": "1"}\r\n{"a": "2"}\r\n',
        '{"a": "1"}\n\n  \n{"a": "2"}',
        ' {"a": "1"} \n\t{"a" : "2"}\n\n',
    ],
)
def test_lines_may_end_in_many_ways(tmp_path: Path, text: str) -> None:
    assert list(read_file(write(tmp_path, text))) == [{"a": "1"}, {"a": "2"}]


@pytest.mark.parametrize(
    "text",
    [
        '[{"a": "1"}, {"a": "2"}]',
        '\ufeff\n [\n {"a": "1"},\n {"a": "2"}\n]\n',
        '{"data": [{"a": "1"}, {"a": "2"}]}',
        '{"rows": [{"a": "1"}, {"a": "2"}]}',
        '{\n "version": 1,\n "data": [{"a": "1"}, {"a": "2"}]}',
        '{"a": "1"}\n{"a": "2"}\n',  # what many files of that name hold
    ],
)
def test_json_files_of_all_shapes(tmp_path: Path, text: str) -> None:
    assert list(read_file(write(tmp_path, text, "train.json"))) == [{"a": "1"}, {"a": "2"}]
    file = write(tmp_path, gzip.compress(text.encode()), "train.json.gz")
    assert list(read_file(file)) == [{"a": "1"}, {"a": "2"}]


def test_one_object_is_one_row(tmp_path: Path) -> None:
    assert list(read_file(write(tmp_path, '{\n"a": {"b": [1]}\n}\n', "train.json"))) == [{"a": {"b": [1]}}]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_cells_of_csv_are_text(tmp_path: Path, end: str) -> None:
    cells = ["question,answer,class", '"a, ""b""\nc",5,1', "é,2024-01-31,0", ",true,2", ""]
    text = "\ufeff" + end.join(cells)
    expected = [
        {"question": 'a, "b"\nc', "answer": "5", "class": 1},
        {"question": "é", "answer": "2024-01-31", "class": 0},
        {"question": "", "answer": "true", "class": 2},
    ]
    assert list(read_file(write(tmp_path, text, "train.csv"))) == expected
    assert list(read_file(write(tmp_path, gzip.compress(text.encode()), "train.csv.gz"))) == expected


def test_a_cell_may_be_long(tmp_path: Path) -> None:
    assert list(read_file(write(tmp_path, "a\n" + "x" * 300_000 + "\n", "train.csv"))) == [{"a": "x" * 300_000}]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "a.jsonl",
            '{"a": 1}\n{"a": 1, "a": 2}\n',
            r"line 2 of .*a.jsonl cannot be read: the key 'a' is there twice: f",
        ),
        ("a.jsonl", '{"a": [{"b": 1, "b": 1}]}\n', r"line 1 of .* the key 'b' is there twice"),
        ("a.jsonl", '{"a": NaN}\n', r"line 1 of .* 'NaN' is not a finite number"),
        ("a.jsonl", '{"a": [-Infinity]}\n', r"line 1 of .* '-Infinity' is not a finite number"),
        ("a.jsonl", '{"a": 1e999}\n', r"line 1 of .* '1e999' is not a finite number"),
        ("a.jsonl", '{"a": 9223372036854775808}\n', r"line 1 of .* has more than 64 bits, write it as text"),
        ("a.jsonl", '{"a": ' + "9" * 5000 + "}\n", r"line 1 of .* has more than 64 bits, write it as text"),
        ("a.jsonl", '{"a": "\\ud800"}\n', r"line 1 of .* has a half of a surrogate pair"),
        ("a.jsonl", '{"a": [{"b": "x\\uDfffy"}]}\n', r"line 1 of .* has a half of a surrogate pair"),
        ("a.jsonl", '{"a": 1}{"a": 2}\n', r"line 1 of .* cannot be read: Extra data"),
        ("a.jsonl", "\n\n", r"a.jsonl has no rows: put one object a line into it"),
        ("a.json", "[1]", r"row 0 of .* must be a JSON object, got 1"),
        ("a.json", "[]", r"a.json has no rows"),
        ("a.json", "[{]", r"a.json cannot be read: Expecting"),
        ("a.csv", "a,a\n1,2\n", r"the first line of .*a.csv must name each column once, got \['a', 'a'\]"),
        ("a.csv", "a,b\n1,2\n3\n", r"line 3 of .*a.csv has 1 cells, and the first line 2: fix"),
        ("a.csv", 'a,b\n1,"2\n', r"line 2 of .*a.csv cannot be read: unexpected end of data"),
        ("a.csv", "a,b\n", r"a.csv has no rows"),
        ("a.jsonl.gz", "no gzip", r"a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.txt", "a", r"a.txt is none of .jsonl, .json, .*: convert it by datasets.load_dataset"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        read_file(write(tmp_path, text, name))
    assert len(str(caught.value)) <= 300
    assert "\n" not in str(caught.value)
    assert not list((tmp_path / "cache").rglob("*.partial"))


@pytest.mark.parametrize("cut", [10, 40])
def test_a_compressed_file_that_was_cut_off(tmp_path: Path, cut: int) -> None:
    text = gzip.compress(lines([{"a": str(random.Random(i).random())} for i in range(50)]).encode())
    with pytest.raises(InputError, match=r"train.jsonl.gz cannot be read: .*: fix or replace it"):
        read_file(write(tmp_path, text[:-cut], "train.jsonl.gz"))


def test_numbers_in_objects_keep_all_their_digits(tmp_path: Path) -> None:
    """Read as training reads it: `datasets` would round them."""
    from l2d_jax.data.text_rows import values_of

    rows = [{"x": [2.5000000000000004, 2**62 + 1]}]
    read = read_file(write(tmp_path, lines(rows))).with_format("arrow")[:]
    assert values_of(read.column("x")) == [rows[0]["x"]]
