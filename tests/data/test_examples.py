import dataclasses
import itertools
import json

import datasets
import jax
import numpy as np
import pytest

from l2d_jax.config.schema import DataConfig
from l2d_jax.data import sources, tokenizer
from l2d_jax.data.batch import count_text
from l2d_jax.data.examples import Counts, Examples
from l2d_jax.errors import InputError
from tests.support.turns import encode_turns

TOKENIZER = tokenizer.byte_tokenizer()
CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "Now twice that."},
    {"role": "assistant", "content": "Ten."},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def dialogue(question, answer):
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def folder_config(tmp_path, rows, **options):
    """A config that reads `rows` from a folder."""
    write(tmp_path / "rows" / "train.jsonl", rows)
    defaults = {"source": str(tmp_path / "rows"), "max_length": 128, "held_out": 0.0}
    return DataConfig(**defaults | options)


def load(config, split="train"):
    return Examples.load(config, TOKENIZER, split=split)


def numbered(tmp_path, count, **options):
    """Examples that can be told apart by the number in their answer."""
    return load(folder_config(tmp_path, [dialogue("?", str(i)) for i in range(count)], **options))


def answers(batch):
    """The text that carries a loss, row by row; None where there is none."""
    texts = []
    for targets, weights in zip(batch.targets, batch.weights, strict=True):
        texts.append(TOKENIZER.decode(targets[weights == 1]) if weights.any() else None)
    return texts


def served(batches, count):
    """The numbers of the examples of the first `count` batches."""
    return [[int(text.removesuffix("<|im_end|>")) for text in answers(b)] for b in itertools.islice(batches, count)]


def same(one, other):
    pairs = zip(*map(jax.tree.leaves, (one, other)), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


@pytest.mark.parametrize("answer_length", [None, 12])
def test_only_answers_carry_a_loss(tmp_path, answer_length):
    config = folder_config(tmp_path, [{"messages": CONVERSATION}], max_length=250, answer_length=answer_length)
    [batch] = load(config).in_order(2)
    assert answers(batch) == ["5<|im_end|>", "Ten.<|im_end|>"]
    assert set(np.unique(batch.weights)) == {0, 1}
    context = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"
    inputs = [context + "5", context + "5<|im_end|>\n<|im_start|>user\nNow twice that.<|im_end|>\n"]
    inputs[1] += "<|im_start|>assistant\nTen."
    for row, text in enumerate(inputs):
        ids = tokenizer.text_ids([text], TOKENIZER)[0]
        assert batch.tokens[row].tolist() == ids + [256] * (250 - len(ids))


@pytest.mark.parametrize("answer_length", [None, 12])
def test_targets_follow_their_queries(tmp_path, answer_length):
    config = folder_config(tmp_path, [{"messages": CONVERSATION}], max_length=250, answer_length=answer_length)
    [batch] = load(config).in_order(2)
    for row, answer in enumerate([b"5", b"Ten."]):
        real = batch.weights[row] == 1
        queries = (np.arange(250) if batch.queries is None else batch.queries[row])[real]
        # The token after each query: the next input, and the end of the turn after the last one.
        following = [*batch.tokens[row][queries[1:]], 258]
        assert batch.targets[row][real].tolist() == following == [*answer, 258]
        assert np.array_equal(np.diff(queries), np.ones(len(answer)))


def test_shapes_and_types(tmp_path):
    for answer_length, width in ((None, 250), (12, 12)):
        config = folder_config(tmp_path, [{"messages": CONVERSATION}], max_length=250, answer_length=answer_length)
        [batch] = load(config).in_order(3)
        assert batch.segments is None
        assert (batch.queries is None) == (answer_length is None)
        arrays = [array for array in batch if array is not None]
        shapes = [(3, 250), *[(3, width)] * (len(arrays) - 2), (3,)]
        assert [array.shape for array in arrays] == shapes
        assert [array.dtype for array in arrays] == [*[np.int32] * (len(arrays) - 2), np.float32, np.int32]


def test_queries_without_an_answer_length_are_every_position(tmp_path):
    assert next(numbered(tmp_path, 3).batches(2)).queries is None


def test_spare_queries_repeat_the_last_one(tmp_path):
    config = folder_config(tmp_path, [dialogue("?", "7")], answer_length=5)
    [batch] = load(config).in_order(1)
    first = batch.queries[0, 0]
    assert batch.queries[0].tolist() == [first, first + 1, first + 1, first + 1, first + 1]
    assert batch.weights[0].tolist() == [1, 1, 0, 0, 0]
    assert batch.tokens[0, first + 1] == ord("7")


def test_an_epoch_serves_every_example_once(tmp_path):
    order = np.concatenate(served(numbered(tmp_path, 12).batches(4), 9)).reshape(3, 12)
    for epoch in order:
        assert sorted(epoch) == list(range(12))
    assert len({tuple(epoch) for epoch in order}) == 3
    assert tuple(range(12)) not in {tuple(epoch) for epoch in order}


def test_epochs_need_not_end_with_a_batch(tmp_path):
    order = np.concatenate(served(numbered(tmp_path, 10).batches(4), 5)).reshape(2, 10)
    assert [sorted(epoch) for epoch in order] == [list(range(10))] * 2


def test_a_batch_may_exceed_the_data(tmp_path):
    [batch] = served(numbered(tmp_path, 2).batches(6), 1)
    assert sorted(batch) == [0, 0, 0, 1, 1, 1]


def test_the_seed_decides_the_order(tmp_path):
    orders = [served(numbered(tmp_path, 12, seed=seed).batches(4), 3) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"packing": True}, {"packing": True, "answer_length": 16}])
