"""Measures decoding of a trained path on its held-out problems: evaluations one by one, and in parallel.

The number of passes per token depends on what the path has learned, so random weights would not show it.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from l2d_jax.decoding.generation import open_lanes
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.parallel.pace import can_be_parallel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.performance.timing import turns


class _Run(NamedTuple):
    """What a run has decoded."""

    answers: list[list[int]]
    passes: int
    evaluations: int
    order: str  # order of evaluations at the end
    tokens: int  # including stop tokens


def measure_answers(
    loaded: LoadedModel, prompts: Sequence[Prompt], *, batches: Sequence[int], budgets: Sequence[int], new: int
) -> list[dict[str, Any]]:
    """Measure each batch size, budget and order of evaluations, in turns; one row for each.

    For each batch size, the first prompts are answered together until all answers have ended, with at most `new`
    tokens. Reading prompts and compiling are not counted. `differ` is the number of tokens that differ from those of
    one-by-one evaluation.
    """
    rows = []
    for batch in batches:
        kinds = [(budget, way) for budget in budgets for way in _ways(loaded, budget)]
        works = [_Work(loaded, prompts[:batch], budget=budget, parallel=way, new=new) for budget, way in kinds]
        for work in works:
            work()  # compiles
        times = turns(*works)
        plain = {budget: work.last for (budget, way), work in zip(kinds, works, strict=True) if way == "off"}
        for (budget, _), work, seconds in zip(kinds, works, times, strict=True):
            run = work.last
            pairs = zip(run.answers, plain[budget].answers, strict=True)
            per_token = seconds / run.tokens * batch
            row = {"batch": batch, "budget": budget, "order": run.order, "tokens": run.tokens}
            row |= {"seconds per token": per_token, "tokens per second": batch / per_token}
            row |= {"passes per token": run.passes / run.tokens, "evaluations per token": run.evaluations / run.tokens}
            rows.append(row | {"differ": sum(_differ(*pair) for pair in pairs)})
    return rows


def _ways(loaded: LoadedModel, budget: int) -> list[str]:
    can = loaded.model.path is not None and can_be_parallel(replace(loaded.defaults, budget=budget))
    return ["off", "on"] if can and loaded.defaults.parallel != "off" else ["off"]


def _differ(found: Sequence[int], wanted: Sequence[int]) -> int:
    """The number of places in which two answers differ; places that only one of them has count too."""
    return sum(a != b for a, b in zip(found, wanted, strict=False)) + abs(len(found) - len(wanted))


class _Work:
    """Answers prompts; a call returns the seconds of decoding."""

    last: _Run

    def __init__(self, loaded: LoadedModel, prompts: Sequence[Prompt], *, budget: int, parallel: str, new: int) -> None:
        chosen: Any = {"budget": budget, "parallel": parallel, "max_new_tokens": new}
        self._model = loaded.decoder
        self._request = Request(prompts, replace(loaded.defaults, **chosen), stop_ids=loaded.stop_ids)

    def __call__(self) -> float:
        lanes, asked = open_lanes(self._model, self._request)
        lanes.admit(asked)
        jax.block_until_ready(lanes.state)
        answers: list[list[int]] = [[] for _ in asked]
        tokens = passes = evaluations = 0
        began = time.perf_counter()
        while not lanes.is_idle:
            for piece in lanes.step():
                answers[piece.answer] += piece.tokens
                tokens, passes = tokens + piece.decoded, passes + piece.passes
                evaluations += piece.evaluations
        taken = time.perf_counter() - began
        self.last = _Run(answers, passes, evaluations, lanes.order.value, tokens)
        return taken
