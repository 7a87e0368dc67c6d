"""The requests that a server answers before it is ready."""

import json
from typing import Any

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.shapes import Shape
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.front import Readiness
from l2d_jax.serving.warm_up import WarmUp, usual_requests
from tests.support.served import talking_model

DEFAULTS = DecodeConfig(budget=3, max_new_tokens=256)


def shapes(bodies: list[dict[str, Any]]) -> list[Shape]:
    pytest.importorskip("llguidance")
    protocol = Protocol(talking_model(), name="tiny", limits=RequestLimits(context=1024))
    read = [protocol.read(json.dumps(body).encode(), is_chat=False).answers for body in bodies]
    return [Shape.of(answer) for [answer] in read]


def test_usual_requests_have_all_usual_shapes() -> None:
    """Prompts of each length that is read at once, and one that is read in pieces; with each option alone."""
    found = shapes(usual_requests(DEFAULTS, model="tiny", context=1024))
    assert {shape.slots for shape in found} == {64, 128, 256, 512, 1024}
    assert {(shape.slots, shape.ring) for shape in found} >= {(64, 256), (1024, 256), (64, 1024)}
    options = {(shape.has_grammar, shape.is_scored, shape.room) for shape in found}
    assert options == {(False, False, 3), (False, False, 1), (True, False, 3), (False, True, 3)}


@pytest.mark.parametrize("context", [20, 40, 300, 600])
def test_usual_requests_fit_the_context(context: int) -> None:
    bodies = usual_requests(DEFAULTS, model="tiny", context=context)
    assert all(len(body["prompt"][0]) + body["max_tokens"] <= context for body in bodies)
    assert len(bodies) == {20: 0, 40: 4, 300: 6, 600: 10}[context]


def test_a_model_without_a_path_has_fewer() -> None:
    bodies = usual_requests(DecodeConfig(budget=1), model="tiny", context=2048)
    assert not any("budget" in body for body in bodies)


def test_a_server_that_ends_is_never_ready() -> None:
    model, readiness = talking_model(), Readiness()
    engine, protocol = Engine(model, lanes=1, queue=1), Protocol(model, name="tiny", limits=RequestLimits())
    engine.close()
    WarmUp(engine, protocol, readiness=readiness).run(usual_requests(DEFAULTS, model="tiny", context=100))
    assert readiness.describe() == (503, {"status": "starting", "doing": "compiling", "done": 0, "of": 6})
