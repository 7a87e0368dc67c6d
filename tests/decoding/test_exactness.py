"""Side by side or as a stream, not one token of an answer differs from those of evaluations one by one.

Models are random, so most guesses fail. Of each solver, with the likeliest token and with a sampled one as the
estimate: prompts alone, with budgets and gates of their own in few lanes, with ends of their own besides, with a class,
with several noise samples, by a grammar, with these three together. The kinds of models take turns.
"""

import dataclasses
import random
from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import decode_lanes
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.requests import Prompt, Request, Restrictions
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.answers import differing_tokens
from tests.support.marks import slow

SOLVERS = {"euler": (1, 4, 9, 15), "midpoint": (1, 3, 9, 15), "rk4": (1, 5, 9, 13), "restart": (1, 4, 9, 15)}
ESTIMATES: dict[str, dict[str, Any]] = {
    "arg max": {},
    "sampled": {"velocity_temperature": 0.7, "temperature": 1.0},
}
USES = ("alone", "lanes", "class", "draws", "grammar", "ends", "all")
CLASS, DRAWS, GRAMMAR = (("all", use) for use in ("class", "draws", "grammar"))
ENDS = (1.0, 0.97, 0.6, 0.25)  # t at which a diffusion stops
KINDS: tuple[dict[str, Any], ...] = ({}, {"start": "anchored"}, {"start": "anchored", "reader": "path"})
STOPS = (94, 95)


class Thirds(Grammar):
    """Allows the tokens of one residue by three, that of the number of tokens so far."""

    def __init__(self) -> None:
        self._said = 0

    def start(self) -> "Thirds":
        return Thirds()

    def mask(self) -> np.ndarray:
        return np.arange(96) % 3 == self._said % 3

    def accept(self, token: int) -> None:
        assert token % 3 == self._said % 3
        self._said += 1


def prompts(count: int, options: dict[str, Any], budgets: tuple[int, ...], use: str) -> list[Prompt]:
    rng = random.Random(5)
    texts = [[rng.randrange(96) for _ in range(rng.randint(1, 12))] for _ in range(count)]
    if use not in ("lanes", "ends"):
        return [Prompt(i, ids, 1 if use in CLASS else None) for i, ids in enumerate(texts)]
    own = [DecodeConfig(**options, budget=rng.choice(budgets), gate=rng.choice((0.0, 0.0, 4.3))) for _ in range(count)]
    if use == "ends":
        own = [dataclasses.replace(one, end=ENDS[number % len(ENDS)]) for number, one in enumerate(own)]
    return [Prompt(i, ids, settings=one) for i, (ids, one) in enumerate(zip(texts, own, strict=True))]


def answer(
    model: Model, request: Request, parallel: Any, *, lanes: int, spent: Counter[str] | None = None
) -> list[list[int]]:
    """The answers to all prompts, `lanes` at a time; counts the passes in `spent`."""
    ordered = [
        one if one.settings is None else one._replace(settings=dataclasses.replace(one.settings, parallel=parallel))
        for one in request.prompts
    ]
    chosen = dataclasses.replace(request.settings, parallel=parallel)
    answers: list[list[int]] = [[] for _ in ordered]
    for pieces in decode_lanes(model, dataclasses.replace(request, prompts=ordered, settings=chosen), lanes=lanes):
        for piece in pieces:
            answers[piece.answer] += piece.tokens
            assert piece.passes <= piece.evaluations + 2 * piece.decoded + 2
            if spent is not None:
                spent[parallel] += piece.passes
    return answers


def make(name: str, estimate: str, use: str, *, count: int, new: int) -> tuple[Model, Request]:
    """A model of one of the kinds, and what it is asked."""
    kind = KINDS[([*SOLVERS].index(name) + [*ESTIMATES].index(estimate) + USES.index(use)) % len(KINDS)]
    options = {"solver": name, "max_new_tokens": new} | ESTIMATES[estimate]
    options |= {"guidance": 2.0} if use in CLASS else {}
    options |= {"draws": 3} if use in DRAWS else {}
    budgets = SOLVERS[name]
    # A path that reads the context itself has no budget of 1 beside others.
    spent = budgets[1:] if kind.get("reader") == "path" else budgets
    settings = DecodeConfig(**options, budget=budgets[-1])
    restrictions = Restrictions(grammar=Thirds()) if use in GRAMMAR else Restrictions()
    asked = prompts(count, options, spent, use)
    request = Request(asked, settings, seed=3, restrictions=restrictions, stop_ids=STOPS)
    return tiny.model("llama", **kind, classes=2 if use in CLASS else 0), request


