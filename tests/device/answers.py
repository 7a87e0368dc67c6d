"""Decodes with a small model on the device, in every way that must give the same tokens.

Evaluations of a token run one by one, side by side, and as a stream of tokens. Answers are decoded alone, and in lanes
that are filled again in the middle of the others' answers. In float32 with products in full, no token may differ. As
products are by default, a GPU rounds factors to TF32 in some kernels and not in others: differences are only counted.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.generation import decode_lanes, generate_tokens
from l2d_jax.decoding.parallel.begin import read_and_enter
from l2d_jax.decoding.parallel.pace import Order
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.model.l2d import Model
from tests.device.numerics import BASE, on, small_model
from tests.device.options import Options
from tests.device.table import FAILED, MEASURED, OK, Rows
from tests.support.answers import differing_tokens

BATCH, PROMPT, NEW, BUDGET = 4, 12, 24, 15
LANES, QUESTIONS = 3, 7
STOPS = tuple(range(0, BASE["vocab_size"], 12))  # a twelfth of the vocabulary: answers of many lengths
PRECISIONS = {"float32": "highest", "TF32 allowed": None}


def in_order(model: Model, order: Order) -> list[list[int]]:
    """Greedy answers with the evaluations of each token in an order."""
    chosen = DecodeConfig(budget=BUDGET)
    settings = Refinement.prepare(model, chosen)
    model = model.reading(refines=True)
    if order is not Order.SEQUENTIAL:
        settings = settings.side_by_side([Grid(BUDGET)])
    rng = np.random.default_rng(2)
    tokens = jnp.asarray(rng.integers(BASE["vocab_size"], size=(BATCH, PROMPT)), jnp.int32)
    read = (tokens, jnp.full(BATCH, PROMPT, jnp.int32), jax.random.split(jax.random.key(7), BATCH))
    options: dict[str, Any] = {"settings": settings, "sampling": SamplingOptions.from_config(chosen)}
    stops = jnp.array([-1], jnp.int32)
    if order is not Order.STREAM:
        state = prefill(model.llm, *read, capacity=NEW)
        made = token_decoder()(model, state, stop_ids=stops, steps=NEW, noise_samples=1, **options)[1]
        return np.asarray(made.ids).tolist()
    assert settings.stages is not None
    stream = read_and_enter(model, *read, capacity=2 * NEW, size=settings.stages.size, **options)
    answers: list[list[int]] = [[] for _ in range(BATCH)]
    while min(map(len, answers)) < NEW:
        stream, emitted = stream_decoder()(model, stream, stop_ids=stops, passes=NEW, **options)
        for answer, is_new, ids in zip(answers, emitted.is_new, emitted.tokens.ids, strict=True):
            answer += np.asarray(ids)[np.asarray(is_new)].tolist()
    return [answer[:NEW] for answer in answers]


def requests() -> Request:
    """Prompts whose sampled answers end at many places."""
    rng = np.random.default_rng(3)
    prompts = [rng.integers(BASE["vocab_size"], size=12 - number).tolist() for number in range(QUESTIONS)]
    settings = DecodeConfig(budget=3, max_new_tokens=NEW, temperature=1.0)
    return Request(number_prompts(prompts), settings, seed=3, stop_ids=STOPS)


def in_lanes(model: Model, request: Request) -> list[list[int]]:
    """Answers of which at most `LANES` are under way at a time."""
    answers: list[list[int]] = [[] for _ in request.prompts]
    for pieces in decode_lanes(model, request, lanes=LANES):
        for piece in pieces:
            answers[piece.answer] += piece.tokens
    return answers


def alone(model: Model, request: Request) -> list[list[int]]:
    """The answer to each prompt when nothing else is asked."""
    return [generate_tokens(model, replace(request, prompts=[prompt]))[0] for prompt in request.prompts]


def run(rows: Rows, options: Options) -> None:
    """Compare the ways, once with products in full and once by default."""
    device = jax.devices()[-1 if options.rehearse else 0]
    for name, precision in PRECISIONS.items():
        with rows.guard(name), on(device, precision):
            compare(rows, name, is_judged=precision is not None)


def compare(rows: Rows, name: str, *, is_judged: bool) -> None:
    """A row for each way: how many tokens differ from those of the plain way."""
    for start in ("released", "anchored") if is_judged else ("anchored",):
        model = small_model("float32", start=start)
        plain = in_order(model, Order.SEQUENTIAL)
        for order in (Order.PARALLEL, Order.STREAM):
            what = f"{name}: {start} path, budget {BUDGET}, {order.value}"
            count(rows, what, in_order(model, order), plain, "one by one", is_judged=is_judged)
    if not is_judged:
        return
    model, request = small_model("float32"), requests()
    what = f"{name}: {QUESTIONS} sampled answers in {LANES} lanes"
    count(rows, what, in_lanes(model, request), alone(model, request), "each alone", is_judged=is_judged)


def count(
    rows: Rows, what: str, found: list[list[int]], wanted: list[list[int]], beside: str, *, is_judged: bool
) -> None:
    """A row with the number of tokens that differ."""
    differ, total = differing_tokens(found, wanted), sum(map(len, wanted))
    status = MEASURED if not is_judged else FAILED if differ else OK
    rows.add(what, f"{differ} of {total} tokens differ", beside, status=status, differ=differ, tokens=total)
