"""Traces against decoding itself, and against a slow loop over every point."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.decoding import trace as tracing
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import corrected_hidden, make_target
from l2d_jax.decoding.refinement.refine import adapt
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from tests.support import tiny
from tests.support.requests import generate, request, trace

PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30]]
FIXED = {"solver": "midpoint", "budget": 15, "velocity_temperature": 1.0}
ADAPTIVE = {"solver": "fehlberg2", "budget": 60, "velocity": "expectation", "velocity_temperature": 1.0}


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(classes=2), None, (), DecodeConfig())


def of(options, length=2 * trajectory.CHUNK + 6):
    return DecodeConfig(max_new_tokens=length, **options)


def both(loaded, settings, prompts=PROMPTS, **options):
    """Answers and their traces."""
    answers = generate(loaded, prompts, settings=settings, **options)
    return answers, trace(loaded, prompts, answers, settings=settings, **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", [FIXED, ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_trace_ends_where_decoding_did(loaded, options):
    """At every token of answers of three chunks, with copies and classes; the velocity of the fixed solver is drawn."""
    answers, traces = both(loaded, of(options), samples=2, labels=[0, 1], seed=3)
    assert [[token.token for token in tokens] for tokens in traces] == answers
    assert [[token.likeliest for token in tokens] for tokens in traces] == answers
    rows = [token for tokens in traces for token in tokens]
    assert len(rows) == 4 * (2 * trajectory.CHUNK + 6)
    evaluations = {token.evaluations for token in rows}
    if options is FIXED:
        assert evaluations == {15}
        assert {token.rejected for token in rows} == {0}
        assert {round(7 * token.settled, 4) for token in rows} == set(range(8))
    else:
        assert min(evaluations) < max(evaluations) <= 60
        assert max(token.rejected for token in rows) > 0
        assert max(token.settled for token in rows) <= 63 / 64
    assert len({tuple(map(int, answer)) for answer in answers}) == 4


@jax.jit
def points(model, context, noise, key, settings, number, steps):
    """The corrected logits after `number` of the steps, from a solver that keeps the end alone."""
    if settings.solver.name == "midpoint":
        target = make_target(model, context, settings=settings, keys=key)
        x = integrate.solve_fixed(target, noise, solver=settings.solver, steps=number, end=number / steps)
        t = number / steps
        counts = number, 0
    else:
        found = adapt(model, context, noise, settings=dataclasses.replace(settings, steps=number), keys=key)
        x, t, counts = found.x, found.t[0, 0], (found.accepted[0, 0], found.rejected[0, 0])
    return model.llm.logits(corrected_hidden(model, context, x, jnp.float32(t)[None, None])[0, 0, 0]), t, counts


@jax.jit
def read(model, ids):
    return model.llm(ids, tiny.positions(ids))


def entropy(logits):
    probs = np.exp(np.float64(logits) - np.logaddexp.reduce(np.float64(logits)))
    return -np.sum(probs * np.log(probs))


@pytest.mark.slow
@pytest.mark.parametrize("options", [FIXED, ADAPTIVE], ids=["fixed", "adaptive"])
def test_a_trace_is_that_of_a_loop_over_every_point(loaded, options):
    """One token at a time, each with a frozen pass and integrations of its own."""
    settings, seed = of(options), 3
    model = loaded.model
    [answer], [traced] = both(loaded, settings, PROMPTS[:1], seed=seed, labels=[1])
    refinement = Refinement.from_config(settings)
    hardest = max(range(len(answer)), key=lambda number: traced[number].rejected)
    assert (traced[hardest].rejected > 0) == (options is ADAPTIVE)
    for number in (hardest, 5, trajectory.CHUNK + 2):
        text = [*PROMPTS[0], *answer[:number]]
        ids = jnp.array([text + [0] * (80 - len(text))], jnp.int32)  # what follows is masked
        hidden, cache = read(model, ids)
        hidden, at = hidden[:, len(text) - 1 : len(text)], jnp.array([[len(text) - 1]], jnp.int32)
        context = Context(hidden, cache, at, jnp.array([[1]]))
        keys = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), number), 3)
        noise = 64 * jax.random.normal(keys[0], (16,))[None, None]
        follow = partial(points, model, context, noise, keys[1][None, None], refinement)
        passed = [follow(jnp.int32(n), refinement.steps) for n in range(int(refinement.steps) + 1)]
        likeliest = [int(jnp.argmax(logits)) for logits, _, _ in passed]
        wrong = [n for n, token in enumerate(likeliest) if token != likeliest[-1]]
        logits, _, (accepted, rejected) = passed[-1]
        found = traced[number]
        assert found.likeliest == likeliest[-1]
        assert found.settled == pytest.approx(float(passed[max(wrong, default=-1) + 1][1]), abs=1e-3)
        assert found.rejected == rejected
        assert found.evaluations == (15 if options is FIXED else 2 + 2 * (accepted + rejected))
        assert found.entropy == pytest.approx(entropy(logits), abs=1e-3)
        assert found.plain_likeliest == int(jnp.argmax(model.llm.logits(hidden[0, 0])))
        assert found.plain_entropy == pytest.approx(entropy(model.llm.logits(hidden[0, 0])), abs=1e-3)
        assert abs(found.entropy - found.plain_entropy) > 1e-3


@pytest.mark.slow
def test_a_budget_of_one_is_the_language_model(loaded):
    one = of({"budget": 1}, 12)
    answers, traces = both(loaded, one)
    plain = dataclasses.replace(loaded, model=Model.build(loaded.model.llm, None))
    assert generate(plain, PROMPTS, settings=one) == answers
    for model, evaluations in ((loaded, 1), (plain, 0)):
        for token in (row for tokens in trace(model, PROMPTS, answers, settings=one) for row in tokens):
            assert token.likeliest == token.plain_likeliest == token.token
            assert token.entropy == pytest.approx(token.plain_entropy, rel=1e-6)
            assert (token.evaluations, token.settled, token.rejected, token.skipped) == (evaluations, 0.0, 0, False)
    assert [len(tokens) for tokens in traces] == [12, 12]


@pytest.mark.slow
def test_the_gate_skips_what_decoding_skips(loaded):
    plain = [token.plain_entropy for tokens in both(loaded, of(FIXED, 12))[1] for token in tokens]
    gate = float(np.median(plain))
    answers, traces = both(loaded, of({**FIXED, "gate": gate}, 12))
    rows = [token for tokens in traces for token in tokens]
    assert [token.likeliest for token in rows] == [token for answer in answers for token in answer]
    assert {token.skipped for token in rows} == {True, False}
    for token in rows:
        assert token.skipped == (token.plain_entropy < gate)
        assert token.evaluations == (0 if token.skipped else 15)
        if token.skipped:
            assert (token.entropy, token.settled) == (token.plain_entropy, 0.0)


@pytest.mark.slow
def test_the_arg_max_of_a_drawn_token_is_another(loaded):
    traces = both(loaded, of({**FIXED, "temperature": 0.3}, 12))[1]
    assert {token.likeliest == token.token for tokens in traces for token in tokens} == {True, False}


@pytest.mark.slow
def test_passes_are_counted_only_where_they_are_asked_for(loaded):
    settings = of(FIXED, 12)
    answers, counted = both(loaded, settings)
    asked = request(loaded, PROMPTS, settings=settings)
    without = tracing.trace(loaded, asked, answers, counts_passes=False)
    assert all(token.passes >= 2 for tokens in counted for token in tokens)
    assert without == [[token._replace(passes=None) for token in tokens] for tokens in counted]


@pytest.mark.slow
def test_an_answer_without_tokens(loaded):
    settings = of(FIXED, 12)
    answers = [[], generate(loaded, PROMPTS, settings=settings)[1]]
    none, some = trace(loaded, PROMPTS, answers, settings=settings)
    assert none == []
    assert [token.likeliest for token in some] == answers[1]


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"draws": 2}, {}, "a trace follows one noise sample per token, got draws 2"),
        ({}, {"samples": 2}, "2 prompts with 2 samples each take 4 answers, got 2"),
        ({}, {"labels": [1]}, "one class label per prompt, got 1 for 2 prompts"),
        ({}, {"labels": [1, 2]}, "class label 2 is unknown"),
        ({"budget": 4}, {}, "a budget of 4 evaluations is unreachable for midpoint"),
    ],
)
def test_bad_requests(loaded, changes, options, message):
    with pytest.raises(InputError, match=message):
        trace(loaded, PROMPTS, [[1], [2]], settings=of({**FIXED, **changes}), **options)


@pytest.mark.parametrize("ids", ["Été — 東京 😀".encode(), b"a\xff", [*b"a", 258, *b"b"]])
def test_pieces_of_text_are_the_text(ids):
    """A character is with the last of its tokens; a special token has none."""
    tokenizer = byte_tokenizer()
    small = LoadedModel(tiny.model(), tokenizer, (), of({"budget": 1}))
    big = dataclasses.replace(small, model=Model.build(tiny.randomise(_with_bytes()), None))
    [traced] = trace(big, [[1]], [list(ids)])
    assert "".join(token.text for token in traced) == tokenizer.decode(list(ids), skip_special_tokens=True)
    assert [len(token.text) <= 1 for token in traced] == [True] * len(ids)


def _with_bytes():
    return LLM.declare(Architecture.from_hf({**tiny.CONFIGS["llama"], "vocab_size": 259}), dtype=jnp.float32)
