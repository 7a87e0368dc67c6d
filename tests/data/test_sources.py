"""Where rows come from: files and folders of many layouts, and the share of a lone split that validation has."""

import dataclasses
import json
import random
from pathlib import Path

import datasets
import pytest

from l2d_jax.config.schema import DataConfig
from l2d_jax.data import sources
from l2d_jax.data.examples import Examples
from l2d_jax.data.rows import find_files, read_files, splits_in
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.errors import InputError

ROWS = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(100)]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def write(file: Path, rows=ROWS) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answers(source, split, **options):
    config = DataConfig(source=str(source), max_length=128, **options)
    [rows], held_out = sources.read_parts(config, split)
    return [row["answer"] for row in rows], held_out


def lay_out(folder: Path, layout: str) -> Path:
    """Write the rows as 70 for training and 30 for testing; the source that names them."""
    train, test = (datasets.Dataset.from_list(rows) for rows in (ROWS[:70], ROWS[70:]))
    if layout == "shards":
        for number in range(3):
            train.shard(3, number, contiguous=True).to_parquet(folder / f"data/train-{number:05}-of-00003.parquet")
        test.to_parquet(folder / "data/test-00000-of-00001-0a1b2c3d.parquet")
    elif layout == "saved":
        datasets.DatasetDict({"train": train, "test": test}).save_to_disk(folder)
    else:
        for name, rows in (("train", train), ("test", test)):
            file = folder / f"{name}.{layout}"
            rows.to_csv(file) if layout == "csv" else rows.to_json(file, lines=layout != "json", compression="infer")
    return folder


@pytest.mark.parametrize("layout", ["shards", "saved", "jsonl", "json", "jsonl.gz", "csv"])
def test_layouts_of_two_splits(tmp_path, layout):
    source = lay_out(tmp_path / "rows", layout)
    everything = [row["answer"] for row in ROWS]
    assert answers(source, "train") == (everything[:70], 0)
    assert answers(source, "test") == (everything[70:], 0)
    assert splits_in(source) == ["test", "train"]
    with pytest.raises(InputError, match=r"no split 'dev' in .* the splits there are test, train"):
        find_files(source, "dev")


def test_a_missing_shard_is_named(tmp_path):
    folder = lay_out(tmp_path / "rows", "shards")
    (folder / "data/train-00001-of-00003.parquet").unlink()
    with pytest.raises(InputError, match=r"has 2 of 3 shards of split 'train', less \[1\]: copy all of one set"):
        find_files(folder, "train")


def test_shards_of_other_columns(tmp_path):
    files = [tmp_path / f"train-0000{number}-of-00002.parquet" for number in range(2)]
    datasets.Dataset.from_list(ROWS).to_parquet(files[0])
    datasets.Dataset.from_list([{"question": 1, "answer": 2}]).to_parquet(files[1])
    with pytest.raises(InputError, match=r"the shards of .* differ in their columns"):
        read_files(files)


@pytest.mark.parametrize("kind", ["file", "folder", "saved", "data_dir"])
def test_a_lone_split_is_shared_with_validation(tmp_path, kind):
    options = {"held_out": 0.2}
    if kind == "saved":
        source = tmp_path / "rows"
        datasets.Dataset.from_list(ROWS).save_to_disk(source)
    else:
        file = write(tmp_path / "rows" / "train.jsonl")
        source = {"file": file, "folder": file.parent, "data_dir": "rows"}[kind]
        options |= {"data_dir": str(tmp_path)} if kind == "data_dir" else {}
    (train, count), (test, same) = (answers(source, split, **options) for split in ("train", "test"))
    assert count == same == len(test)
    assert 8 <= len(test) <= 35
    assert sorted(train + test) == sorted(row["answer"] for row in ROWS)


def test_the_share_depends_on_what_rows_say_alone(tmp_path):
    mixed = [*ROWS, *ROWS[:50], *({**row, "id": 3} for row in ROWS[:20])]
    random.Random(0).shuffle(mixed)
    _, expected = (answers(write(tmp_path / "a.jsonl"), split, held_out=0.2)[0] for split in ("train", "test"))
    train, test = (answers(write(tmp_path / "b.jsonl", mixed), split, held_out=0.2)[0] for split in ("train", "test"))
    assert set(test) == set(expected)
    assert not set(test) & set(train)
    assert len(train) + len(test) == len(mixed)


