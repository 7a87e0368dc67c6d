"""The stream emits what the plain decoder does: mixed budgets, gates, sampling, and any guesses."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.parallel.begin import enter, read_and_enter
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.parallel.stream_state import Stream, fit, leave_stream, make_room
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.refinement.stages import Stages
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.marks import slow

ROWS, NEW = 6, 16
MODELS: dict[str, dict[str, Any]] = {
    "released": {},
    "anchored": {"start": "anchored"},
    "reads": {"start": "anchored", "reader": "path"},
    "copies": {"layers": "dense", "start": "anchored"},
}
BUDGETS = [1, 3, 15, 9, 31, 5]
WINDOW = 7  # evaluations of a pass: more than some of the budgets, and fewer than others
NO_STOPS = jnp.array([-1, -1], jnp.int32)


def options(budgets: list[int], gates: list[float], *, window: int = WINDOW, **changes: Any) -> dict[str, Any]:
    """The options of either decoder, a row for each sequence."""
    configs = [DecodeConfig(budget=b, gate=g, **changes) for b, g in zip(budgets, gates, strict=True)]

    def stack(parts: list[Any]) -> Any:
        return jax.tree.map(lambda *leaves: jnp.concatenate([jnp.atleast_1d(leaf) for leaf in leaves]), *parts)

    settings = dataclasses.replace(stack([Refinement.from_config(one) for one in configs]), window=window)
    return {"settings": settings, "sampling": stack([SamplingOptions.from_config(one) for one in configs])}


def prompts() -> tuple[jax.Array, jax.Array]:
    return tiny.tokens(ROWS, 8, seed=3), jnp.array([8, 3, 5, 1, 8, 2], jnp.int32)


def decode_plainly(model: Model, chosen: dict[str, Any], *, stops: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Tokens, and evaluations."""
    tokens, lengths = prompts()
    state = prefill(model.llm, tokens, lengths, jax.random.split(jax.random.key(7), ROWS), capacity=NEW)
    _, new = token_decoder()(model, state, stop_ids=stops, steps=NEW, noise_samples=1, **chosen)
    return np.asarray(new.ids), np.asarray(new.evaluations)


def collect(rows: list[list[int]], emitted: Any, name: str = "ids") -> None:
    for row, is_new, values in zip(rows, emitted.is_new, getattr(emitted.tokens, name), strict=True):
        row += np.asarray(values)[np.asarray(is_new)].tolist()


