"""The options of a decoding program for the answers in its lanes: how to integrate, how to sample, allowed tokens."""

from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.lane_paths import LanePaths
from l2d_jax.decoding.parallel.pace import Order, Pace
from l2d_jax.decoding.refinement.condition_table import ConditionTable
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.requests import UNRESTRICTED, Answer
from l2d_jax.decoding.sampler import Penalized, Penalties, SamplingOptions
from l2d_jax.errors import contained


class Options(NamedTuple):
    """The options of a program for the running answers."""

    settings: Refinement
    sampling: SamplingOptions
    labels: jax.Array | None


def program_key(answer: Answer) -> Hashable:
    """What selects the program and the tables of an answer, besides the properties that all answers of lanes share."""
    settings, has_grammar = answer.settings, answer.grammar is not None
    return settings.budget, settings.end, answer.is_scored, has_grammar, answer.restrictions.has_penalties


class LaneOptions:
    """Makes the options for lanes. A lane without an answer (None) costs no evaluation."""

    def __init__(
        self,
        pace: Pace,
        *,
        shared: DecodeConfig | None,
        allowed: jax.Array | None,
        paths: LanePaths | None = None,
        is_masked: bool = False,
    ) -> None:
        """Make options for lanes.

        Args:
          pace: chooses the order of evaluations.
          shared: the settings of all answers, or None if each has its own.
          allowed: a mask of tokens.
          paths: the paths of the lanes, if several share them.
          is_masked: whether there is a mask without a grammar, too: then both need the same programs.
        """
        self._pace, self._shared, self._allowed, self._paths = pace, shared, allowed, paths
        self._is_masked = is_masked
        self._table: tuple[set[Grid], ConditionTable | None] | None = None  # for these grids

    def make(self, answers: Sequence[Answer | None], order: Order, *, tabulates: bool = True) -> Options:
        """The options for these answers: how to integrate, how to sample, and their labels.

        A table of conditions (`tabulates`) is worth its computation where a program makes many evaluations.
        """
        live = [answer for answer in answers if answer is not None]
        labels = None
        if live[0].prompt.label is not None:
            labels = jnp.array([0 if answer is None else answer.prompt.label for answer in answers], jnp.int32)
        first = self._shared or live[0].settings
        rows = [replace(first, budget=1) if answer is None else answer.settings for answer in answers]
        grids = [Grid(row.budget, row.end) for row in ([first] if self._shared else rows)]
        table = self._tabulate(first.solver, grids) if tabulates else None
        if self._shared:
            refinement, sampling = Refinement.from_config(first), SamplingOptions.from_config(first)
        else:
            refinement = _stack([Refinement.from_config(row) for row in rows])
            sampling = _stack([SamplingOptions.from_config(row) for row in rows])
        refinement, sampling = replace(refinement, table=table), replace(sampling, allowed=self._allowed)
        if order is not Order.SEQUENTIAL:
            refinement = refinement.side_by_side(grids, window=self._pace.window(rows))
        options = Options(refinement, replace(sampling, is_scored=any(answer.is_scored for answer in live)), labels)
        is_masked = self._is_masked and order is not Order.STREAM  # which has no grammars
        return self._masked(options, self._all_rows(answers)) if is_masked else options

    def _tabulate(self, solver: str, grids: Sequence[Grid]) -> ConditionTable | None:
        """The table of conditions for these grids, which is kept until others are asked for."""
        if self._paths is not None:
            return self._paths.table
        if self._table is None or self._table[0] != {*grids}:
            self._table = {*grids}, Refinement.tabulate(self._pace.model, solver, grids)
        return self._table[1]

    def restrict(self, options: Options, answers: Sequence[Answer | None]) -> Options:
        """Restrict the options to the tokens that each answer's grammar allows next, also for estimates."""
        rows = self._all_rows(answers)
        for row, answer in zip(rows, answers, strict=True):
            if answer is not None and answer.grammar is not None:
                try:
                    row[:] = answer.grammar.mask()
                except BaseException as error:
                    contained(error)
                    answer.is_stuck = True
        return self._masked(options, rows)

    def _all_rows(self, answers: Sequence[Answer | None]) -> np.ndarray:
        """Masks that allow every token, one for each answer: bool [B, V]."""
        return np.ones((len(answers), self._pace.model.llm.architecture.vocab_size), bool)

    def _masked(self, options: Options, rows: np.ndarray) -> Options:
        """The options with these masks of tokens."""
        masks = jnp.asarray(rows)
        sampled = masks if self._allowed is None else masks & self._allowed
        settings, sampling = replace(options.settings, allowed=masks), replace(options.sampling, allowed=sampled)
        return options._replace(settings=settings, sampling=sampling)

    def penalize(self, options: Options, answers: Sequence[Answer | None], *, length: int) -> Options:
        """Add each answer's penalties and its tokens so far, of which there are at most `length`."""
        rows = list[Penalized]()
        for answer in answers:
            of = UNRESTRICTED if answer is None else answer.restrictions
            said = answer.said if answer is not None and of.has_penalties else ()
            rows.append(Penalized(of.frequency_penalty, of.presence_penalty, of.logit_bias, said))
        penalties = Penalties.stack(rows, length=length)
        return options._replace(sampling=replace(options.sampling, penalties=penalties))


def _stack(parts: Sequence[Any]) -> Any:
    """Join trees into one tree whose leaves have a row for each part."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate([np.atleast_1d(a) for a in leaves])), *parts)