@pytest.mark.parametrize("start", [1, 4, 11])
def test_a_step_is_the_same_wherever_the_run_began(tmp_path, start, options):
    examples = numbered(tmp_path, 10, **{"answer_length": 8} | options)
    whole = list(itertools.islice(examples.batches(4), 14))
    resumed = list(itertools.islice(examples.batches(4, start_step=start), 14 - start))
    assert all(same(one, other) for one, other in zip(whole[start:], resumed, strict=True))
    assert not same(whole[0], resumed[0])


@pytest.mark.slow
@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_processes_share_the_same_batches(tmp_path, count, packing):
    examples = numbered(tmp_path, 10, packing=packing)
    parts = np.arange(4).reshape(count, -1).tolist()

    def joined(streams, steps):
        batches = itertools.islice(zip(*streams, strict=True), steps)
        return [jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts) for parts in batches]

    for start in (0, 3):
        shares = [examples.batches(4, start_step=start, rows=rows) for rows in parts]
        whole = itertools.islice(examples.batches(4, start_step=start), 6)
        assert all(same(one, other) for one, other in zip(joined(shares, 6), whole, strict=True))
    shares = [examples.in_order(4, rows=rows) for rows in parts]
    whole = list(examples.in_order(4))
    assert len(whole) == 3
    assert all(same(one, other) for one, other in zip(joined(shares, 9), whole, strict=True))


@pytest.mark.parametrize("options", [{}, {"train_examples": 4}])
def test_the_ids_of_a_step_are_the_rows_that_it_read(tmp_path, options):
    """Rows of two turns, of which some are too long and some are not taken; over two epochs."""
    rows = []
    for number in range(9):
        turns = dialogue("?", f"{number}" * (1 + 200 * (number % 4 == 1)))["messages"]
        rows.append({"messages": turns + dialogue("and?", str(number))["messages"]})
    examples = load(folder_config(tmp_path, rows, **options))
    for step, batch in zip(range(1, 9), examples.batches(3), strict=False):
        assert examples.ids(3, step) == [int(text[0]) for text in answers(batch)]


