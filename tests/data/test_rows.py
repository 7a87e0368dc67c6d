"""Rows from files: read as they stand, without asking the hub."""

import json
import logging
from pathlib import Path

import datasets
import pytest

from l2d_jax.data import rows
from l2d_jax.data.rows import find_files, read_file, read_files, require_columns
from l2d_jax.errors import InputError

ROWS = [{"question": "1 + 1?", "answer": "2"}, {"question": "1 + 2?", "answer": "3"}]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    datasets.Dataset.from_list(ROWS).to_parquet(tmp_path / "test.parquet")
    return tmp_path


@pytest.mark.parametrize("split", ["train", "test"])
def test_both_formats_are_read_without_the_hub(folder: Path, split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.load.get_session", lambda: pytest.fail("asked the hub"))
    assert list(read_files(find_files(folder, split))) == ROWS


def test_a_file_that_has_changed_is_read_again(folder: Path) -> None:
    [file] = find_files(folder, "train")
    assert len(read_file(file)) == 2
    file.write_text(json.dumps(ROWS[1]) + "\n")
    assert list(read_file(file)) == ROWS[1:]


def test_what_is_missing_or_broken_is_named(folder: Path) -> None:
    with pytest.raises(
        InputError, match=r"no split 'dev' in .*needs dev.jsonl.* or dev.parquet.* there are test, train"
    ):
        find_files(folder, "dev")
    (folder / "train.jsonl").write_text("")
    with pytest.raises(InputError, match=r"train.jsonl is empty: put one row a line into it"):
        read_file(folder / "train.jsonl")
    (folder / "train.jsonl").write_text("{]\n")
    with pytest.raises(InputError, match=r"train.jsonl cannot be read: .*: fix or replace it"):
        read_file(folder / "train.jsonl")


def test_missing_columns_are_named(folder: Path) -> None:
    rows = read_files(find_files(folder, "train"))
    require_columns(rows, ("question", "answer"), name="mine")
    with pytest.raises(InputError, match=r"rows of mine need the columns question, label, but label is missing among"):
        require_columns(rows, ("question", "label"), name="mine")
    with pytest.raises(InputError, match=r"mine has no rows: choose another split"):
        require_columns(rows.select([]), ("question",), name="mine")


@pytest.mark.parametrize("name", ["train.jsonl", "test.parquet"])
def test_text_that_is_no_utf8_is_found_at_once(folder: Path, name: str) -> None:
    file = folder / name
    file.write_bytes(file.read_bytes().replace(b"1 + 2?", b"1 \xff 2?"))
    with pytest.raises(InputError, match=rf"{name} (cannot be read|is not UTF-8 at byte 16).*: fix or replace it"):
        read_file(file)


@pytest.mark.parametrize("line", ["null", "3", "[1]", '"x"', '{"a":' + "[" * 100_000 + "]" * 100_000 + "}"])
@pytest.mark.parametrize("number", [1, 2])
def test_a_line_that_is_no_row_is_named(folder: Path, line: str, number: int) -> None:
    """Some would end the process inside pyarrow."""
    lines = [json.dumps(row) for row in ROWS]
    lines.insert(number - 1, line)
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")
    with pytest.raises(InputError, match=rf"line {number} of .*train.jsonl (must be a JSON object|is nested too deep)"):
        read_file(folder / "train.jsonl")


def test_rows_may_be_full_of_brackets_and_follow_blank_lines(folder: Path) -> None:
    row = {"question": "[" * 3000 + "{" * 3000, "answer": [{"a": [1]}] * 600}
    (folder / "train.jsonl").write_text("\ufeff" + json.dumps(row) + "\n\n" + json.dumps(row) + "\n")
    assert list(read_file(folder / "train.jsonl")) == [row, row]


def test_retries_of_the_hub_client_are_one_line(monkeypatch, capsys, caplog):
    client = logging.getLogger("huggingface_hub.utils._http")

    def load_dataset(*_, **__):
        for number in (1, 2):
            client.warning("'timed out' thrown while requesting HEAD https://huggingface.co/datasets/a/b")
            client.warning(f"Retrying in {number}s [Retry {number}/5].")
        client.warning("something else")
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    rows._say_that_it_waits.cache_clear()
    for _ in range(2):
        with pytest.raises(InputError, match="cannot be read: no network: give --data_dir"):
            rows.read_hub("a/b", None, split="test", remedy="give --data_dir")
    assert capsys.readouterr().err == "the hub does not answer: trying again for up to a minute\n"
    assert {record.getMessage() for record in caplog.records} <= {"something else"}
