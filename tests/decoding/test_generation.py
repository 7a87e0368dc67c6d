import dataclasses

import jax.numpy as jnp
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data import tokenizer
from l2d_jax.decoding import buckets, loaded_model, stop_strings
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Piece, Restrictions
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.programs import config, open_base
from tests.support.requests import generate, stream

NEVER = (95,)  # an end token that these models do not choose
PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30], [11]]
SETTINGS = DecodeConfig(budget=3, max_new_tokens=12, parallel="off")  # `test_exactness` compares the orders


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(classes=2), None, NEVER, SETTINGS)


def settings(**changes):
    return DecodeConfig(**{"budget": 3, "max_new_tokens": 12, **changes})


@pytest.mark.slow
def test_every_answer_has_its_length(loaded):
    assert [len(answer) for answer in generate(loaded, PROMPTS)] == [12, 12, 12]


def test_the_pieces_of_a_stream_are_the_answer(loaded):
    pieces = list(stream(loaded, PROMPTS, seed=3))
    assert len(pieces) == 2
    whole = [[token for piece in pieces for token in piece[i]] for i in range(len(PROMPTS))]
    assert whole == generate(loaded, PROMPTS, seed=3)
    assert [len(piece[0]) for piece in pieces] == [buckets.CHUNK, 12 - buckets.CHUNK]


@pytest.mark.slow
def test_the_answer_does_not_depend_on_its_length(loaded):
    short = generate(loaded, PROMPTS, settings=settings(max_new_tokens=5))
    assert short == [answer[:5] for answer in generate(loaded, PROMPTS)]


@pytest.mark.slow
def test_an_answer_does_not_depend_on_its_batch_mates(loaded):
    drawn = settings(temperature=1.0, velocity_temperature=1.0)
    together = generate(loaded, PROMPTS, settings=drawn)
    assert generate(loaded, PROMPTS[:1], settings=drawn) == together[:1]
    assert generate(loaded, [PROMPTS[0], [1] * 20, [7]], settings=drawn)[0] == together[0]


@pytest.mark.slow
def test_an_answer_does_not_depend_on_the_prompts_bucket(loaded):
    long = [9] * (buckets.SHORTEST_BUCKET + 1)  # its batch mates are padded as far as this one
    assert generate(loaded, [PROMPTS[0], long])[0] == generate(loaded, PROMPTS)[0]


def test_seeds(loaded):
    drawn = settings(temperature=1.0, parallel="off")
    one, again, other = (generate(loaded, PROMPTS, settings=drawn, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.slow
def test_end_tokens_are_left_out_and_end_an_answer(loaded):
    answers = generate(loaded, PROMPTS)
    ends = (answers[0][4], answers[1][9])
    ended = dataclasses.replace(loaded, stop_ids=ends)
    expected = []
    for answer in answers:
        stop = next((i for i, token in enumerate(answer) if token in ends), len(answer))
        expected.append(answer[:stop])
    assert generate(ended, PROMPTS) == expected
    assert len(expected[0]) <= 4


@pytest.mark.slow
def test_the_stream_ends_when_all_have_ended(loaded):
    first = generate(loaded, PROMPTS[:1])[0][0]
    assert list(stream(dataclasses.replace(loaded, stop_ids=(first,)), PROMPTS[:1])) == [[[]]]


def test_a_model_without_end_tokens(loaded):
    assert generate(dataclasses.replace(loaded, stop_ids=()), PROMPTS) == generate(loaded, PROMPTS)


def test_a_budget_of_one_is_the_language_model(loaded):
    plain = dataclasses.replace(loaded, model=Model.build(loaded.model.llm, None))
    one = settings(budget=1)
    answers = generate(plain, PROMPTS, settings=one)
    assert generate(loaded, PROMPTS, settings=one) == answers
    assert generate(loaded, PROMPTS) != answers
    ids = jnp.array([[*PROMPTS[1], *answers[1]]])
    hidden, _ = plain.model.llm(ids, tiny.positions(ids))
    likeliest = jnp.argmax(plain.model.llm.logits(hidden[0]), axis=-1)  # after every token, in one pass
    assert likeliest[len(PROMPTS[1]) - 1 : -1].tolist() == answers[1]


@pytest.mark.slow
def test_classes_change_the_answer(loaded):
    answers = [generate(loaded, PROMPTS[:1], labels=[label]) for label in (0, 1)]
    assert answers[0] != answers[1]


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([], {}, "a prompt is empty"),
        ([[1], []], {}, "a prompt is empty"),
        ([[1] * 1020], {}, "a prompt of 1020 tokens and 12 new ones exceed the 1024 positions"),
        ([[1]], {"budget": 4}, "a budget of 4 evaluations is unreachable for midpoint"),
        ([[1]], {"labels": [2]}, "class label 2 is unknown to this path: it knows 0 to 1"),
        ([[1]], {"labels": [-1]}, "class label -1 is unknown"),
        ([[1], [2]], {"labels": [1]}, "one class label per prompt"),
    ],
)
def test_bad_requests(loaded, prompts, changes, message):
    labels = changes.pop("labels", None)
    with pytest.raises(InputError, match=message):
        generate(loaded, prompts, settings=settings(**changes), labels=labels)