def test_in_order_is_one_pass_filled_with_weight_zero(tmp_path):
    batches = list(numbered(tmp_path, 5, answer_length=4).in_order(3))
    assert [answers(batch) for batch in batches] == [
        [f"{i}<|im_end|>" for i in range(3)],
        ["3<|im_end|>", "4<|im_end|>", None],
    ]
    assert np.all(batches[1].tokens[2] == 256)
    assert np.all(batches[1].weights[2] == 0)


def test_an_epoch_of_packed_rows_serves_every_example_once(tmp_path):
    """In another order and with other mates, except where sizes leave no choice; validation is as it was."""
    examples = numbered(tmp_path, 30, packing=True)
    rows = examples.rows
    assert rows == 6  # five of 21 or 22 tokens fit into 128
    epochs = []
    for batch in itertools.islice(examples.batches(1), 3 * rows):
        [text] = answers(batch)
        epochs.append(tuple(map(int, text.removesuffix("<|im_end|>").split("<|im_end|>"))))
    epochs = [epochs[i * rows : (i + 1) * rows] for i in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(30))
    assert epochs[0] != epochs[1] != epochs[2]
    mates = [{frozenset(row) for row in epoch} for epoch in epochs]
    assert len(mates[0] & mates[1]) < 3
    assert answers(next(examples.in_order(2))) == ["0<|im_end|>", "1<|im_end|>"]


def test_in_order_rows_of_one_example_are_shorter_than_packed_ones(tmp_path):
    """To multiples of 128 tokens and 16 of an answer, within the lengths that were asked for."""
    for asked, answer, shape in ((300, None, (128, 128)), (300, 40, (128, 16)), (100, 12, (100, 12))):
        packed, alone = (
            next(numbered(tmp_path, 4, packing=packing, max_length=asked, answer_length=answer).in_order(2))
            for packing in (True, False)
        )
        assert (packed.tokens.shape[1], packed.targets.shape[1]) == shape
        assert alone.tokens.shape[1] == asked
        assert answers(packed) == answers(alone)


def test_the_description_says_how_full_rows_are(tmp_path):
    alone, packed = (numbered(tmp_path, 30, packing=packing) for packing in (False, True))
    text = sum(count_text(batch) for batch in alone.in_order(10))
    assert text == 30 * 21 + 20
    before, after = round(100 - 100 * text / 30 / 128), round(100 - 100 * text / 6 / 128)
    assert alone.describe() == f"{alone.counts}, {before} % padding"
    assert packed.describe() == f"{alone.counts}, packed into 6 rows, {after} % padding instead of {before} %"
    assert text == sum(count_text(batch) for batch in itertools.islice(packed.batches(3), 2))


def test_long_examples_are_dropped_and_counted(tmp_path):
    rows = [dialogue("?", "7"), dialogue("?" * 100, "7"), dialogue("?", "8" * 20), dialogue("?", "9" * 9)]
    inputs = [
        len(turn.context) + len(turn.answer) - 1 for row in rows for turn in encode_turns(row["messages"], TOKENIZER)
    ]
    assert load(folder_config(tmp_path, rows, max_length=inputs[1])).counts == Counts(4, 0, 0)
    assert load(folder_config(tmp_path, rows, max_length=inputs[1] - 1)).counts == Counts(3, 1, 0)
    both = folder_config(tmp_path, rows, max_length=inputs[3], answer_length=10)  # one row is too long in both ways
    assert load(both).counts == Counts(2, 2, 0)
    examples = load(folder_config(tmp_path, rows, max_length=inputs[1] - 1, answer_length=10))
    assert examples.counts == Counts(2, 1, 1)
    assert len(examples) == 2
    [batch] = examples.in_order(2)
    assert answers(batch) == ["7<|im_end|>", "9" * 9 + "<|im_end|>"]
    assert str(examples.counts) == "2 (1 too long and 1 with too long an answer left out)"


