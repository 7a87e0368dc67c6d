import jax.numpy as jnp
import pytest
import tiny
from programs import config

from l2d_jax import generation, models, tokens
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.generation import generate, stream, stream_text
from l2d_jax.loaded import Loaded
from l2d_jax.refine import Model

NEVER = (95,)  # an end token that these models do not choose
PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30], [11]]
SETTINGS = DecodeConfig(budget=3, max_new_tokens=12)


@pytest.fixture(scope="module")
def loaded():
    return Loaded(tiny.model(classes=2), None, NEVER, SETTINGS)


def settings(**changes):
    return DecodeConfig(**{"budget": 3, "max_new_tokens": 12, **changes})


def test_every_answer_has_its_length(loaded):
    assert [len(answer) for answer in generate(loaded, PROMPTS)] == [12, 12, 12]


def test_the_pieces_of_a_stream_are_the_answer(loaded):
    pieces = list(stream(loaded, PROMPTS, seed=3))
    assert len(pieces) == 2
    whole = [[token for piece in pieces for token in piece[i]] for i in range(len(PROMPTS))]
    assert whole == generate(loaded, PROMPTS, seed=3)
    assert [len(piece[0]) for piece in pieces] == [generation.CHUNK, 12 - generation.CHUNK]


def test_the_answer_does_not_depend_on_its_length(loaded):
    short = generate(loaded, PROMPTS, settings=settings(max_new_tokens=5))
    assert short == [answer[:5] for answer in generate(loaded, PROMPTS)]


def test_an_answer_does_not_depend_on_its_batch_mates(loaded):
    drawn = settings(temperature=1.0, velocity_temperature=1.0)
    together = generate(loaded, PROMPTS, settings=drawn)
    assert generate(loaded, PROMPTS[:1], settings=drawn) == together[:1]
    assert generate(loaded, [PROMPTS[0], [1] * 20, [7]], settings=drawn)[0] == together[0]


def test_an_answer_does_not_depend_on_the_prompts_bucket(loaded):
    long = [9] * (generation.SHORTEST_BUCKET + 1)  # its batch mates are padded as far as this one
    assert generate(loaded, [PROMPTS[0], long])[0] == generate(loaded, PROMPTS)[0]


def test_seeds(loaded):
    drawn = settings(temperature=1.0)
    one, again, other = (generate(loaded, PROMPTS, settings=drawn, seed=seed) for seed in (0, 0, 1))
    assert one == again
    assert one != other


def test_end_tokens_are_left_out_and_end_an_answer(loaded):
    answers = generate(loaded, PROMPTS)
    ends = (answers[0][4], answers[1][9])
    ended = loaded._replace(ends=ends)
    expected = []
    for answer in answers:
        stop = next((i for i, token in enumerate(answer) if token in ends), len(answer))
        expected.append(answer[:stop])
    assert generate(ended, PROMPTS) == expected
    assert len(expected[0]) <= 4


def test_the_stream_ends_when_all_have_ended(loaded):
    first = generate(loaded, PROMPTS[:1])[0][0]
    assert list(stream(loaded._replace(ends=(first,)), PROMPTS[:1])) == [[[]]]


def test_a_model_without_end_tokens(loaded):
    assert generate(loaded._replace(ends=()), PROMPTS) == generate(loaded, PROMPTS)


def test_a_budget_of_one_is_the_language_model(loaded):
    plain = loaded._replace(model=Model.build(loaded.model.llm, None))
    one = settings(budget=1)
    answers = generate(plain, PROMPTS, settings=one)
    assert generate(loaded, PROMPTS, settings=one) == answers
    assert generate(loaded, PROMPTS) != answers
    ids = jnp.array([[*PROMPTS[1], *answers[1]]])
    hidden, _ = plain.model.llm(ids, tiny.positions(ids))
    likeliest = jnp.argmax(plain.model.llm.logits(hidden[0]), axis=-1)  # after every token, in one pass
    assert likeliest[len(PROMPTS[1]) - 1 : -1].tolist() == answers[1]


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
    plain = loaded._replace(model=Model.build(loaded.model.llm, None))
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

        def pieces(model, prompts, **_):
            for start in range(0, len(ids), size):
                yield [ids[start : start + size]]

        monkeypatch.setattr(generation, "stream", pieces)
        messages = [{"role": "user", "content": "?"}]
        return list(stream_text(loaded._replace(tokenizer=tokens.byte_tokenizer()), messages))

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
    monkeypatch.setattr(generation, "stream", lambda *_, **__: iter([[ids]]))
    pieces = stream_text(loaded._replace(tokenizer=tokens.byte_tokenizer()), [{"role": "user", "content": "?"}])
    assert "".join(pieces) == "ab"


def test_spaces_stay_as_they_were_generated(speaking, loaded, monkeypatch):
    """Llama's tokenizers ask for "a ." to be shown as "a."; a stream could not take the space back."""
    make = tokens.byte_tokenizer

    def cleaning():
        tokenizer = make()
        tokenizer.clean_up_tokenization_spaces = True
        return tokenizer

    monkeypatch.setattr(tokens, "byte_tokenizer", cleaning)
    assert "".join(speaking("a . b , c 's")) == "a . b , c 's"


def test_text_needs_a_tokenizer(loaded):
    with pytest.raises(InputError, match="has no tokenizer"):
        list(stream_text(loaded, [{"role": "user", "content": "?"}]))


def test_text_is_the_tokens_as_text(mesh):
    """With the tokenizer of bytes, whose ids the model's vocabulary holds."""
    base = models.open_base(config().model, mesh)
    tokenizer = base.tokenizer
    loaded = Loaded(Model.build(base.llm, None), tokenizer, base.ends, DecodeConfig(budget=1, max_new_tokens=12))
    messages = [{"role": "user", "content": "Hi"}]
    [ids] = generate(loaded, [tokens.prompt_ids(messages, tokenizer)])
    assert "".join(stream_text(loaded, messages)) == tokenizer.decode(ids, skip_special_tokens=True)
