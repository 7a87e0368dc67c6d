"""Completing sets of prompts: nothing depends on the batches, and few programs are compiled."""

import dataclasses

import jax
import pytest
from jax._src import test_util

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batching import common_prefix, complete
from l2d_jax.decoding.buckets import round_up
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.errors import InputError
from tests.support import tiny
from tests.support.requests import generate
from tests.support.served import talking_model

SETTINGS = DecodeConfig(budget=3, max_new_tokens=6, temperature=1.0)
PROMPTS = [Prompt(number, [1 + (7 * number + i) % 90 for i in range(2 + 9 * number)]) for number in range(9)]


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(classes=2), None, (95,), SETTINGS)


def answers(loaded, prompts, *, settings=SETTINGS, **options):
    found = {}
    for batch in complete(loaded, prompts, settings=settings, **options):
        assert not found.keys() & batch.keys()
        found |= {number: [one.ids for one in several] for number, several in batch.items()}
    return found


@pytest.mark.slow
def test_answers_depend_on_neither_batches_nor_order(loaded):
    whole = answers(loaded, PROMPTS, batch_size=9)
    assert whole.keys() == set(range(9))
    assert answers(loaded, PROMPTS[::-1], batch_size=4) == whole
    assert answers(loaded, PROMPTS[3:5], batch_size=2) == {3: whole[3], 4: whole[4]}
    alone = generate_tokens(loaded.model, Request([PROMPTS[5]], SETTINGS, stop_ids=loaded.stop_ids))
    assert whole[5] == alone
    assert generate(loaded, [PROMPTS[5].ids], settings=SETTINGS) != alone


def test_a_text_ends_an_answer(mesh):
    loaded = talking_model()
    prompts, settings = [Prompt(0, list(b"Hi"))], dataclasses.replace(SETTINGS, parallel="off")
    with jax.set_mesh(mesh):
        whole = to_text(answers(loaded, prompts, settings=settings, batch_size=1)[0][0], loaded.tokenizer)
        stop = whole[3]
        ended = answers(loaded, prompts, settings=settings, batch_size=1, stops=[stop])[0][0]
    assert to_text(ended, loaded.tokenizer) == whole.partition(stop)[0] != whole


@pytest.mark.slow
def test_what_an_answer_took_is_counted(loaded):
    [batch] = complete(loaded, PROMPTS[:1], settings=SETTINGS, batch_size=1)
    [one] = batch[0]
    assert (one.tokens, one.evaluations) == (6, 18)  # three for each token
    ending = dataclasses.replace(loaded, stop_ids=(one.ids[2],))
    [batch] = complete(ending, PROMPTS[:1], settings=SETTINGS, batch_size=1)
    [[ended]] = batch.values()
    assert (ended.ids, ended.tokens, ended.evaluations) == (one.ids[:2], 3, 9)
    assert 3 <= ended.passes <= 12
    plain = dataclasses.replace(SETTINGS, parallel="off")
    [batch] = complete(ending, PROMPTS[:1], settings=plain, batch_size=1)
    assert batch == {0: [(one.ids[:2], 3, 9, 12)]}  # a pass of the language model for each token, too


@pytest.mark.slow
def test_samples_stand_beside_each_other(loaded):
    one, three = answers(loaded, PROMPTS[:2], batch_size=2), answers(loaded, PROMPTS[:2], batch_size=6, samples=3)
    for number, [first, *rest] in three.items():
        assert [first] == one[number]
        assert len(rest) == 2
        assert first not in rest


@pytest.mark.slow
def test_labels_and_seeds(loaded):
    plain = answers(loaded, PROMPTS[:2], batch_size=2)
    labelled = [prompt._replace(label=1) for prompt in PROMPTS[:2]]
    assert answers(loaded, labelled, batch_size=2) != plain
    assert answers(loaded, PROMPTS[:2], batch_size=2, seed=1) != plain


@pytest.mark.slow
def test_one_program_a_bucket(loaded):
    many = [Prompt(number, [3] * (65 + number)) for number in range(10)]  # all in the bucket of 96
    answers(loaded, many[:4], batch_size=2)
    with test_util.count_jit_and_pmap_lowerings() as count:
        answers(loaded, many, batch_size=2)
    assert count() == 0


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"draws": 2}, {"solver": "fehlberg2", "budget": 12}])
def test_what_prompts_share_is_read_once(loaded, changes):
    settings = dataclasses.replace(SETTINGS, **changes)
    few = [Prompt(number, [*range(1, 38), 50 + number, *range(number)]) for number in range(5)]
    assert common_prefix([prompt.ids for prompt in few]) == 32
    apart = answers(loaded, few, batch_size=3, settings=settings)
    assert answers(loaded, few, batch_size=3, settings=settings, prefix=32) == apart


@pytest.mark.parametrize(
    ("prompts", "wanted"),
    [
        ([], 0),
        ([[1] * 300], 0),
        ([[1] * 300] * 2, 296),
        ([[1] * 256] * 2, 248),
        ([[1] * 300, [1] * 205 + [2] * 9], 200),
        ([[1] * 300, [1] * 7 + [2] * 9], 0),
    ],
)
def test_common_prefix(prompts, wanted):
    assert common_prefix(prompts) == wanted


@pytest.mark.parametrize(
    ("length", "wanted"),
    [(1, 32), (32, 32), (33, 48), (49, 64), (65, 96), (96, 96), (97, 128), (129, 192), (1025, 1536)],
)
def test_buckets(length, wanted):
    assert round_up(length) == wanted


def test_a_batch_that_is_too_small(loaded):
    with pytest.raises(InputError, match="a batch of 2 does not hold 3 samples of a prompt: use 3 or more"):
        answers(loaded, PROMPTS, batch_size=2, samples=3)


def test_nothing_to_complete(loaded):
    assert answers(loaded, [], batch_size=2) == {}