def test_a_plain_model_knows_a_budget_of_one(loaded):
    plain = dataclasses.replace(loaded, model=Model.build(loaded.model.llm, None))
    with pytest.raises(InputError, match="a budget of 3 needs a diffusion path, and this model has none"):
        generate(plain, PROMPTS)
    with pytest.raises(InputError, match="none: it was trained without classes"):
        generate(plain, PROMPTS, settings=settings(budget=1), labels=[0, 0, 0])


TEXT = "Été — 東京 😀, ok ."


@pytest.fixture
def speaking(loaded, monkeypatch):
    """A model that says `said`, whose bytes are its tokens, in pieces of one token each."""

    def speak(said, size=1):
        ids = list(said if isinstance(said, bytes) else said.encode())

        def pieces(model, request, **_):
            for start in range(0, len(ids), size):
                yield [Piece(0, ids[start : start + size], is_last=start + size >= len(ids))]

        monkeypatch.setattr(loaded_model, "decode_lanes", pieces)
        messages = [{"role": "user", "content": "?"}]
        return list(dataclasses.replace(loaded, tokenizer=tokenizer.byte_tokenizer()).stream(messages))

    return speak


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_characters_come_out_whole(speaking, size):
    pieces = speaking(TEXT, size)
    assert "".join(pieces) == TEXT
    assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 3


def test_bytes_that_are_no_character_are_shown_as_such(speaking):
    assert "".join(speaking(b"a\xffb\xe2\x82")) == "a\ufffdb\ufffd"


def test_special_tokens_are_not_shown(loaded, monkeypatch):
    ids = [*b"a", 257, *b"b"]
    monkeypatch.setattr(loaded_model, "decode_lanes", lambda *_, **__: iter([[Piece(0, ids, is_last=True)]]))
    pieces = dataclasses.replace(loaded, tokenizer=tokenizer.byte_tokenizer()).stream(
        [{"role": "user", "content": "?"}]
    )
    assert "".join(pieces) == "ab"


def test_spaces_stay_as_they_were_generated(speaking, loaded, monkeypatch):
    """Llama's tokenizers ask for "a ." to be shown as "a."; a stream could not take the space back."""
    make = tokenizer.byte_tokenizer

    def cleaning():
        tokenizer = make()
        tokenizer.clean_up_tokenization_spaces = True
        return tokenizer

    monkeypatch.setattr(tokenizer, "byte_tokenizer", cleaning)
    assert "".join(speaking("a . b , c 's")) == "a . b , c 's"


def test_text_needs_a_tokenizer(loaded):
    with pytest.raises(InputError, match="has no tokenizer"):
        list(loaded.stream([{"role": "user", "content": "?"}]))


@pytest.mark.slow
def test_text_is_the_tokens_as_text(mesh):
    """With the tokenizer of bytes, whose ids the model's vocabulary holds."""
    base = open_base(config().model, mesh)
    settings = DecodeConfig(budget=1, max_new_tokens=12)
    loaded = LoadedModel(Model.build(base.llm, None), base.tokenizer, base.stop_ids, settings)
    messages = [{"role": "user", "content": "Hi"}]
    [ids] = generate(loaded, [tokenizer.prompt_ids(messages, base.tokenizer)])
    assert "".join(loaded.stream(messages)) == base.tokenizer.decode(ids, skip_special_tokens=True)


# --- stop strings, samples, masks, and logits that are not numbers ---


