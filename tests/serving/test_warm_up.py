"""The requests that a server answers before it is ready."""

import dataclasses
import json

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.shapes import Shape
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.front import Readiness
from l2d_jax.serving.models import Catalogue
from l2d_jax.serving.warm_up import WarmUp, usual_requests
from tests.support.served import catalogue, served, talking_base, talking_model, talking_path

DEFAULTS = DecodeConfig(budget=3, max_new_tokens=256)


def models(context: int, *, defaults: DecodeConfig = DEFAULTS) -> Catalogue:
    return catalogue(dataclasses.replace(talking_model(), defaults=defaults), context=context)


def shapes(found: Catalogue) -> list[Shape]:
    pytest.importorskip("llguidance")
    protocol, bodies = Protocol(found), usual_requests(found)
    read = [protocol.read(json.dumps(body).encode(), is_chat=False).answers for body in bodies]
    return [Shape.of(answer) for [answer] in read]


def test_usual_requests_have_all_usual_shapes() -> None:
    """Prompts of each length that is read at once, and one that is read in pieces; with each option alone."""
    found = shapes(models(1024))
    assert {shape.slots for shape in found} == {64, 128, 256, 512, 1024}
    assert {(shape.slots, shape.ring) for shape in found} >= {(64, 256), (1024, 256), (64, 1024)}
    options = {(shape.has_grammar, shape.is_scored, shape.room) for shape in found}
    assert options == {(False, False, 3), (False, False, 1), (True, False, 3), (False, True, 3)}


@pytest.mark.parametrize("context", [20, 40, 300, 600])
def test_usual_requests_fit_the_context(context: int) -> None:
    bodies = usual_requests(models(context))
    assert all(len(body["prompt"][0]) + body["max_tokens"] <= context for body in bodies)
    assert len(bodies) == {20: 0, 40: 4, 300: 8, 600: 13}[context]


def test_prompts_have_common_beginnings_only_for_a_cache_of_prefixes() -> None:
    plain, further = (usual_requests(models(1024), has_prefixes=known) for known in (False, True))
    firsts = [body["prompt"][0][0] for body in plain]
    assert len({*firsts}) == len(firsts)
    assert further[: len(plain)] == plain
    assert {len(body["prompt"][0]) for body in further[len(plain) :]} == {96, 192, 384, 513}


def test_there_is_a_request_for_the_budget_of_each_effort() -> None:
    found = catalogue(talking_model(), context=1024, efforts={"none": 1, "low": 3, "high": 15})
    assert {body.get("budget", 3) for body in usual_requests(found)} == {1, 3, 15}


def test_a_model_without_a_path_has_fewer() -> None:
    bodies = usual_requests(models(2048, defaults=DecodeConfig(budget=1)))
    assert not any("budget" in body for body in bodies)


def test_a_server_that_ends_is_never_ready() -> None:
    found, readiness, engine = models(100), Readiness(), Engine(lanes=1, queue=1)
    engine.close()
    WarmUp(engine, Protocol(found), readiness=readiness).run(usual_requests(found))
    assert readiness.describe() == (503, {"status": "starting", "doing": "compiling", "done": 0, "of": 7})


def test_the_first_of_paths_that_share_lanes_stands_for_all() -> None:
    base = talking_base()
    found = catalogue(base)
    for number, changes in enumerate([{}, {}, {"reader": "path"}]):
        found.add(served(talking_path(base, number, **changes), name=f"path-{number}"))
    assert {body["model"] for body in usual_requests(found)} == {"tiny", "path-0", "path-2"}
