"""The order of evaluations follows from device, lanes and budget, and from the passes that tokens have taken."""

from typing import Any

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import generate_tokens, open_lanes
from l2d_jax.decoding.parallel import pace as pace_module
from l2d_jax.decoding.parallel.pace import Order, Pace, free_rows, room, window
from l2d_jax.decoding.parallel.stream_state import Stream
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.errors import InputError
from tests.support import tiny

PROMPTS = [Prompt(number, [1 + (7 * number + i) % 90 for i in range(9 - number)]) for number in range(4)]


def order(pace: Pace, *, has_label: bool = False, has_grammar: bool = False, in_stream: Any = None, **options: Any):
    chosen = [DecodeConfig(**options)]
    return pace.order(chosen, has_label=has_label, has_grammar=has_grammar, in_stream=in_stream)


def test_what_can_be_a_stream_is_one_where_rows_are_free():
    pace = Pace(tiny.model(start="anchored", reader="path"), 1)
    assert order(pace, budget=15) is Order.STREAM
    assert order(pace, budget=15, draws=4) is Order.PARALLEL
    assert order(pace, budget=15, has_label=True) is Order.PARALLEL
    assert order(pace, budget=15, has_grammar=True) is Order.PARALLEL
    assert order(pace, budget=15, in_stream=False) is Order.PARALLEL
    for options in ({"budget": 1}, {"solver": "bosh3"}, {"velocity": "expectation", "velocity_temperature": 1.0}):
        assert order(pace, **options) is Order.SEQUENTIAL
    assert order(pace, budget=301) is Order.SEQUENTIAL  # no room
    assert order(pace, budget=15, parallel="off") is Order.SEQUENTIAL


def test_many_lanes_of_a_slow_device_go_one_by_one():
    pace = Pace(tiny.model(), 64 * free_rows())
    assert order(pace, budget=15) is Order.SEQUENTIAL
    assert order(pace, budget=15, parallel="on") is Order.STREAM


def test_guesses_that_fail_are_given_up_and_not_taken_up_again():
    pace = Pace(tiny.model(start="anchored"), 1)
    assert order(pace, budget=7) is Order.STREAM
    pace.add(tokens=100, passes=105, order=Order.STREAM)
    assert order(pace, budget=7, in_stream=True) is Order.STREAM
    pace.add(tokens=100, passes=1600, order=Order.STREAM)
    assert order(pace, budget=7, in_stream=True) is Order.SEQUENTIAL
    pace.add(tokens=100, passes=800, order=Order.SEQUENTIAL)  # says nothing of guesses
    assert (pace.tokens, pace.passes) == (200, 1705)


def test_the_window_is_bounded_by_the_memory_of_logits(monkeypatch: pytest.MonkeyPatch):
    few = [DecodeConfig(budget=31)]
    monkeypatch.setattr(pace_module, "device_bytes", lambda: 2**40)
    assert room(few) == 31
    assert window(few, vocab_size=1000, lanes=1) == 31
    assert window(few, vocab_size=128_000, lanes=256) == 7  # 2,097 rows of 512 kB in 1 GiB
    assert window(few, vocab_size=128_000, lanes=10_000) == 1
    monkeypatch.setattr(pace_module, "device_bytes", lambda: 2**33)  # 8 GiB
    assert window(few, vocab_size=128_000, lanes=32) == 15


@pytest.mark.slow
@pytest.mark.parametrize("kind", [{"start": "anchored"}, {}])
def test_an_answer_is_the_same_in_every_order(kind: Any):
    """Guesses of random weights fail, so a stream is left within the answers."""
    model = tiny.model(**kind)
    settings = {one: DecodeConfig(budget=7, max_new_tokens=24, parallel=one) for one in ("off", "on", "auto")}
    answers = {one: generate_tokens(model, Request(PROMPTS, chosen)) for one, chosen in settings.items()}
    assert answers["on"] == answers["auto"] == answers["off"]
    lanes, asked = open_lanes(model, Request(PROMPTS[:1], settings["on"]))
    lanes.admit(asked)
    assert isinstance(lanes.state, Stream)


def test_a_stream_is_left_within_an_answer():
    model = tiny.model(start="anchored")
    chosen = DecodeConfig(budget=3, max_new_tokens=20)
    lanes, asked = open_lanes(model, Request(PROMPTS[:1], chosen))
    lanes.admit(asked)
    orders = [lanes.order]
    lanes.pace.passes = 10_000  # as if all guesses had failed
    said: list[int] = []
    while not lanes.is_idle:
        for piece in lanes.step():
            said += piece.tokens
        orders.append(lanes.order)
    assert orders[0] is Order.STREAM
    assert orders[-1] is Order.SEQUENTIAL
    [wanted] = generate_tokens(model, Request(PROMPTS[:1], DecodeConfig(budget=3, max_new_tokens=20, parallel="off")))
    assert said == wanted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"velocity": "expectation", "velocity_temperature": 1.0}, "config.decode.velocity 'expectation' has none"),
        ({"solver": "bosh3", "budget": 20}, "'bosh3' chooses its steps on the way"),
        ({"budget": 255}, "takes up to 127 evaluations of a token, and config.decode.budget is 255"),
    ],
)
def test_what_cannot_go_side_by_side_is_refused_where_it_is_asked_for(options: dict[str, Any], message: str):
    request = Request(PROMPTS, DecodeConfig(parallel="on", **options))
    with pytest.raises(InputError, match=message):
        generate_tokens(tiny.model(), request)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "bosh3", "budget": 20, "parallel": "off"}, "parallel 'off' changes nothing"),
        ({"budget": 1, "parallel": "off"}, "parallel changes nothing at a budget of 1"),
    ],
)
def test_what_changes_nothing_is_refused(options: dict[str, Any], message: str):
    request = Request(PROMPTS, DecodeConfig(**options), asked=options)
    with pytest.raises(InputError, match=message):
        generate_tokens(tiny.model(), request)
