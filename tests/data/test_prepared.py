import dataclasses
import itertools
import json
import shutil

import datasets
import numpy as np
import pytest

from l2d_jax.config.schema import Config, DataConfig, ModelConfig, ValidationConfig
from l2d_jax.data import examples as examples_module
from l2d_jax.data import prepared, tokenizer
from l2d_jax.data.examples import Examples
from l2d_jax.errors import LONGEST_LINE, InputError
from l2d_jax.files import read_json
from tests.support.programs import same_bits

TOKENIZER = tokenizer.byte_tokenizer()
ROWS = 50


@pytest.fixture(autouse=True)
def small(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(prepared, "SHARD", 8)


def write_rows(folder):
    """Two subsets, of 35 and 15 rows; an answer is the number of its row, and every tenth is too long."""
    for subset, numbers in {"a": range(35), "b": range(35, ROWS)}.items():
        write(folder / "rows" / subset / "train.jsonl", numbers)
        write(folder / "rows" / subset / "test.jsonl", range(1, 4))
    return DataConfig(source=str(folder / "rows"), subsets=("a", "b"), max_length=160, validation_examples=None)


@pytest.fixture
def config(tmp_path):
    """Of rows that a test may change."""
    return write_rows(tmp_path)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Rows that no test changes, and the bytes of their preparations, by packing, in folders of that name."""
    folder = tmp_path_factory.mktemp("made")
    config = write_rows(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
        patch.setattr(prepared, "SHARD", 8)
        packings = {str(packing): dataclasses.replace(config, packing=packing) for packing in (False, True)}
        sizes = {name: prepare(packed, folder / name) for name, packed in packings.items()}
    return config, folder, sizes


@pytest.fixture
def out(made, tmp_path):
    """A preparation without packing, which a test may change."""
    return shutil.copytree(made[1] / "False", tmp_path / "out")


def write(path, numbers, **more):
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = (
        {"question": "?" * (n % 7), "answer": f"{n} " * (100 if n % 10 == 0 else n % 5 + 1), **more} for n in numbers
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepare(config, folder, *, exact_examples=0, processes=1):
    """As the program does; the number of bytes."""
    preparation = prepared.Preparation(folder, config, TOKENIZER, processes=processes)
    whole = Config(ModelConfig("x"), data=config, validation=ValidationConfig(exact_examples=exact_examples))
    for data, split in prepared.training_splits(whole):
        made = Examples.load(data, TOKENIZER, split=split, tokenise=preparation.tokenise)
        plans = made.plans if data.packing and split == "train" else ()
        about = dataclasses.replace(made.source, fingerprint=made.fingerprint(), plans=plans)
        preparation.add(data, split, about)
    return preparation.finish()


def load(config, split="train", **options):
    return Examples.load(config, TOKENIZER, split=split, **options)


def using(config, folder):
    return dataclasses.replace(config, prepared=str(folder))


def first(batches, count=12):
    return list(itertools.islice(batches, count))


@pytest.mark.slow
@pytest.mark.parametrize(("packing", "limit"), [(False, None), (False, 20), (True, 43)])
def test_examples_and_their_order_are_those_of_the_source(config, tmp_path, monkeypatch, packing, limit):
    config = dataclasses.replace(config, packing=packing, train_examples=limit, seed=3)
    read = load(config)
    line = read.describe()
    prepare(config, tmp_path / "out")
    shutil.rmtree(config.source)
    monkeypatch.setattr(tokenizer, "text_ids", lambda *_: pytest.fail("tokenises"))
    monkeypatch.setattr(examples_module, "pack", lambda *_, **__: pytest.fail("packs"))
    again = load(using(config, tmp_path / "out"))
    assert len(again) == len(read) == (limit or 45)
    assert again.describe() == line
    assert again.fingerprint() == read.fingerprint()
    assert same_bits(first(again.batches(4)), first(read.batches(4)))  # beyond an epoch
    assert same_bits(
        first(again.batches(4, start_step=7, rows=[1, 3])), first(read.batches(4, start_step=7, rows=[1, 3]))
    )
    assert same_bits(list(again.in_order(4)), list(read.in_order(4)))
    assert again.ids(4, 5) == read.ids(4, 5)
    assert list(again.texts()) == list(read.texts())


@pytest.mark.slow
def test_order_and_places_may_differ_from_those_of_the_preparation(config, tmp_path):
    prepare(config, tmp_path / "out")
    other = dataclasses.replace(config, packing=True, seed=7, weights=(1.0, 2.0))
    shutil.move(tmp_path / "out", tmp_path / "moved")
    assert same_bits(first(load(using(other, tmp_path / "moved")).batches(4)), first(load(other).batches(4)))


def test_problems_of_a_validation_are_prepared(config, tmp_path):
    prepare(config, tmp_path / "out", exact_examples=2)
    data = dataclasses.replace(using(config, tmp_path / "out"), validation_examples=2)
    assert load(data, "test").fingerprint() == load(dataclasses.replace(data, prepared=None), "test").fingerprint()


def test_a_preparation_that_was_cut_off_keeps_its_shards(config, tmp_path, monkeypatch):
    tokenise, made = prepared.tokenise_rows, []

    def interrupted(rows, numbers, arguments, *, file):
        if len(made) == 3:
            file.write_bytes(b"half")
            raise KeyboardInterrupt
        made.append(file.name)
        return tokenise(rows, numbers, arguments, file=file)

    monkeypatch.setattr(prepared, "tokenise_rows", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prepare(config, tmp_path / "out")
    with pytest.raises(InputError, match=r"out has no manifest.json: its preparation has not ended"):
        load(using(config, tmp_path / "out"))
    monkeypatch.setattr(prepared, "tokenise_rows", lambda *a, file: made.append(file.name) or tokenise(*a, file=file))
    size = prepare(config, tmp_path / "out")
    assert len(made) == len(set(made)) == 8  # 7 of the training rows and one of the others, none of them twice
    assert prepare(config, tmp_path / "out") == size
    assert len(made) == 8
    assert prepare(config, tmp_path / "at once") == size
    assert read_json(tmp_path / "at once" / "manifest.json") == read_json(tmp_path / "out" / "manifest.json")
    names = [sorted(path.name for path in (tmp_path / out / "shards").iterdir()) for out in ("out", "at once")]
    assert names[0] == names[1]  # nothing half written is left
    assert len(names[0]) == 8


def flip(file, place):
    content = bytearray(file.read_bytes())
    content[place * len(content) // 10] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage",
    [
        *[lambda file, place=place: flip(file, place) for place in (0, 5, 9)],
        lambda file: file.write_bytes(file.read_bytes()[:-1]),
        lambda file: file.write_bytes(b""),
        lambda file: file.unlink(),
    ],
)
@pytest.mark.parametrize("suffix", [".arrow", ".npz"])
def test_a_damaged_file_is_named_and_mended(made, tmp_path, monkeypatch, damage, suffix):
    config, folder, sizes = made
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")  # which the bytes of shards depend on
    config, size = dataclasses.replace(config, packing=True), sizes["True"]
    shutil.copytree(folder / "True", tmp_path / "out")
    file = next((tmp_path / "out" / "shards").glob(f"*{suffix}"))
    content = file.read_bytes()
    damage(file)
    message = rf"{file.name} is missing, or not as it was written: give the command of l2d_jax.prepare again"
    with pytest.raises(InputError, match=message) as error:
        [load(using(config, tmp_path / "out"), split) for split in ("train", "test")]
    assert len(str(error.value)) <= LONGEST_LINE
    assert prepare(config, tmp_path / "out") == size
    assert file.read_bytes() == content


@pytest.mark.parametrize("damage", [lambda text: text[:-20], lambda text: text.replace("4", "5", 1), lambda _: "{}"])
def test_a_damaged_manifest_is_refused(made, out, damage):
    config, file = made[0], out / "manifest.json"
    file.write_text(damage(file.read_text()))
    for act in (lambda: load(using(config, out)), lambda: prepare(config, out)):
        with pytest.raises(InputError, match=r"manifest.json(: malformed JSON| is not as it was written: remove it)"):
            act()


OTHER = tokenizer.byte_tokenizer()
OTHER.chat_template += " "


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"max_length": 150},
            r"prepared with config.data.max_length 160, not 150: go back to that, or prepare another",
        ),
        ({"answer_length": 150}, r"prepared with config.data.answer_length None, not 150"),
        ({"empty_thoughts": True}, r"prepared with config.data.empty_thoughts False, not True"),
        ({"subsets": ("a",)}, r"prepared with config.data.subsets \['a', 'b'\], not \['a'\]"),
        ({"source": "gsm8k"}, r"prepared with config.data.source '.*rows', not 'gsm8k'"),
        (
            {"train_examples": 5},
            r"has the examples test-all, train-all, not train-5 \(split and most examples\): prepare",
        ),
        ({"train_split": "val"}, r"has the examples test-all, train-all, not val-all"),
        ({"prepared": "nowhere"}, r"nowhere has no manifest.json: its preparation has not ended, or it is another"),
    ],
)
def test_a_folder_of_something_else_is_refused(made, out, changes, message):
    other = dataclasses.replace(using(made[0], out), **changes)
    with pytest.raises(InputError, match=message):
        prepared.read_prepared(other, other.train_split)  # before there is a tokenizer
    if "prepared with" in message:
        with pytest.raises(InputError, match=message):
            prepare(dataclasses.replace(other, prepared=None), out)


def test_another_tokenizer_is_refused(made, out):
    with pytest.raises(
        InputError, match=r"out was prepared with tokenizer '[0-9a-f]{32}', not '[0-9a-f]{32}': go back"
    ):
        Examples.load(using(made[0], out), OTHER, split="train")


def test_nothing_is_written_into_a_folder_of_other_things(config, tmp_path):
    (tmp_path / "out" / "mine").mkdir(parents=True)
    with pytest.raises(InputError, match=r"out holds 'mine', which is no prepared data: choose another --out"):
        prepare(config, tmp_path / "out")


def test_rows_that_changed_are_tokenised_again(config, tmp_path):
    before = prepare(config, tmp_path / "out")
    write(tmp_path / "rows" / "b" / "train.jsonl", range(60, 62))
    assert prepare(config, tmp_path / "out") < before
    assert load(using(config, tmp_path / "out")).fingerprint() == load(config).fingerprint()


def test_a_row_that_cannot_be_tokenised_is_named(config, tmp_path):
    write(tmp_path / "rows" / "a" / "train.jsonl", range(1, 30), **{"class": 0})
    write(tmp_path / "rows" / "b" / "train.jsonl", range(1, 5), **{"class": -1})
    with pytest.raises(InputError, match=r"row 29 of .*rows/train \(the first is 0\): 'class' must be an integer"):
        prepare(config, tmp_path / "out")


def test_classes_are_checked_as_those_of_the_source_are(config, tmp_path):
    prepare(config, tmp_path / "out")
    for data in (config, using(config, tmp_path / "out")):
        with pytest.raises(InputError, match=r"rows/train have none: add a column 'class'"):
            load(data, classes=4)
    for subset in config.subsets:
        write(tmp_path / "rows" / subset / "train.jsonl", range(1, 5), **{"class": 3})
    prepare(config, tmp_path / "out")
    for data in (config, using(config, tmp_path / "out")):
        assert load(data, classes=4).turns["class"][0] == 3
        with pytest.raises(InputError, match=r"rows of class 3, but config.path.classes 3 ends at 2: raise it"):
            load(data, classes=3)


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
def test_weights_are_shares_of_rows_and_a_function_of_seed_and_step(config, packing):
    config = dataclasses.replace(config, weights=(1.0, 3.0), packing=packing)
    examples = load(config)
    steps = [examples.ids(8, step) for step in range(1, 3 if packing else 17)]
    if not packing:
        shares = np.array([np.mean(np.array(ids) >= 35) for ids in steps])
        assert np.all(np.abs(shares - 0.75) <= 1 / 8)
        assert abs(shares.mean() - 0.75) < 0.01
        seen = [number for ids in steps for number in ids if number >= 35]
        assert sorted(seen[:14]) == sorted(seen[14:28]) == [n for n in range(35, ROWS) if n % 10]  # epochs of their own
    again = load(config)
    assert [again.ids(8, step) for step in range(1, len(steps) + 1)] == steps
    assert same_bits(first(again.batches(8, start_step=3), 3), first(examples.batches(8), 6)[3:])
    halves = [first(again.batches(8, rows=rows), 3) for rows in (range(4), range(4, 8))]
    joined = [np.concatenate([one.tokens, other.tokens]) for one, other in zip(*halves, strict=True)]
    assert same_bits(joined, [batch.tokens for batch in first(examples.batches(8), 3)])
    assert load(dataclasses.replace(config, seed=1)).ids(8, 1) != steps[0]


def test_without_weights_subsets_are_one(config):
    assert len(load(config).parts) == 1


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 2.0, 3.0), ()])
def test_there_are_as_many_weights_as_subsets(weights):
    with pytest.raises(InputError, match=r"weights must be a number for each of config.data.subsets \('a', 'b'\), got"):
        DataConfig(subsets=("a", "b"), weights=weights)


def test_a_weight_of_no_examples_is_refused(config, tmp_path):
    write(tmp_path / "rows" / "b" / "train.jsonl", range(40, 41))
    examples = load(dataclasses.replace(config, weights=(1.0, 1.0)))
    with pytest.raises(
        InputError, match=r"config.data.weights names b, of which no example fits: leave that subset out"
    ):
        examples.describe()  # as training does at its start


@pytest.mark.slow
def test_processes_write_what_one_writes(config, tmp_path):
    sizes = [prepare(config, tmp_path / str(count), processes=count) for count in (1, 2)]
    assert sizes[0] == sizes[1]
    assert read_json(tmp_path / "1" / "manifest.json") == read_json(tmp_path / "2" / "manifest.json")