@pytest.mark.parametrize("size", [1, 3, 8, 40])
@pytest.mark.parametrize(
    ("said", "stops", "answer"),
    [
        ("one two three", ["two"], "one "),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["four"], "one two three"),
        ("one two thr", ["three"], "one two thr"),
        ("ababac", ["abac"], "ab"),
        ("Grüße, Welt", ["ße"], "Grü"),
        ("x", ["x"], ""),
    ],
)
def test_stop_strings(size, said, stops, answer):
    """However the answer comes in pieces; what might begin a stop string is held back until it is known."""
    search, shown = stop_strings.StopSearch(stops, tokenizer.byte_tokenizer()), b""
    ids = list(said.encode())
    for start in range(0, len(ids), size):
        piece, rest, stopped = search.add(ids[start : start + size], is_last=start + size >= len(ids))
        shown += bytes(piece)
        assert rest == ""
        assert answer.encode().startswith(shown)
        if stopped:
            break
    assert shown.decode() == answer
    assert stopped == (answer != said)
    assert search.again().add([97], is_last=True) == ([97], "", False)


@pytest.mark.parametrize("stops", [["<|im_end|>"], ["wo", "<|im_end|>", "<|im_start|>"]])
def test_special_tokens_are_stops(stops):
    """Which no text shows; nothing is held back any more where one ends the answer."""
    words = tokenizer.byte_tokenizer()
    search, end = stop_strings.StopSearch(stops, words), words.convert_tokens_to_ids("<|im_end|>")
    pieces = [search.add(ids, is_last=False) for ids in (list(b"one"), [*b" tw", end, *b"o"])]
    assert b"".join(bytes(ids) for ids, *_ in pieces) == b"one tw"
    assert [(rest, stopped) for _, rest, stopped in pieces] == [("", False), ("", True)]
    assert search.again().add(list(b"one "), is_last=True) == (list(b"one "), "", False)


@pytest.mark.parametrize("size", [1, 2, 9])
def test_a_stop_string_that_begins_within_a_token(size):
    """The token is left out, and what it says before the string is part of the text."""
    words = tokenizer.byte_tokenizer()
    words.add_tokens([")\n\n"])
    ids = [*b"f(x", words.convert_tokens_to_ids(")\n\n"), *b"def g"]
    search, growing, shown = stop_strings.StopSearch(["\ndef"], words), stop_strings.GrowingText(words), ""
    for start in range(0, len(ids), size):
        tokens, rest, stopped = search.add(ids[start : start + size], is_last=start + size >= len(ids))
        shown += growing.add(tokens, is_last=stopped, rest=rest)
        if stopped:
            break
    assert stopped
    assert (bytes(growing.ids), shown, growing.shown) == (b"f(x", "f(x)\n", "f(x)\n")


@pytest.fixture
def spelling(loaded):
    """Tokens are bytes below 96; the answers have digits and capitals."""
    return dataclasses.replace(loaded, tokenizer=tokenizer.byte_tokenizer())


def test_a_stop_string_ends_one_sequence(spelling):
    free = generate(spelling, PROMPTS)
    texts = [bytes(answer).decode() for answer in free]
    stop = next(texts[0][i : i + 2] for i in range(4, 10) if texts[0][i : i + 2] not in texts[1] + texts[2])
    answers = generate(spelling, PROMPTS, restrictions=Restrictions(stops=[stop]))
    assert bytes(answers[0]).decode() == texts[0][: texts[0].index(stop)]
    assert answers[1:] == free[1:]


@pytest.mark.parametrize("stop", ["", "a<|im_end|>b"])
def test_a_stop_string_that_cannot_occur(spelling, stop):
    with pytest.raises(InputError, match="cannot occur in an answer"):
        list(stream(spelling, PROMPTS, restrictions=Restrictions(stops=[stop])))


def test_stop_strings_need_a_tokenizer(loaded):
    with pytest.raises(InputError, match="stop strings need a tokenizer"):
        list(stream(loaded, PROMPTS, restrictions=Restrictions(stops=["a"])))