def read_and_grow(model: Model, *, settings: Refinement, sampling: SamplingOptions) -> Stream:
    """A stream that begins with little room, for evaluations and for tokens, and then gets what it needs."""
    tokens, lengths = prompts()
    keys, begun = jax.random.split(jax.random.key(7), ROWS), {"settings": settings, "sampling": sampling}
    stream = read_and_enter(model, tokens, lengths, keys, capacity=NEW // 2, size=3, **begun)
    assert settings.stages is not None
    grown = fit(make_room(stream, settings.stages.size), ring=NEW, slots=tokens.shape[1])
    assert isinstance(grown, Stream)
    return grown


def decode_in_stream(
    model: Model, chosen: dict[str, Any], *, stops: jax.Array, leaves: int | None = None, is_read_before: bool = False
) -> tuple[list[list[int]], list[list[int]], list[list[int]]]:
    """Tokens, evaluations and passes of each sequence; after `leaves` passes the plain decoder goes on."""
    tokens, lengths = prompts()
    stages = Stages.of(chosen["settings"].solver, [Grid(budget) for budget in BUDGETS])
    assert stages is not None
    settings = dataclasses.replace(chosen["settings"], stages=stages)
    begun = {"settings": settings, "sampling": chosen["sampling"]}
    if is_read_before:
        read = (tokens, lengths, jax.random.split(jax.random.key(7), ROWS))
        stream = enter(model, prefill(model.llm, *read, capacity=NEW), size=stages.size, **begun)
    else:
        stream = read_and_grow(model, **begun)
    columns: dict[str, list[list[int]]] = {name: [[] for _ in range(ROWS)] for name in ("ids", "evaluations", "passes")}
    for count in range(100):
        if leaves is not None and count * 5 >= leaves:
            state = leave_stream(model.llm, stream)
            _, new = token_decoder()(model, state, stop_ids=stops, steps=NEW, noise_samples=1, **chosen)
            for row, ids in zip(columns["ids"], np.asarray(new.ids).tolist(), strict=True):
                row += ids
            break
        stream, emitted = stream_decoder()(
            model, stream, settings=settings, sampling=chosen["sampling"], stop_ids=stops, passes=5
        )
        for name, rows in columns.items():
            collect(rows, emitted, name)
        if all(len(row) >= NEW or done for row, done in zip(columns["ids"], stream.state.done, strict=True)):
            break
    return columns["ids"], columns["evaluations"], columns["passes"]


@pytest.mark.parametrize(
    ("window", "is_read_before"),
    [(WINDOW, True), pytest.param(1, True, marks=pytest.mark.slow), pytest.param(16, False, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", ["anchored", *slow("released", "reads", "copies")])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_the_plain_answer(kind: str, is_sampled: bool, window: int, is_read_before: bool) -> None:
    model = tiny.model(**MODELS[kind])
    model = model.reading(refines=True)
    gates = [0.0, 0.0, 0.0, 4.2, 0.0, 4.0]
    if kind in ("reads",):
        gates = [0.0] * ROWS
    sampled = {"temperature": 1.0, "velocity_temperature": 1.0, "top_k": 20}
    changes: dict[str, Any] = sampled if is_sampled else {}
    chosen = options(BUDGETS, gates, **changes)
    wanted, evaluations = decode_plainly(model, chosen, stops=NO_STOPS)
    chosen["settings"] = dataclasses.replace(chosen["settings"], window=window)
    ids, taken, passes = decode_in_stream(model, chosen, stops=NO_STOPS, is_read_before=is_read_before)
    for row in range(ROWS):
        assert ids[row][:NEW] == wanted[row].tolist(), row
        assert taken[row][:NEW] == evaluations[row].tolist()
        assert all(1 <= p <= max(BUDGETS[row], 1) + 2 for p in passes[row][:NEW])


@pytest.mark.parametrize("kind", ["anchored", *slow("reads")])
def test_answers_end_and_the_others_go_on(kind: str) -> None:
    model = tiny.model(**MODELS[kind]).reading(refines=True)
    chosen = options(BUDGETS, [0.0] * ROWS)
    free, _ = decode_plainly(model, chosen, stops=NO_STOPS)
    stops = jnp.array([free[0, 3], free[4, 7]], jnp.int32)
    wanted, _ = decode_plainly(model, chosen, stops=stops)
    ids, _, _ = decode_in_stream(model, chosen, stops=stops)
    for row, plain in zip(ids, wanted.tolist(), strict=True):
        ended = next((i + 1 for i, token in enumerate(plain) if token in stops.tolist()), NEW)
        assert row[:NEW] == plain[:ended] if ended < NEW else row[:NEW] == plain


@pytest.mark.parametrize("leaves", [0, 5, 10])
def test_the_plain_decoder_goes_on_from_any_pass(leaves: int) -> None:
    model = tiny.model(start="anchored").reading(refines=True)
    chosen = options(BUDGETS, [0.0] * ROWS, velocity_temperature=1.0)
    wanted, _ = decode_plainly(model, chosen, stops=NO_STOPS)
    ids, _, _ = decode_in_stream(model, chosen, stops=NO_STOPS, leaves=leaves)
    for row in range(ROWS):
        assert ids[row][:NEW] == wanted[row].tolist()


def still(linear: Any) -> Any:
    """An affine map to zero."""
    return dataclasses.replace(linear, weight=0 * linear.weight, bias=0 * linear.bias)


@pytest.mark.parametrize("kind", ["anchored", *slow("reads")])
def test_where_guesses_hold_a_pass_gives_a_token(kind: str) -> None:
    """A path that sees neither x nor t finds the same token in each evaluation."""
    model = tiny.model(**MODELS[kind])
    path = model.path
    assert path is not None
    parts = {name: getattr(path, name) for name in ("translation", "time", "merge")}
    parts = {name: dataclasses.replace(part, last=still(part.last)) for name, part in parts.items()}
    model = Model.build(model.llm, dataclasses.replace(path, **parts)).reading(refines=True)
    chosen = options([WINDOW] * ROWS, [0.0] * ROWS)
    grids = [Grid(max(BUDGETS)), *[Grid(WINDOW)] * ROWS]
    stages = Stages.of(chosen["settings"].solver, grids)  # with the room of the other tests
    assert stages is not None
    stages = jax.tree.map(lambda rows: rows[1:], stages)
    settings = dataclasses.replace(chosen["settings"], stages=stages)
    begun = {"settings": settings, "sampling": chosen["sampling"]}
    stream = read_and_grow(model, **begun)
    for _ in range(2):
        stream, emitted = stream_decoder()(model, stream, **begun, stop_ids=NO_STOPS, passes=5)
        assert emitted.is_new.all()
