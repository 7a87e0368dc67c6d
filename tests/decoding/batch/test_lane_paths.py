"""Lanes that several paths share: an answer is what its path gives alone, whichever paths its neighbours have."""

import dataclasses
from typing import Any

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.lane_paths import can_share
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.batch.prompt_reader import Service
from l2d_jax.decoding.generation import generate_tokens, make_answers
from l2d_jax.decoding.parallel.pace import Order
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.model.l2d import Model
from tests.support import tiny

BUDGETS = (3, 1, 7, 3)
SETTINGS = DecodeConfig(max_new_tokens=12, temperature=0.7)
PROMPTS = [Prompt(number, [1 + (7 * number + i) % 90 for i in range(24 - 3 * number)]) for number in range(4)]


def paths(**changes: Any) -> list[Any]:
    return [tiny.path(seed=seed, **changes) for seed in (1, 2, 3)]


def alone(path: Any, prompt: Prompt, settings: DecodeConfig) -> list[int]:
    [answer] = generate_tokens(Model.build(tiny.llm(), path), Request([prompt], settings, seed=5))
    return answer


def mixed(
    trained: list[Any], prompts: list[Prompt], chosen: list[DecodeConfig], *, lanes: int, llm: Any = None
) -> tuple[list[list[int]], set[Order]]:
    """The answers to all prompts, each by another path than its neighbours, and the orders of evaluations."""
    model, answers = Model(llm=llm or tiny.llm(), path=trained[0], table=None), []
    for number, (prompt, settings) in enumerate(zip(prompts, chosen, strict=True)):
        [answer] = make_answers(Request([prompt], settings, seed=5), model.llm.architecture, trained[0].config)
        answer.number, answer.path = number, trained[number % len(trained)]
        answers.append(answer)
    opened, waiting, found, orders = (
        Lanes(model, lanes=lanes, stop_ids=(), service=Service(are_mixed=True)),
        answers,
        {},
        set(),
    )
    while waiting or not opened.is_idle:
        count = opened.free
        opened.admit(waiting[:count])
        waiting = waiting[count:]
        for piece in opened.step():
            assert piece.error is None
            found[piece.answer] = found.get(piece.answer, []) + piece.tokens
        orders.add(opened.order)
    return [found[number] for number in range(len(prompts))], orders


@pytest.mark.parametrize(
    ("start", "parallel"),
    [
        ("released", "off"),
        pytest.param("anchored", "off", marks=pytest.mark.slow),
        pytest.param("released", "on", marks=pytest.mark.slow),
        pytest.param("anchored", "on", marks=pytest.mark.slow),
    ],
)
def test_an_answer_is_that_of_its_path_alone(start: str, parallel: Any) -> None:
    trained = paths(start=start)
    chosen = [dataclasses.replace(SETTINGS, budget=budget, parallel=parallel) for budget in BUDGETS]
    found, orders = mixed(trained, PROMPTS, chosen, lanes=3)
    wanted = [alone(trained[i % 3], prompt, one) for i, (prompt, one) in enumerate(zip(PROMPTS, chosen, strict=True))]
    assert found == wanted
    assert orders == {Order.STREAM if parallel == "on" else Order.SEQUENTIAL}
    assert found[0] != alone(trained[1], PROMPTS[0], chosen[0])  # the paths differ


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["off", "on"])
def test_classes_and_sampled_estimates(parallel: Any) -> None:
    trained = paths(classes=3)
    prompts = [prompt._replace(label=prompt.number % 3) for prompt in PROMPTS]
    changes: dict[str, Any] = {"guidance": 1.5, "velocity_temperature": 0.8, "draws": 2, "parallel": parallel}
    chosen = [dataclasses.replace(SETTINGS, budget=budget, **changes) for budget in (3, 7, 5, 3)]
    found, _ = mixed(trained, prompts, chosen, lanes=3)
    assert found == [alone(trained[i % 3], prompts[i], chosen[i]) for i in range(4)]


def test_what_cannot_share_lanes() -> None:
    config = tiny.path_config()
    assert can_share(config, SETTINGS)
    assert can_share(config, dataclasses.replace(SETTINGS, budget=1, solver="euler"))
    for changes in ({"solver": "bosh3"}, {"velocity": "expectation", "velocity_temperature": 1.0}):
        assert not can_share(config, dataclasses.replace(SETTINGS, budget=31, **changes))
    for changes in ({"layers": "dense"}, {"reader": "path"}):
        assert not can_share(tiny.path_config(**changes), SETTINGS)
