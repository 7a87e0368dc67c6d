"""Chooses the order of evaluations: one by one, in parallel, or as a stream of tokens.

An extra row costs little while a pass is limited by reading memory, and its full share once arithmetic is the limit. So
the choice depends on the device, the number of sequences, the budget, and the passes that tokens have taken so far.
"""

import tomllib
from collections.abc import Collection
from dataclasses import dataclass, field
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

MOST_LOGITS = 2**30  # largest size of a pass's logits, in bytes; it limits the number of rows
SHARE = 32  # the logits also take at most this fraction of the device's memory: 1 / SHARE
GAIN = 0.1  # share of the time that another order must save before it is chosen
PRIOR = 4  # weight of the expected passes below, in tokens
EXPECTED = {True: 1.1, False: 1.5}  # expected passes per token; True: its first evaluation ran in an earlier pass


class Order(Enum):
    """The order of evaluations."""

    SEQUENTIAL = "one by one"
    PARALLEL = "side by side"  # all evaluations of a token in one pass
    STREAM = "as a stream"  # as PARALLEL, and the next token begins in the same pass


@dataclass
class Pace:
    """The order in which some answers are evaluated, and the passes that their tokens have taken."""

    model: Model  # the model that reads the context
    lanes: int
    tokens: int = 0
    passes: int = 0
    is_fixed: bool = False  # whether the order depends on the settings alone, for deterministic answers
    left: set[Order] = field(default_factory=set)  # orders that are not chosen any more

    @cached_property
    def _readings(self) -> float:
        return self.model.readings

    @cached_property
    def _memory(self) -> int:  # cached because every step needs it
        return logits_memory()

    def order(
        self, settings: Collection[DecodeConfig], *, has_label: bool, has_grammar: bool, in_stream: bool | None = None
    ) -> Order:
        """Choose the order for answers with these settings, which must share solver, velocity and draws.

        `in_stream` says whether the running answers are in a stream; a stream can be left but not entered later. None:
        no answer is running.
        """
        in_stream = None if self.is_fixed else in_stream
        first = max(settings, key=lambda one: one.budget)
        if self.model.path is None or not can_be_parallel(first) or first.parallel == "off":
            return Order.SEQUENTIAL
        can_stream = first.draws == 1 and not has_label and not has_grammar and in_stream is not False
        if first.must_be_parallel:
            return Order.STREAM if can_stream else Order.PARALLEL
        copies = first.draws * (1 + has_label)
        times = {order: self.time(order, settings, copies=copies) for order in Order}
        possible = [Order.STREAM if can_stream else Order.PARALLEL] if in_stream is None else [*Order]
        if not can_stream:
            possible = [order for order in possible if order != Order.STREAM]
        best = min({*possible} - self.left or {Order.SEQUENTIAL}, key=times.__getitem__)
        # Once tokens were decoded this way, keep the order until it is slower than one by one.
        limit = times[Order.SEQUENTIAL] * (1 if self.tokens else 1 - GAIN)
        return best if times[best] <= limit else Order.SEQUENTIAL

    def time(self, order: Order, settings: Collection[DecodeConfig], *, copies: int) -> float:
        """Estimate the time for one token of every lane, in units of reading the LM's weights once."""
        rows, free = -(-self.lanes // (axis_size("data") * axis_size("fsdp"))), free_rows()
        budget = max(one.budget for one in settings)
        if order is Order.SEQUENTIAL:
            return (1 + rows / free) + budget * (1 + rows * copies / free)
        is_ahead = self.model.path is not None and self.model.path.is_anchored and order is Order.STREAM
        passes = (EXPECTED[is_ahead] * PRIOR + self.passes) / (PRIOR + self.tokens)
        width = self.window(settings)
        passes += max(0, -(-budget // width) - 1)  # a larger budget takes several windows
        if order is Order.PARALLEL:
            return (1 + rows / free) + passes * (1 + rows * copies * width / free)
        return passes * (self._readings + rows * (width + 2) / free)

    def window(self, settings: Collection[DecodeConfig]) -> int:
        """The number of evaluations of a token that run in one pass."""
        vocab_size = self.model.llm.architecture.vocab_size
        return window(settings, vocab_size=vocab_size, lanes=self.lanes, memory=self._memory)

    def leave(self, order: Order) -> None:
        """Do not choose this order again, unless it is `SEQUENTIAL` or the order depends on the settings alone."""
        self.left |= set() if self.is_fixed or order is Order.SEQUENTIAL else {order}

    def add(self, *, tokens: int, passes: int, order: Order) -> None:
        """Count the passes that tokens took. Sequential tokens are ignored: they say nothing about guesses."""
        if order is not Order.SEQUENTIAL and not self.is_fixed:
            of_llm = tokens if order is Order.PARALLEL else 0
            self.tokens, self.passes = self.tokens + tokens, self.passes + passes - of_llm


def room(settings: Collection[DecodeConfig]) -> int:
    """The number of evaluations per token for which a program is compiled."""
    return room_for(max(one.budget for one in settings))


def logits_memory() -> int:
    """The largest size of the logits of a pass, in bytes."""
    memory = device_bytes()
    return MOST_LOGITS if memory is None else min(MOST_LOGITS, memory // SHARE)


def window(settings: Collection[DecodeConfig], *, vocab_size: int, lanes: int, memory: int | None = None) -> int:
    """The number of evaluations per token that run in one pass, so that their logits fit into `memory` bytes.

    `memory` None: `logits_memory()`.
    """
    most = (logits_memory() if memory is None else memory) // (4 * vocab_size * lanes)
    most //= max(one.draws for one in settings)
    return max([size for size in SIZES if size <= min(room(settings), most)], default=1)


def can_be_parallel(settings: DecodeConfig) -> bool:
    """Whether evaluations can run in parallel: estimates must be tokens, and the grid must be fixed in advance."""
    is_token = not find_solver(settings.solver).is_adaptive and settings.velocity == "sample"
    return is_token and 1 < settings.budget <= SIZES[-1]


def free_rows() -> int:
    """The number of rows whose arithmetic takes as long as reading the weights, on the devices in use."""
    table, device = _table(), jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]
    kinds = [kind for kind in table if device.device_kind.startswith(kind)]
    return table[max(kinds, key=len)] if kinds else table["other"]


@cache
def _table() -> dict[str, int]:
    table: dict[str, int] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())["rows"]
    return table
