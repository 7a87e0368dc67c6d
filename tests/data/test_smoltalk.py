"""The paper's part of SmolTalk: its subsets, which of their rows, their classes, and the paper's counts."""

import dataclasses
import json

import datasets
import pytest

from l2d_jax.config.schema import CATEGORIES, DataConfig
from l2d_jax.data import smoltalk, sources, tokenizer
from l2d_jax.data.examples import Counts, Examples
from l2d_jax.errors import InputError
from tests.support.turns import encode_turns

TOKENIZER = tokenizer.byte_tokenizer()
CATEGORIES_OF_MAGPIE = sorted([*smoltalk.OF_CATEGORY, *smoltalk.LEFT_OUT])


def dialogue(*texts, **columns):
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)], **columns}


# Two rows of each subset; of the last, one of each category, of three turns as the real ones are.
ROWS = {name: [dialogue("?", f"{name} {i}") for i in range(2)] for name in smoltalk.SUBSETS[:4]}
ROWS["smol-magpie-ultra"] = [
    dialogue("?", name, "and?", "b", "and?", "c", category=name, quality="poor") for name in CATEGORIES_OF_MAGPIE
]


@pytest.fixture
def hub(monkeypatch):
    """The subsets as the hub has them, with the columns that the real ones have besides."""

    def load_dataset(name, subset, *, split, revision):
        if name != "HuggingFaceTB/smoltalk" or subset not in ROWS:
            raise ConnectionError("no network")
        assert split in ("train", "test")
        return datasets.Dataset.from_list(ROWS[subset])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


@pytest.fixture
def folder(tmp_path):
    """The same rows as files, a folder for each subset."""
    for name, rows in ROWS.items():
        (tmp_path / "smoltalk" / name).mkdir(parents=True)
        datasets.Dataset.from_list(rows).to_parquet(tmp_path / "smoltalk" / name / "train.parquet")
    return tmp_path


def load(config, split="train", **options):
    return Examples.load(config, TOKENIZER, split=split, **options)


def found(config):
    """Each turn's answer with its class."""
    [batch] = load(config, classes=4).in_order(64)
    ids = [targets[weights == 1] for targets, weights in zip(batch.targets, batch.weights, strict=True)]
    texts = [TOKENIZER.decode(row).removesuffix("<|im_end|>") for row in ids]
    return {text: CATEGORIES[label] for text, label in zip(texts, batch.classes, strict=True) if text}


def test_the_recipe(hub):
    wanted = {"self-oss-instruct 0": "coding", "self-oss-instruct 1": "coding", "metamathqa-50k 0": "math"}
    wanted |= {"metamathqa-50k 1": "math", "numina-cot-100k 0": "math", "numina-cot-100k 1": "math"}
    wanted |= {"openhermes-100k 0": "general_qa", "openhermes-100k 1": "general_qa", "coding": "coding"}
    wanted |= {"data-analysis": "general_qa", "information-seeking": "general_qa", "math": "math"}
    wanted |= {"reasoning": "general_qa", "b": "general_qa", "c": "general_qa"}  # the second and third turns, too
    assert found(DataConfig(max_length=256)) == wanted
    assert len(load(DataConfig(max_length=256))) == 8 + 5 * 3


def test_turns_beyond_the_length_are_left_out_and_the_ones_before_them_stay(hub):
    [row] = [row for row in ROWS["smol-magpie-ultra"] if row["category"] == "math"]
    second = encode_turns(row["messages"], TOKENIZER)[1]
    config = DataConfig(subsets=("smol-magpie-ultra",), max_length=len(second.context) + len(second.answer) - 1)
    with_math = [name for name in smoltalk.OF_CATEGORY if len(name) <= len("math")]
    assert load(config).counts == Counts(5 + len(with_math), 2 * 5 - len(with_math), 0)


def test_a_folder_of_subsets_is_the_same(hub, folder):
    local = DataConfig(data_dir=str(folder), max_length=256)
    assert found(local) == found(DataConfig(max_length=256))
    one = dataclasses.replace(local, subsets=("metamathqa-50k",))
    assert found(one) == {"metamathqa-50k 0": "math", "metamathqa-50k 1": "math"}


def test_a_folder_of_rows_is_taken_as_it_is(folder):
    rows = [dialogue("?", "7"), dialogue("?", "8", category="planning"), dialogue("?", "9", category="math")]
    (folder / "smoltalk" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(data_dir=str(folder), max_length=256)
    [read] = sources.read_parts(config, "train").rows
    assert [row["messages"][1]["content"] for row in read] == ["7", "9"]
    assert "class" not in read.column_names  # the first row is of no category
    with pytest.raises(InputError, match=r"needs the class of each row, but those of smoltalk/train have none: add"):
        load(config, classes=4)


def test_a_subset_without_classes_leaves_none_to_the_others(folder):
    config = DataConfig(data_dir=str(folder), subsets=("metamathqa-50k", "mine"))
    (folder / "smoltalk" / "mine").mkdir()
    file = folder / "smoltalk" / "mine" / "train.jsonl"
    file.write_text(json.dumps(dialogue("?", "7")) + "\n")
    assert [part.column_names for part in sources.read_parts(config, "train").rows] == [["messages"], ["messages"]]
    assert len(load(config)) == 3
    file.write_text('{"question": "?", "answer": "7"}\n')
    with pytest.raises(InputError, match=r"subsets of smoltalk have different columns: give all 'messages'"):
        load(config)


def test_an_absent_subset_is_named(folder):
    (folder / "smoltalk" / "openhermes-100k" / "train.parquet").unlink()
    with pytest.raises(InputError, match=r"no split 'train' in .*openhermes-100k: it needs train.jsonl"):
        load(DataConfig(data_dir=str(folder)))


def test_a_class_beyond_the_paths_is_refused(hub):
    with pytest.raises(InputError, match=r"smoltalk/train has rows of class 2, but config.path.classes 2 ends at 1"):
        load(DataConfig(), classes=2)


def test_rows_are_tokenised_once(folder, monkeypatch):
    config = DataConfig(data_dir=str(folder), max_length=250)
    load(config)
    monkeypatch.setattr(tokenizer, "text_ids", lambda *_: pytest.fail("tokenised again"))
    load(config)


def test_the_count_is_compared_with_the_papers(hub, monkeypatch):
    whole = DataConfig(validation_examples=None)
    line = str(load(whole).counts)
    assert line.startswith("23 (0 too long")
    assert "not the paper's 892283: the rows, the tokenizer or its chat template are not the same" in line
    assert "\n" not in line
    assert "not the paper's 46848" in str(load(whole, "test").counts)
    monkeypatch.setitem(smoltalk.EXAMPLES, "train", 23)
    assert str(load(whole).counts).endswith("as many as in the paper")


@pytest.mark.parametrize(
    "changes",
    [
        {"train_examples": 10},
        {"max_length": 1024},
        {"answer_length": 512},
        {"subsets": ("metamathqa-50k",)},
        {"source": "problems"},
    ],
)
def test_nothing_is_compared_where_something_else_is_asked_for(changes):
    assert sources.papers_count(DataConfig(**changes), "train") is None


def test_what_is_validated_on_by_default_is_a_part():
    assert sources.papers_count(DataConfig(), "test") is None
    assert sources.papers_count(DataConfig(), "train") == 892_283
