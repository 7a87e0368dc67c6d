"""Lanes of a token search: the beams of several prompts, searched together as the rows of one program.

A lane holds the beams of one prompt. When all of them have ended, the lane goes to the next prompt, as in
`decoding.lanes`. Its prompt is read once, and its beams begin as copies of what was read. This compiles a new program
only if the longest running prompt needs another bucket.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from l2d_jax.decoding.batch.lane_options import LaneOptions, Options
from l2d_jax.decoding.batch.places import Places
from l2d_jax.decoding.batch.prompt_reader import PromptReader
from l2d_jax.decoding.buckets import CHUNK, answer_slots, sample_bucket
from l2d_jax.decoding.parallel.pace import Order, Pace
from l2d_jax.decoding.requests import Answer, Request
from l2d_jax.decoding.sampler import allow
from l2d_jax.decoding.search.beams import Beams, Scoring, SearchConfig, extend, replace_searches, start_beams
from l2d_jax.decoding.state import State, resize
from l2d_jax.distributed import processes
from l2d_jax.model.l2d import Model


class Beam(NamedTuple):
    """One answer of a search."""

    ids: list[int]  # without the stop token
    score: float
    log_likelihood: float  # in nats, including the stop token
    repeats: int  # number of repeated n-grams
    is_ended: bool  # True: ended by a stop token; False: by its length


class EndedSearch(NamedTuple):
    """A search whose beams have all ended, or whose logits were NaN."""

    answer: Answer
    beams: list[Beam]  # best first; empty if logits were NaN
    evaluations: int  # evaluations of the path by all beams
    passes: int  # passes over the weights, counted for each running beam


class SearchLanes(Places):
    """Searches for any number of answers of one request, `lanes` at a time."""

    def __init__(self, model: Model, request: Request, config: SearchConfig, *, lanes: int) -> None:
        """Make empty lanes.

        Args:
          model: a model that reads the context (`Model.reading`), with or without a path.
          request: the request to which all answers belong; its prompts share their settings.
          config: how to search.
          lanes: number of prompts searched at a time.
        """
        self._model, self._config = model, config
        super().__init__(lanes)
        restrictions, stop_ids = request.restrictions, request.stop_ids
        pace = Pace(model, lanes * config.beams)
        mask = allow(model.llm.architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
        allowed = None if mask is None else jnp.asarray(mask)[None]
        self._maker = LaneOptions(pace, shared=request.settings, allowed=allowed)
        # Several samples of a prompt are separate searches, and each reads the prompt for itself.
        self._reader = PromptReader(model, self._maker, known=dataclasses.replace(request, samples=1))
        has_label = request.prompts[0].label is not None
        # Beams change places after every token, so the next token cannot begin before one is chosen: never a stream.
        self._order = pace.order({request.settings}, has_label=has_label, has_grammar=False, in_stream=False)
        self._stop_ids, self._draws = stop_ids, sample_bucket(request.settings.draws)
        self._beams: Beams | None = None
        self._options: Options | None = None  # for the running searches; None: to be made anew

    def admit(self, answers: Sequence[Answer], *, group: int) -> None:
        """Give each answer a free lane, and read its prompt. The first answers must fill all lanes.

        Later ones are read as `group` rows, of which the last may be repeated, so that one program serves them all.
        """
        count = len(self._answers) if self._beams is None else group
        rows = [*answers, *[answers[-1]] * (count - len(answers))]
        state = next(self._reader.read(rows, order=lambda: Order.SEQUENTIAL))
        assert isinstance(state, State)
        capacity, self._options = answer_slots(self._config.max_new_tokens), None
        new = start_beams(state, beams=self._config.beams, capacity=capacity)
        places = []
        for answer in answers:
            places.append(self._answers.index(None))
            self._answers[places[-1]] = answer
        if self._beams is None:
            self._beams = new
            return
        _, slots = self._reader.size([answer for answer in self._answers if answer is not None])
        old, new = (
            dataclasses.replace(one, state=resize(one.state, ring=capacity, slots=slots)) for one in (self._beams, new)
        )
        places += [len(self._answers)] * (count - len(answers))  # beyond the last lane: dropped
        self._beams = replace_searches(old, new, jnp.array(places))

    def step(self) -> list[EndedSearch]:
        """Extend all running beams by a chunk of tokens; returns the searches that have ended, whose lanes are free."""
        assert self._beams is not None
        if self._options is None:
            rows = [answer for answer in self._answers for _ in range(self._config.beams)]
            self._options = self._maker.make(rows, self._order)
        settings, sampling, labels = self._options
        scoring = Scoring.from_config(self._config, self._stop_ids, sampling)
        sizes = {"candidates": self._config.candidates, "draws": self._draws, "steps": CHUNK}
        self._beams = extend(self._model, self._beams, settings=settings, scoring=scoring, labels=labels, **sizes)
        lanes, state = len(self._answers), self._beams.state
        done, broken = (processes.gather_array(column).reshape(lanes, -1) for column in (state.done, state.broken))
        is_broken = broken.any(axis=1)
        is_live = np.array([answer is not None for answer in self._answers])
        is_ended = is_live & (done.all(axis=1) | is_broken)
        return self._read_beams(is_ended, is_broken, scoring) if is_ended.any() else []

    def _read_beams(self, is_ended: np.ndarray, is_broken: np.ndarray, scoring: Scoring) -> list[EndedSearch]:
        """Read the beams of the lanes that have ended, and free these lanes."""
        beams = self._beams
        assert beams is not None
        scores = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
        arrays = (beams.tokens, beams.lengths, scores, beams.log_likelihood, beams.repeats)
        columns = [processes.gather_array(array) for array in arrays]
        costs = [processes.gather_array(array) for array in (beams.evaluations, beams.passes)]
        ended = []
        for lane in np.flatnonzero(is_ended).tolist():
            answer, self._answers[lane] = self._answers[lane], None
            assert answer is not None
            found = [] if is_broken[lane] else best_first([column[lane] for column in columns], self._stop_ids)
            ended.append(EndedSearch(answer, found, *(int(cost[lane]) for cost in costs)))
        return ended


def best_first(columns: Sequence[np.ndarray], stop_ids: Sequence[int]) -> list[Beam]:
    """The beams of one search, best first, without empty slots.

    `columns` are the tokens, lengths, scores, log-likelihoods and repeats of the beams.
    """
    answers = []
    for tokens, length, score, likelihood, repeats in zip(*columns, strict=True):
        if np.isfinite(likelihood):
            ids = tokens[:length].tolist()
            is_ended = ids[-1] in stop_ids
            answers.append(Beam(ids[:-1] if is_ended else ids, float(score), float(likelihood), int(repeats), is_ended))
    return sorted(answers, key=lambda beam: beam.score, reverse=True)