@pytest.mark.slow
def test_several_answers_to_each_prompt(loaded):
    drawn = settings(temperature=1.0)
    one, three = (generate(loaded, PROMPTS, settings=drawn, samples=samples) for samples in (1, 3))
    assert three[::3] == one
    assert len({tuple(answer) for answer in three}) == 9
    labelled = generate(loaded, PROMPTS[:2], settings=drawn, samples=2, labels=[0, 1])
    assert labelled[::2] == generate(loaded, PROMPTS[:2], settings=drawn, labels=[0, 1])
    with pytest.raises(InputError, match=r"samples must be in \[1, 1000000\], got 0"):
        list(stream(loaded, PROMPTS, samples=0))


@pytest.mark.slow
def test_banned_and_allowed_tokens(loaded):
    free = generate(loaded, PROMPTS)
    banned = sorted({answer[0] for answer in free})
    answers = generate(loaded, PROMPTS, restrictions=Restrictions(banned=banned))
    assert not set(banned) & {token for answer in answers for token in answer}
    few = generate(loaded, PROMPTS, restrictions=Restrictions(allowed=[3, 4, 5], banned=[4]))
    assert {token for answer in few for token in answer} <= {3, 5}
    with pytest.raises(InputError, match="token 96 is not one of the 96 of the model"):
        list(stream(loaded, PROMPTS, restrictions=Restrictions(banned=[96])))


@pytest.mark.slow
def test_sequences_whose_logits_are_not_numbers_are_reported_at_the_end(loaded):
    model = loaded.model
    embed = model.llm.embed.at[50].set(jnp.nan)
    poisoned = dataclasses.replace(
        loaded, model=dataclasses.replace(model, llm=dataclasses.replace(model.llm, embed=embed))
    )
    plain, asked = settings(parallel="off"), {"restrictions": Restrictions(banned=[50])}
    pieces = stream(poisoned, [[5, 17, 3], [5, 50, 3]], settings=plain, **asked)
    first, second = next(pieces), next(pieces)
    assert [len(ids) for ids in first] == [8, 0]
    assert [len(ids) for ids in second] == [4, 0]
    with pytest.raises(InputError, match=r"logits of sequences \[1\] were not numbers"):
        next(pieces)
    told, overlapping = [0, 0], stream(poisoned, [[5, 17, 3], [5, 50, 3]], settings=settings(parallel="on"), **asked)
    while told[0] < 12:
        told = [count + len(new) for count, new in zip(told, next(overlapping), strict=True)]
    assert told == [12, 0]
    with pytest.raises(InputError, match=r"logits of sequences \[1\] were not numbers"):
        next(overlapping)
    endless = stream(dataclasses.replace(poisoned, stop_ids=()), [[5, 50, 3]], settings=plain, **asked)
    assert next(endless) == [[]]  # nothing, and no stand-in for an end token that the model has not


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_p": 0.0}, r"config.decode.top_p must be in \[1e-06, 1\], got 0.0"),
        ({"top_p": 1.5}, r"top_p must be in \[1e-06, 1\]"),
        ({"top_k": -1}, r"config.decode.top_k must be in \[0, 1000000000\], got -1"),
        ({"draws": 0}, r"config.decode.draws must be in \[1, 4096\], got 0"),
        ({"gate": -0.5}, r"config.decode.gate must be in \[0, 1000\], got -0.5"),
        ({"tolerance": 0.0}, r"config.decode.tolerance must be in \[1e-12, 1000000.0\], got 0.0"),
    ],
)
def test_settings_out_of_range(changes, message):
    with pytest.raises(InputError, match=message):
        settings(**changes)


@pytest.mark.slow
def test_one_program_serves_all_settings_and_all_prompts_of_a_bucket(loaded):
    """Compilations of decoding and of the prompts' pass, over a sweep of what users turn.

    Budgets of a size share a program.
    """
    for size in (1, 3, 7, 15):
        generate(loaded, PROMPTS, labels=[0, 1, 0], settings=settings(budget=size))
    before = token_decoder().count, prefill.count
    seen = set()
    for budget in (1, 3, 5, 7, 9, 15):
        sampled = {"temperature": 0.7, "top_k": 9, "top_p": 0.9}
        for changes in ({}, {"guidance": 2.0}, sampled, {"gate": 0.5}, {"end": 0.5}, {"end": 0.98}):
            chosen = settings(budget=budget, **changes)
            answers = generate(
                loaded, [[*prompt, 9] for prompt in PROMPTS], settings=chosen, labels=[1, 1, 0], seed=budget
            )
            seen.add(str(answers))
    assert len(seen) > 10
    assert (token_decoder().count, prefill.count) == before
