"""Chooses how the evaluations of answers follow one another: one by one, side by side, or as a stream of tokens.

Rows cost little where a pass waits for memory, and as much as passes where it waits for arithmetic. So the choice
follows from the device, the number of sequences and the budget, and from how many passes the tokens have taken so far.
"""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path

import jax

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement.solver import find_solver
from l2d_jax.decoding.refinement.stages import SIZES, room_for
from l2d_jax.distributed.memory import device_bytes
from l2d_jax.distributed.sharding import axis_size
from l2d_jax.model.l2d import Model

MOST_LOGITS = 2**30  # bytes of the logits of a pass, which bound its rows, if that is no more than
SHARE = 32  # a part of the memory by this number
GAIN = 0.1  # of the time, which another order has to save
PRIOR = 4  # tokens that are believed to have taken the expected passes
EXPECTED = {True: 1.1, False: 1.5}  # passes of a token, by whether its first evaluation is made ahead


class Order(Enum):
    """How evaluations follow one another."""

    SEQUENTIAL = "one by one"
    PARALLEL = "side by side"  # those of a token
    STREAM = "as a stream"  # and those of the next token


@dataclass
class Pace:
    """The order in which some answers are evaluated, and the passes that their tokens have taken."""

    model: Model  # that reads the context
    lanes: int
    tokens: int = 0
    passes: int = 0

    @cached_property
    def _readings(self) -> float:
        return self.model.readings

    @cached_property
    def _memory(self) -> int:  # asked for at each step
        return logits_memory()

    def order(
        self, settings: Collection[DecodeConfig], *, has_label: bool, has_grammar: bool, in_stream: bool | None = None
    ) -> Order:
        """The order for answers with these settings, which share solver, velocity and draws.

        `in_stream` says whether they are in a stream already: a stream can be left, and not entered; None: neither.
        """
        first = max(settings, key=lambda one: one.budget)
        if self.model.path is None or not can_be_parallel(first) or first.parallel == "off":
            return Order.SEQUENTIAL
        can_stream = first.draws == 1 and not has_label and not has_grammar and in_stream is not False
        if first.parallel == "on":
            return Order.STREAM if can_stream else Order.PARALLEL
        copies = first.draws * (1 + has_label)
        times = {order: self.time(order, settings, copies=copies) for order in Order}
        possible = [Order.STREAM if can_stream else Order.PARALLEL] if in_stream is None else [*Order]
        if not can_stream:
            possible = [order for order in possible if order != Order.STREAM]
        best = min(possible, key=times.__getitem__)
        # What has begun goes on until it takes longer.
        limit = times[Order.SEQUENTIAL] * (1 if self.tokens else 1 - GAIN)
        return best if times[best] <= limit else Order.SEQUENTIAL

    def time(self, order: Order, settings: Collection[DecodeConfig], *, copies: int) -> float:
        """The time of a token of all lanes, in readings of the LM's weights, by what is known of its passes."""
        rows, free = -(-self.lanes // (axis_size("data") * axis_size("fsdp"))), free_rows()
        budget = max(one.budget for one in settings)
        if order is Order.SEQUENTIAL:
            return (1 + rows / free) + budget * (1 + rows * copies / free)
        is_ahead = self.model.path is not None and self.model.path.is_anchored and order is Order.STREAM
        passes = (EXPECTED[is_ahead] * PRIOR + self.passes) / (PRIOR + self.tokens)
        width = self.window(settings)
        passes += max(0, -(-budget // width) - 1)  # the window slides
        if order is Order.PARALLEL:
            return (1 + rows / free) + passes * (1 + rows * copies * width / free)
        return passes * (self._readings + rows * (width + 2) / free)

    def window(self, settings: Collection[DecodeConfig]) -> int:
        """The evaluations of a token that go side by side."""
        vocab_size = self.model.llm.architecture.vocab_size
        return window(settings, vocab_size=vocab_size, lanes=self.lanes, memory=self._memory)

    def add(self, *, tokens: int, passes: int, order: Order) -> None:
        """Remember what tokens have taken, in passes over the weights, where those say what guesses are worth."""
        if order is not Order.SEQUENTIAL:
            of_llm = tokens if order is Order.PARALLEL else 0
            self.tokens, self.passes = self.tokens + tokens, self.passes + passes - of_llm


def room(settings: Collection[DecodeConfig]) -> int:
    """The evaluations of a token that a program has room for."""
    return room_for(max(one.budget for one in settings))


def logits_memory() -> int:
    """The bytes that the logits of a pass may take."""
    memory = device_bytes()
    return MOST_LOGITS if memory is None else min(MOST_LOGITS, memory // SHARE)


def window(settings: Collection[DecodeConfig], *, vocab_size: int, lanes: int, memory: int | None = None) -> int:
    """The evaluations of a token that go side by side in these lanes, whose logits take this memory in bytes, at most.

    None: `logits_memory`.
    """
    most = (logits_memory() if memory is None else memory) // (4 * vocab_size * lanes)
    most //= max(one.draws for one in settings)
    return max([size for size in SIZES if size <= min(room(settings), most)], default=1)


def can_be_parallel(settings: DecodeConfig) -> bool:
    """Whether evaluations can go side by side: their estimates are tokens, on a grid that is known beforehand."""
    is_token = not find_solver(settings.solver).is_adaptive and settings.velocity == "sample"
    return is_token and 1 < settings.budget <= SIZES[-1]


def free_rows() -> int:
    """The rows of a pass whose arithmetic takes as long as reading the weights, on the devices in use."""
    table, device = _table(), jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kinds = [kind for kind in table if device.device_kind.startswith(kind)]
    return table[max(kinds, key=len)] if kinds else table["other"]


@cache
def _table() -> dict[str, int]:
    table: dict[str, int] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["rows"]
    return table
