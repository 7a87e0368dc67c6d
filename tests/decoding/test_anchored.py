"""Everything that decodes, with a path that begins as the language model and reads the context itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.likelihood import score_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.search.beam_search import search
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.trace import accuracy_by_time
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.quantization import quantize_layers
from tests.support import tiny
from tests.support.requests import generate, trace

PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30]]
LENGTH = 6
FIXED = DecodeConfig(budget=5, max_new_tokens=LENGTH)
ADAPTIVE = dataclasses.replace(FIXED, solver="fehlberg2", budget=30, velocity="expectation", velocity_temperature=1.0)


@pytest.fixture(scope="module", params=["lm", "path"])
def loaded(request):
    return LoadedModel(tiny.model(classes=2, start="anchored", reader=request.param, sigma=4.0), None, (), FIXED)


@jax.jit
def uncached(model, ids, length, settings, key):
    """Logits of the next token from a pass over all of the text."""
    hidden, cache = model.llm(ids, jnp.where(jnp.arange(ids.shape[1]) < length, jnp.arange(ids.shape[1]), -1)[None])
    last = jnp.array([[length - 1]])
    inputs = model.llm.lookup(ids)[:, length - 1][:, None]
    noise_key, velocity_key, _ = jax.random.split(key, 3)
    noise = jax.random.normal(noise_key, (1, 16))[None]
    context = Context(hidden[:, length - 1][:, None], cache, last, inputs=inputs)
    keys = velocity_key[None, None]
    return model.llm.logits(refine(model, context, noise, settings=settings, keys=keys)[0])[0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [FIXED, ADAPTIVE], ids=["fixed", "adaptive"])
def test_decoding_is_a_pass_over_the_whole_text_for_each_token(loaded, settings):
    answers = generate(loaded, PROMPTS, settings=settings, seed=7)
    model = loaded.model.reading(refines=True)
    for row, (prompt, answer) in enumerate(zip(PROMPTS, answers, strict=True)):
        for number, token in enumerate(answer):
            text = [*prompt, *answer[:number]]
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), row), number)
            ids = jnp.array([text + [0] * (16 - len(text))], jnp.int32)
            logits = uncached(model, ids, jnp.int32(len(text)), Refinement.from_config(settings), key)
            assert token == int(jnp.argmax(logits))


@pytest.mark.slow
def test_a_budget_of_one_is_the_language_model_to_the_bit(loaded):
    one = dataclasses.replace(FIXED, budget=1)
    plain = dataclasses.replace(loaded, model=Model.build(loaded.model.llm, None))
    assert generate(loaded, PROMPTS, settings=one) == generate(plain, PROMPTS, settings=one)
    assert generate(loaded, PROMPTS, settings=FIXED) != generate(plain, PROMPTS, settings=one)
    found, expected = (
        score_answers(m.model, Request(number_prompts(PROMPTS), one), [[3, 9], [4]]) for m in (loaded, plain)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a.tokens, b.tokens)


@pytest.mark.slow
def test_likelihoods_and_traces_and_searches_are_those_of_decoding(loaded):
    answers = generate(loaded, PROMPTS, settings=FIXED)
    likeliest = score_answers(loaded.model, Request(number_prompts(PROMPTS), FIXED), answers, draws=2)
    assert [row.token for row in trace(loaded, PROMPTS, answers, settings=FIXED)[0]] == answers[0]
    assert all(row.likeliest == row.token for rows in trace(loaded, PROMPTS, answers, settings=FIXED) for row in rows)
    assert all(np.isfinite(one.tokens).all() for one in likeliest)
    one = SearchConfig(beams=1, candidates=1, max_new_tokens=LENGTH, temperature=0.0)
    assert search(loaded, number_prompts(PROMPTS)[1], settings=FIXED, config=one).answer == answers[1]
    rates = accuracy_by_time(loaded, Request(number_prompts(PROMPTS[:1]), FIXED), [answers[0]])
    assert rates["greedy"][-1] == 1.0


@pytest.mark.slow
def test_classes_draws_tables_and_gates(loaded):
    """A class, several noise samples and a table of conditions change what they should, and a gate skips the path."""
    plain = generate(loaded, PROMPTS, settings=FIXED)
    guided = generate(loaded, PROMPTS, settings=dataclasses.replace(FIXED, guidance=3.0), labels=[0, 1])
    one = dataclasses.replace(FIXED, budget=1)
    assert generate(loaded, PROMPTS, settings=one, labels=[0, 1]) == generate(loaded, PROMPTS, settings=one)
    drawn = generate(loaded, PROMPTS, settings=dataclasses.replace(FIXED, draws=3))
    assert guided != plain
    assert all(len(answer) == LENGTH for answer in drawn)
    gated = generate(loaded, PROMPTS, settings=dataclasses.replace(FIXED, gate=100.0))
    reading = loaded.model.reading(refines=True).llm
    alone = dataclasses.replace(loaded, model=Model.build(reading, None))
    assert gated == generate(alone, PROMPTS, settings=dataclasses.replace(FIXED, budget=1))


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["lm", "path"])
def test_int8_is_near_float32(reader):
    """Quantised weights below, float32 updates on top."""
    model = tiny.model(start="anchored", reader=reader, sigma=4.0)
    layers = quantize_layers(model.llm.layers)
    quantised = dataclasses.replace(model, llm=dataclasses.replace(model.llm, layers=layers))
    texts = Request(number_prompts([[*range(3, 20)]]), FIXED), [[7, 8, 9]]
    found, expected = (score_answers(one, *texts, draws=2)[0].tokens for one in (quantised, model))
    assert 0 < np.abs(found - expected).max() < 0.5