def test_at_most_so_many_examples_spread_over_the_rows(tmp_path):
    rows = [dialogue("?", str(i)) for i in range(100)]
    for options, split in (({"train_examples": 5}, "train"), ({"validation_examples": 5}, "test")):
        config = folder_config(tmp_path, rows, **options)
        write(tmp_path / "rows" / "test.jsonl", rows)
        examples = load(config, split)
        assert examples.counts == Counts(5, 0, 0)
        assert served(examples.in_order(5), 1) == [[0, 20, 40, 60, 80]]
    assert len(load(folder_config(tmp_path, rows, train_examples=1000))) == 100


def test_more_rows_are_read_where_some_do_not_fit(tmp_path):
    rows = [dialogue("?", "7" if i % 8 == 1 else "8" * 200) for i in range(64)]
    examples = load(folder_config(tmp_path, rows, train_examples=6))
    assert examples.counts.kept == len(examples) == 6
    assert answers(next(examples.in_order(6))) == ["7<|im_end|>"] * 6


def test_several_turns_of_a_row_count_as_examples(tmp_path):
    rows = [{"messages": CONVERSATION}, {"messages": CONVERSATION[:2]}, {"messages": CONVERSATION}]
    assert len(load(folder_config(tmp_path, rows, max_length=250))) == 4
    assert len(load(folder_config(tmp_path, rows, max_length=250, train_examples=3))) == 3


def test_questions_and_answers_become_conversations(tmp_path):
    config = folder_config(tmp_path, [{"question": "1 + 1?", "answer": "#### 2", "level": 3}])
    [batch] = load(config).in_order(1)
    assert answers(batch) == ["#### 2<|im_end|>"]
    [turn] = encode_turns(dialogue("1 + 1?", "#### 2")["messages"], TOKENIZER)
    ids = turn.context + turn.answer[:-1]
    assert batch.tokens[0, : len(ids)].tolist() == ids


def test_classes_are_handed_on(tmp_path):
    rows = [dialogue("?", "7") | {"class": 2}, dialogue("?", "8") | {"class": 0}]
    [batch] = load(folder_config(tmp_path, rows)).in_order(3)
    assert batch.classes.tolist() == [2, 0, 0]


def test_a_working_is_tokenised_as_the_answer_is(tmp_path):
    rows = [dialogue("1 + 1 + 1?", "3.") | {"working": ["1.", "2."]}, dialogue("?", "8.") | {"working": []}]
    examples = load(folder_config(tmp_path, rows, working=3))
    [batch] = examples.in_order(2)
    one, two, three = (TOKENIZER(f"{number}.<|im_end|>")["input_ids"] for number in (1, 2, 3))
    place = batch.weights[0] > 0
    assert batch.working[0][place].T.tolist() == [one, two, three]
    assert (batch.working[1] == batch.targets[1][:, None])[batch.weights[1] > 0].all()
    ignored = load(folder_config(tmp_path, rows))
    assert next(ignored.in_order(2)).working is None
    assert ignored.fingerprint() != examples.fingerprint()


@pytest.mark.parametrize(
    ("working", "option", "message"),
    [
        (
            ["1", "20"],
            2,
            r"row 0 of .*: the step '20' of 'working' makes the answer 3 tokens long, and not 2: write all",
        ),
        ("12", 2, r"row 0 of .*: 'working' must be a list of texts, in a row with one answer, got '12'"),
        ([], 2, r"config.data.working is 2, but no row of .* has a 'working': add that column, or set it to 0"),
    ],
)
def test_a_working_that_does_not_fit(tmp_path, working, option, message):
    with pytest.raises(InputError, match=message):
        load(folder_config(tmp_path, [dialogue("?", "3") | {"working": working}], working=option))


def test_parquet_and_data_dir(tmp_path):
    write(tmp_path / "rows" / "mine" / "train.jsonl", [dialogue("?", "7"), dialogue("?", "8")])
    rows = datasets.Dataset.from_list([dialogue("?", "9")])
    rows.to_parquet(tmp_path / "rows" / "mine" / "test.parquet")
    config = DataConfig(source="mine", data_dir=str(tmp_path / "rows"), max_length=128)
    assert served(load(config).in_order(2), 1) == [[7, 8]]
    assert served(load(config, "test").in_order(1), 1) == [[9]]