@pytest.mark.parametrize(("share", "count"), [(1e-9, 1), (1.0, 99)])
def test_each_side_has_a_row(tmp_path, share, count):
    assert len(answers(write(tmp_path / "a.jsonl"), "test", held_out=share)[0]) == count
    with pytest.raises(InputError, match=r"all rows of .*a.jsonl say the same, and none can be held out"):
        answers(write(tmp_path / "a.jsonl", ROWS[:1] * 3), "train", held_out=share)


def test_what_is_not_shared(tmp_path):
    folder = write(tmp_path / "rows" / "train.jsonl").parent
    with pytest.raises(InputError, match=r"no split 'test' in .* the splits there are train"):
        answers(folder, "test", held_out=0.0)
    with pytest.raises(InputError, match=r"no split 'test' in .* the splits there are train"):
        answers("gsm8k", "test", data_dir=str(write(tmp_path / "gsm8k" / "train.jsonl").parents[1]))
    write(folder / "dev.jsonl")
    assert answers(folder, "train") == ([row["answer"] for row in ROWS], 0)
    with pytest.raises(InputError, match=r"no split 'test' in .* the splits there are dev, train"):
        answers(folder, "test")
    with pytest.raises(
        InputError, match=r"a.jsonl has rows of one split, which are divided into train and test, not dev"
    ):
        sources.read_parts(DataConfig(source=str(write(tmp_path / "a.jsonl")), validation_split="test"), "dev")


def test_a_data_set_of_the_hub_with_one_split(monkeypatch):
    def load_dataset(name, subset, *, split, revision):
        if split != "train":
            raise ValueError(f"Unknown split {split!r}. Should be one of ['train'].")
        rows = datasets.Dataset.from_list(ROWS)
        rows.info.splits = datasets.SplitDict({"train": datasets.SplitInfo("train", num_examples=100)})
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (train, count), (test, _) = (answers("me/mine", split, held_out=0.2) for split in ("train", "test"))
    assert count == len(test) > 0
    assert sorted(train + test) == sorted(row["answer"] for row in ROWS)
    with pytest.raises(InputError, match="Unknown split"):
        answers("me/mine", "test", held_out=0.0)


def test_json_lines_beside_parquet(tmp_path):
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    write(tmp_path / "a" / "train.jsonl", [{"messages": messages}])
    (tmp_path / "b").mkdir()
    datasets.Dataset.from_list([{"messages": messages}]).to_parquet(tmp_path / "b" / "train.parquet")
    config = DataConfig(source=str(tmp_path), subsets=("a", "b"), max_length=128, held_out=0.0)
    examples = Examples.load(config, byte_tokenizer(), split="train")
    first, second = examples.texts()
    assert first == second


def test_counts_say_what_was_held_out_and_what_says_nothing(tmp_path):
    silent = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]}
    rows = [{"messages": [{**message, "weight": None} for message in silent["messages"]]}, silent, silent]
    config = DataConfig(source=str(write(tmp_path / "a.jsonl")), max_length=128, held_out=0.2)
    for split in ("train", "test"):
        counts = Examples.load(config, byte_tokenizer(), split=split).counts
        assert str(counts).endswith(f", {counts.held_out} rows held out for validation (config.data.held_out)")
    whole = write(tmp_path / "rows" / "train.jsonl", rows).parent
    kept = Examples.load(dataclasses.replace(config, source=str(whole), held_out=0.0), byte_tokenizer(), split="train")
    assert (kept.counts.kept, kept.counts.silent, kept.counts.held_out) == (1, 2, 0)
    assert str(kept.counts).endswith(", 2 rows without an answer to learn left out")


def test_an_error_names_a_row_by_its_place_in_the_file(tmp_path):
    rows = [*ROWS[:50], {"question": "q", "answer": 5}]
    config = DataConfig(source=str(write(tmp_path / "a.jsonl", rows)), max_length=128, held_out=0.3)
    for split in ("train", "test"):
        read, _ = sources.read_parts(config, split)
        if any(row["answer"] == 5 for row in read[0]):
            with pytest.raises(InputError, match=r"row 50 of .* 'content' of every message must be text, got 5"):
                Examples.load(config, byte_tokenizer(), split=split)
            break
    else:
        pytest.fail("no split has the row")
