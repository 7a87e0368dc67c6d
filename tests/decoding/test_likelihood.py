"""Log-likelihoods against the language model's own, and against the mean over many draws by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import l2d_jax
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import likelihood
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.errors import InputError
from tests.support import tiny
from tests.support.requests import generate, score

PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30], [11]]
ANSWERS = [[7, 7, 90, 4], [1], [33, 12]]


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(classes=2), None, (95,), DecodeConfig(budget=3))


@pytest.mark.slow
def test_a_budget_of_one_is_the_language_models_own_likelihood(loaded):
    found = score(loaded, PROMPTS, ANSWERS, settings=DecodeConfig(budget=1))
    for prompt, answer, one in zip(PROMPTS, ANSWERS, found, strict=True):
        tokens = jnp.array([[*prompt, *answer]], jnp.int32)
        hidden, _ = loaded.model.llm(tokens, tiny.positions(tokens))
        chances = jax.nn.log_softmax(loaded.model.llm.logits(hidden))[0]
        wanted = [chances[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]
        np.testing.assert_allclose(one.tokens, wanted, atol=1e-4)
        np.testing.assert_allclose(one.total, np.sum(wanted), atol=1e-3)
        assert one.error < 1e-6


@pytest.mark.slow
def test_more_draws_are_nearer_to_the_mean_and_say_how_near(loaded):
    settings = DecodeConfig(budget=5, velocity_temperature=1.0)
    exact, few = (
        score(loaded, PROMPTS, ANSWERS, settings=settings, draws=draws, seed=seed)
        for draws, seed in [(2000, 1), (50, 2)]
    )
    off = np.concatenate([(a.tokens - b.tokens) / a.token_errors for a, b in zip(few, exact, strict=True)])
    assert np.abs(off).max() < 4
    assert np.abs(off).max() > 0.2
    assert all(b.error < a.error / 4 for a, b in zip(few, exact, strict=True))


def test_the_mean_is_of_probabilities(loaded, monkeypatch):
    rng = np.random.default_rng(0)
    chances = rng.normal(-3, 1, (6, 1, 4)).astype(np.float32)
    likeliest, values = np.zeros((1, 4, 1), np.int32), np.zeros((1, 4, 1), np.float32)
    results = (chances[..., None], likeliest, values, np.ones((1, 4), np.int32))
    monkeypatch.setattr(likelihood, "_log_probs", lambda *_, **__: results)
    [one] = score(loaded, PROMPTS[:1], ANSWERS[:1])
    mean = np.exp(chances[:, 0]).mean(axis=0)
    np.testing.assert_allclose(one.tokens, np.log(mean), rtol=1e-6)
    np.testing.assert_allclose(one.token_errors, np.exp(chances[:, 0]).std(axis=0, ddof=1) / 6**0.5 / mean, rtol=1e-6)
    np.testing.assert_allclose((one.total, one.error), (np.log(mean).sum(), np.sqrt((one.token_errors**2).sum())))


@pytest.mark.slow
def test_an_answer_does_not_depend_on_its_batch_mates(loaded):
    together = score(loaded, PROMPTS, ANSWERS)
    alone = score(loaded, PROMPTS[:1], ANSWERS[:1])[0]
    assert alone.tokens.shape == together[0].tokens.shape == (4,)
    np.testing.assert_allclose(score(loaded, PROMPTS[:1], ANSWERS[:1])[0].tokens, alone.tokens)
    np.testing.assert_allclose(together[0].tokens, alone.tokens, atol=1e-4)
    longer = score(loaded, [PROMPTS[0], PROMPTS[1] * 20], [ANSWERS[0], [3] * 70])[0]  # other buckets of both lengths
    np.testing.assert_allclose(longer.tokens, alone.tokens, atol=1e-4)


@pytest.mark.slow
def test_noise_goes_with_the_number(loaded):
    first, second = score(loaded, PROMPTS[:1] * 2, ANSWERS[:1] * 2, numbers=[4, 9])
    assert abs(first.total - second.total) > 1e-5
    again, _ = score(loaded, [PROMPTS[0], PROMPTS[1]], [ANSWERS[0], ANSWERS[1]], numbers=[9, 4])
    np.testing.assert_allclose(again.tokens, second.tokens, atol=1e-4)


@pytest.mark.slow
def test_the_likeliest_tokens_are_those_of_the_mean(loaded):
    """Which is what greedy decoding with as many draws would say, and no draw on its own."""
    settings = DecodeConfig(budget=5, velocity_temperature=1.0)
    [one] = score(loaded, PROMPTS[:1], ANSWERS[:1], settings=settings, draws=64)
    contexts = [PROMPTS[0] + ANSWERS[0][:place] for place in range(4)]
    options = [list(range(96))] * 4
    means = likelihood.rank(loaded.model, Request(number_prompts(contexts), settings, seed=1), options, draws=500)
    # It may be another of two that are as likely.
    assert all(mean[token] > mean.max() - 0.05 for mean, token in zip(means, one.likeliest, strict=True))
    assert any(mean[token] < mean.max() - 0.05 for mean, token in zip(means, ANSWERS[0], strict=True))


def test_pieces_say_the_same(loaded):
    """Whatever their size, which changes neither the noise of a token nor its number of evaluations."""
    answer = [*range(20, 50)]
    [whole] = score(loaded, PROMPTS[:1], [answer], seed=5)
    request = Request(number_prompts(PROMPTS[:1]), loaded.defaults, seed=5)
    pieces = list(likelihood.score_in_pieces(loaded.model, request, answer, draws=8, piece=12, top=3))
    assert [len(piece.log_probs) for piece in pieces] == [12, 12, 6]
    np.testing.assert_allclose(np.concatenate([piece.log_probs for piece in pieces]), whole.tokens, atol=1e-5)
    assert np.concatenate([piece.likeliest for piece in pieces])[:, 0].tolist() == whole.likeliest.tolist()
    assert all((np.diff(piece.likeliest_log_probs, axis=1) <= 0).all() for piece in pieces)
    assert sum(piece.evaluations for piece in pieces) == 30 * 8 * loaded.defaults.budget


@pytest.mark.slow
def test_all_positions_can_be_used(loaded):
    """The last token of an answer takes none."""
    found = score(loaded, [[1] * 1000, [1] * 1024], [[2] * 25, [3]], settings=DecodeConfig(budget=1))
    assert [len(one.tokens) for one in found] == [25, 1]


@pytest.mark.slow
def test_what_is_generated_is_likely(loaded):
    own = generate(loaded, PROMPTS, settings=DecodeConfig(budget=3, max_new_tokens=6))
    likely, others = (score(loaded, PROMPTS, answers) for answers in (own, [[50] * 6] * 3))
    assert all(a.total > b.total for a, b in zip(likely, others, strict=True))


@pytest.mark.slow
def test_classes_change_the_likelihood(loaded):
    with_0, with_1 = (score(loaded, PROMPTS, ANSWERS, labels=[label] * 3)[0].total for label in (0, 1))
    assert abs(with_0 - with_1) > 1e-3


def test_the_package_hands_it_on():
    assert l2d_jax.LoadedModel is LoadedModel


@pytest.mark.parametrize(
    ("prompts", "answers", "options", "message"),
    [
        (PROMPTS, ANSWERS, {"draws": 1}, "a standard error takes at least 2 draws, got 1"),
        (PROMPTS, ANSWERS[:2], {}, "each prompt takes one answer of at least one token, got 2 for 3"),
        (PROMPTS[:1], [[]], {}, "each prompt takes one answer"),
        ([[]], [[1]], {}, "a prompt is empty"),
        ([[1] * 1000], [[1] * 30], {}, "a prompt of 1000 tokens and 30 new ones exceed the 1024 positions"),
        ([[1] * 1024], [[1] * 2], {}, "a prompt of 1024 tokens and 2 new ones exceed"),
        ([[1]], [[96]], {}, "token 96 is not one of the 96 of the model"),
        ([[1]], [[2]], {"labels": [2]}, "class label 2 is unknown"),
        ([[1]], [[2]], {"labels": [0, 1]}, "guidance takes one class label per prompt, got 2 for 1 prompts"),
        ([[1]], [[2]], {"settings": DecodeConfig(budget=4)}, "a budget of 4 evaluations is unreachable"),
    ],
)
def test_bad_input(loaded, prompts, answers, options, message):
    with pytest.raises(InputError, match=message):
        score(loaded, prompts, answers, **options)


def test_a_path_is_needed_for_more_than_one_evaluation(loaded):
    plain = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, path=None, table=None))
    with pytest.raises(InputError, match="needs a diffusion path"):
        score(plain, PROMPTS, ANSWERS)