def count_differences(name: str, estimate: str, use: str, *, count: int, new: int, lanes: int) -> tuple[int, int]:
    """The tokens that differ, and all tokens."""
    model, request = make(name, estimate, use, count=count, new=new)
    wanted, found = (answer(model, request, way, lanes=lanes) for way in ("off", "on"))
    return differing_tokens(found, wanted), sum(map(len, wanted))


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("estimate", ESTIMATES)
def test_no_token_differs(estimate: str, use: str) -> None:
    differ, tokens = count_differences("midpoint", estimate, use, count=20, new=8, lanes=5)
    assert differ == 0
    assert tokens > 80


def test_no_token_differs_with_a_class_and_several_draws_by_a_grammar() -> None:
    """In few lanes: they are filled again while others go on."""
    differ, tokens = count_differences("midpoint", "sampled", "all", count=12, new=8, lanes=5)
    assert differ == 0
    assert tokens > 50


@pytest.mark.parametrize("estimate", [*slow("arg max"), "sampled"])
def test_no_token_differs_where_the_last_stage_counts(estimate: str) -> None:
    """The 3/8 rule evaluates at the end of a step, which has no velocity at t = 1 and has one at an earlier end."""
    differ, tokens = count_differences("rk4", estimate, "ends", count=12, new=8, lanes=12)
    assert differ == 0
    assert tokens > 50


@pytest.mark.parametrize("use", ["alone", *slow("draws")])
def test_one_evaluation_a_pass_in_low_precision(use: str) -> None:
    """In the program of all of them: the same bits, although rounding depends on the number of rows."""
    model, request = make("midpoint", "sampled", use, count=5, new=8)
    model = Model.build(tiny.llm(dtype=jnp.bfloat16), model.path)
    spent = Counter[str]()
    found = [answer(model, request, way, lanes=5, spent=spent) for way in ("on", "check")]
    assert found[1] == found[0]
    assert spent["check"] > spent["on"]


@pytest.mark.slow
def test_the_largest_budget_that_goes_side_by_side() -> None:
    model = tiny.model(start="anchored")
    asked = [Prompt(i, [5 + i, 17, 3]) for i in range(3)]
    settings = DecodeConfig(budget=127, velocity_temperature=1.0, max_new_tokens=3)
    wanted, found = (answer(model, Request(asked, settings, seed=2), way, lanes=3) for way in ("off", "on"))
    assert found == wanted
    assert [len(tokens) for tokens in found] == [3, 3, 3]


@pytest.mark.slow
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("name", SOLVERS)
def test_no_token_of_many_differs(name: str, estimate: str, use: str) -> None:
    differ, tokens = count_differences(name, estimate, use, count=500, new=6, lanes=84)
    print(f"{name}, {estimate}, {use}: {differ} of {tokens} tokens differ")
    assert differ == 0
    assert tokens > 2000


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_models(seed: int) -> None:
    """Of random kinds, with random options."""
    rng = random.Random(seed)
    kind = rng.choice([*tiny.CONFIGS])
    path: dict[str, Any] = {"start": rng.choice(["released", "anchored"]), "layers": rng.choice(["lora", "dense"])}
    path |= {"reader": rng.choice(["lm", "path"])} if path["start"] == "anchored" else {}
    model = tiny.model(kind, **path)
    model = model.merged() if rng.random() < 0.5 else model
    name = rng.choice([*SOLVERS])
    options: dict[str, Any] = {"solver": name, "budget": rng.choice(SOLVERS[name][1:]), "max_new_tokens": 20}
    options |= rng.choice([{}, {"velocity_temperature": 1.5}, {"velocity_temperature": 1.5, "anneal": True}])
    options |= rng.choice([{}, {"temperature": 1.0, "top_p": 0.9}]) | {"end": rng.choice(ENDS)}
    asked = [Prompt(i, [rng.randrange(96) for _ in range(rng.randint(1, 9))]) for i in range(5)]
    request = Request(asked, DecodeConfig(**options), seed=seed, stop_ids=STOPS)
    wanted, *found = (answer(model, request, way, lanes=3) for way in ("off", "on", "auto"))
    assert found == [wanted, wanted]