def test_a_changed_file_is_read_again(tmp_path):
    assert served(load(folder_config(tmp_path, [dialogue("?", "7")])).in_order(1), 1) == [[7]]
    assert served(load(folder_config(tmp_path, [dialogue("?", "89")])).in_order(1), 1) == [[89]]


def test_rows_are_tokenised_once(tmp_path, monkeypatch):
    config = folder_config(tmp_path, [dialogue("?", "7")])
    load(config)
    calls = []
    monkeypatch.setattr(tokenizer, "text_ids", lambda texts, tokenizer: calls.append(texts) or [[1]] * len(texts))
    shorter = dataclasses.replace(config, max_length=100, answer_length=50, seed=3)
    assert answers(next(load(shorter).batches(1))) == ["7<|im_end|>"]
    assert not calls
    other = tokenizer.byte_tokenizer()
    other.chat_template += " "
    Examples.load(config, other, split="train")  # another template is another result
    assert len(calls) == 1


def test_built_in_problems():
    config = DataConfig(source="problems", max_length=300, train_examples=40, validation_examples=8)
    training, held_out = load(config), load(config, "test")
    assert (len(training), len(held_out)) == (40, 8)
    assert all("\n#### " in text for text in answers(next(training.batches(8))))
    [read], held_out = sources.read_parts(config, "validation")
    assert held_out == 0
    assert "messages" in read.column_names


def hub(monkeypatch, sets):
    def load_dataset(name, subset, *, split, revision):
        if (name, subset) not in sets:
            raise ConnectionError(f"Couldn't reach {name!r} on the Hub\nwith a second line")
        return datasets.Dataset.from_list(sets[name, subset])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_hub_names_and_subsets(monkeypatch):
    one, two, all_ = (dialogue("?", text) for text in "123")
    sets = {
        ("HuggingFaceTB/smoltalk", "a"): [one | {"source": "x"}],
        ("HuggingFaceTB/smoltalk", "b"): [two | {"source": 1}],
    }
    hub(monkeypatch, sets | {("openai/gsm8k", "main"): [all_], ("me/mine", None): [one]})
    assert served(load(DataConfig(source="gsm8k", max_length=128)).in_order(1), 1) == [[3]]
    config = DataConfig(source="smoltalk", max_length=128)
    joined = dataclasses.replace(config, subsets=("a", "b"))
    assert served(load(joined).in_order(2), 1) == [[1, 2]]
    assert served(load(DataConfig(source="me/mine", max_length=128)).in_order(1), 1) == [[1]]
    with pytest.raises(
        InputError,
        match=r"smoltalk' \(subset c, split 'train'\) cannot be read: Couldn't reach .*Hub': check|Hub: check",
    ):
        load(dataclasses.replace(config, subsets=("a", "c")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"train.jsonl is empty"),
        ('{"messages": []}\n{"messages"\n', r"line 2 of .*train.jsonl cannot be read: Expecting"),
        (
            '{"problem": 1, "solution": 2}\n',
            r"rows need .*, question and answer, but .*train.jsonl has problem, solution: datasets",
        ),
        ('{"question": "1"}\n', r"has question: "),
        ('{"messages": [{"role": "user", "content": "a"}]}\n', r"no message of the assistant"),
        ('{"messages": []}\n', r"row 0 of .* at least one message"),
        ('{"messages": "hello"}\n', r"row 0 of .* must be a list of objects with role and content, got 'hello'"),
        ('{"messages": ["hello"]}\n', r"row 0 of .* must be a list of objects"),
        (
            '{"question": "a", "answer": "b"}\n{"question": "a", "answer": null}\n',
            r"row 1 .* 'answer' must be text, got None: leave",
        ),
        ('{"question": "a", "answer": "b", "class": "x"}\n', r"row 0 .*'class' must be an integer, 0 or more, got 'x'"),
        ('{"question": "a", "answer": "b", "class": -1}\n', r"row 0 .*got -1"),
    ],
)
def test_malformed_files(tmp_path, text, message):
    config = folder_config(tmp_path, [])
    (tmp_path / "rows" / "train.jsonl").write_text(text)
    with pytest.raises(InputError, match=message) as caught:
        load(config)
    assert "\n" not in str(caught.value)


