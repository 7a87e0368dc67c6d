"""A diffusion that stops at an earlier t, in what is built on it: answers, traces, accuracies and likelihoods."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.refine import adapt
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.trace import accuracy_by_time
from l2d_jax.errors import InputError
from l2d_jax.model.context import Context
from tests.support import tiny
from tests.support.marks import slow
from tests.support.requests import generate, score, trace

PROMPTS = [[5, 17, 3], [60, 2, 41, 8, 8, 30]]
ANSWERS = [[9, 8, 7, 30, 31], [1, 2, 3]]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return LoadedModel(tiny.model(), None, (), DecodeConfig())


def of(**options: Any) -> DecodeConfig:
    return DecodeConfig(**{"max_new_tokens": 8, **options})


@pytest.mark.slow
def test_a_trace_ends_where_decoding_did(loaded: LoadedModel) -> None:
    """With sampled estimates, whose keys depend on the bits of t."""
    settings = of(budget=15, end=0.55, velocity_temperature=1.0)
    answers = generate(loaded, PROMPTS, settings=settings, seed=3)
    rows = [token for tokens in trace(loaded, PROMPTS, answers, settings=settings, seed=3) for token in tokens]
    assert [token.likeliest for token in rows] == [token for answer in answers for token in answer]
    assert {token.evaluations for token in rows} == {15}
    assert 0 < max(token.settled for token in rows) <= 0.55 + 1e-6
    assert answers != generate(loaded, PROMPTS, settings=dataclasses.replace(settings, end=1.0), seed=3)


def test_stopping_at_t_is_what_a_whole_diffusion_shows_at_t(loaded: LoadedModel) -> None:
    """With steps of the same length: the estimates before t do not depend on where the diffusion stops."""

    def accuracy(settings: DecodeConfig) -> dict[str, list[float]]:
        return accuracy_by_time(loaded, Request(number_prompts(PROMPTS), settings, seed=3), ANSWERS)

    annealed = {"velocity_temperature": 0.7, "anneal": True, "velocity": "expectation"}
    whole = accuracy(of(budget=9, **annealed))
    early = accuracy(of(budget=5, end=0.5, **annealed))
    assert (whole["t"], early["t"]) == ([0, 0.25, 0.5, 0.75, 1], [0, 0.25, 0.5])
    np.testing.assert_allclose(early["expected"], whole["expected"][:3], rtol=1e-4)
    assert len({round(value, 6) for value in whole["expected"]}) == 5


@pytest.mark.parametrize("solver", ["midpoint", *slow("restart")])
def test_likelihoods_stop_there_too(loaded: LoadedModel, solver: Any) -> None:
    """One by one and side by side; near t = 0 they are the language model's."""
    settings = of(budget=5, solver=solver, end=0.4, velocity_temperature=1.0, parallel="off")
    ways = {
        name: score(loaded, PROMPTS, ANSWERS, settings=dataclasses.replace(settings, **changes), seed=2)
        for name, changes in {
            "off": {},
            "on": {"parallel": "on"},
            "whole": {"end": 1.0},
            "begin": {"end": 1e-6},
            "plain": {"budget": 1},
        }.items()
    }
    totals = {name: np.array([one.total for one in found]) for name, found in ways.items()}
    np.testing.assert_allclose(totals["on"], totals["off"], atol=1e-3)
    np.testing.assert_allclose(totals["begin"], totals["plain"], atol=1e-2)
    for name in ("whole", "plain"):
        assert np.abs(totals[name] - totals["off"]).min() > 1e-2


def test_adaptive_steps_stop_at_the_end_or_at_the_releases(loaded: LoadedModel) -> None:
    """An end of 1, the default, is 1 - 1/sigma; sequences may differ."""
    model, tokens = loaded.model, tiny.tokens(3, 6)
    hidden, cache = jax.jit(lambda m, t: m.llm(t, tiny.positions(t)))(model, tokens)
    at = Context(hidden[:, -1:], cache, tiny.positions(tokens)[:, -1:], inputs=model.llm.lookup(tokens[:, -1:]))
    config = of(solver="fehlberg2", budget=400, velocity="expectation", velocity_temperature=1.0, tolerance=1e-2)
    base = Refinement.from_config(config)
    each = jax.tree.map(lambda a: jnp.broadcast_to(a, (3, *a.shape[1:])), base)
    settings = dataclasses.replace(each, end=jnp.float32([1.0, 0.5, 0.03]))  # the first step would be 0.05 long
    noise, keys = 64 * jax.random.normal(jax.random.key(0), (3, 1, 16)), jax.random.split(jax.random.key(1), (3, 1))
    found = jax.jit(adapt)(model, at, noise, settings=settings, keys=keys)
    np.testing.assert_array_equal(found.t[:, 0], np.float32([63 / 64, 0.5, 0.03]))
    assert np.isfinite(found.x).all()
    assert found.accepted[0, 0] > found.accepted[1, 0] > found.accepted[2, 0] == 1


def test_annealing_falls_to_zero_at_one_and_not_at_the_end() -> None:
    level = {"velocity_temperature": 2.0, "anneal": True, "solver": "euler", "budget": 6}
    for end, last in ((1.0, 0.0), (0.5, 1.0)):
        settings = Refinement.from_config(of(end=end, **level))
        found = settings.temperature(jnp.float32([[0.0, 0.8 * end]]))[0]
        np.testing.assert_allclose(found, [2 * (1 - end / 5), last], atol=1e-6)


def test_a_budget_of_one_has_no_points(loaded: LoadedModel) -> None:
    with pytest.raises(InputError, match="a budget of 1 has none: raise the budget"):
        accuracy_by_time(loaded, Request(number_prompts(PROMPTS), of(budget=1)), ANSWERS)