def test_no_rows(tmp_path, monkeypatch):
    (tmp_path / "rows").mkdir()
    empty = datasets.Dataset.from_dict({"question": [], "answer": []})
    empty.to_parquet(tmp_path / "rows" / "train.parquet")
    with pytest.raises(InputError, match=r"train.parquet cannot be read: .* no data"):
        load(DataConfig(source=str(tmp_path / "rows")))
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, split, revision: empty)
    with pytest.raises(InputError, match=r"me/mine has no rows: choose another"):
        load(DataConfig(source="me/mine"))


def test_a_broken_row_is_named_by_its_place_in_the_file(tmp_path):
    rows = [dialogue("?", "7") for _ in range(10)]
    rows[8]["messages"] = []
    with pytest.raises(InputError, match=r"row 8 of "):
        load(folder_config(tmp_path, rows, train_examples=5))


def test_missing_split_lists_the_others(tmp_path):
    config = folder_config(tmp_path, [dialogue("?", "7")])
    write(tmp_path / "rows" / "dev.jsonl", [])
    with pytest.raises(
        InputError, match=r"no split 'test' in .*: it needs test.jsonl, .* or test.parquet, .* dev, train"
    ):
        load(config, "test")
    with pytest.raises(InputError, match=r"the splits there are none"):
        load(DataConfig(source="nothing", data_dir=str(tmp_path)), "train")
    with pytest.raises(InputError, match=r"splits train, validation, test, not 'dev'"):
        load(DataConfig(source="problems"), "dev")


def test_subsets_of_a_folder_are_folders(tmp_path):
    for name in "ab":
        write(tmp_path / "rows" / name / "train.jsonl", [dialogue("?", name) | {name: 1}])
    config = folder_config(tmp_path, [dialogue("?", "7")], subsets=("b", "a"))
    assert answers(next(load(config).in_order(2))) == ["b<|im_end|>", "a<|im_end|>"]
    with pytest.raises(InputError, match=r"no split 'train' in .*/c: it needs train.jsonl, .* or train.parquet"):
        load(dataclasses.replace(config, subsets=("a", "c")))


def test_nothing_fits(tmp_path):
    rows = [dialogue("?", "7" * 30), dialogue("?", "7" * 50)]
    with pytest.raises(
        InputError, match=r"none of the 2 .* config.data.max_length 40: they take 50 to 70 tokens: raise"
    ):
        load(folder_config(tmp_path, rows, max_length=40))
    with pytest.raises(InputError, match=r"config.data.answer_length 20: they take 31 to 51 tokens: raise"):
        load(folder_config(tmp_path, rows, answer_length=20))


def test_rows_may_be_any(tmp_path):
    """Such as those of two micro-batches on one of two processes, and some beyond the batch, which fill a mesh."""
    examples = numbered(tmp_path, 10)
    part, whole = (next(examples.batches(4, start_step=2, rows=rows)) for rows in ([0, 2], None))
    assert answers(part) == [answers(whole)[0], answers(whole)[2]]
    last = list(examples.in_order(4, rows=[1, 5, 7]))[-1]
    assert answers(last) == ["9<|im_end|>", None, None]


def test_no_chat_template():
    other = tokenizer.byte_tokenizer()
    other.chat_template = None
    with pytest.raises(InputError, match=r"^the tokenizer of this model has no chat template"):
        Examples.load(DataConfig(source="problems"), other, split="train")
