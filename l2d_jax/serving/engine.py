"""Decodes the requests of clients: a queue, and lanes for each kind of answers that can share a program.

Only the thread that calls `Engine.run` touches the model. Other threads submit work, and get its pieces by callbacks.
Kinds take turns according to the passes over the weights that they have cost, so a kind with expensive tokens does not
delay the others.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from l2d_jax.decoding.buckets import is_long, sample_bucket
from l2d_jax.decoding.lane_options import program_key
from l2d_jax.decoding.lanes import Lanes
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.prefix_cache import PrefixCache
from l2d_jax.decoding.requests import Answer, Piece, Request
from l2d_jax.decoding.trace import TokenTrace, trace
from l2d_jax.errors import contained, require

SHORT_KINDS, LONG_KINDS = 2, 1  # number of kinds decoded at a time, with cheap and with expensive tokens
KINDS = SHORT_KINDS + LONG_KINDS
PATIENCE = 5  # seconds after which a client may retry if the engine is ending


class FullError(Exception):
    """The queue is full; it will have space again in about `seconds`."""

    def __init__(self, seconds: int, *, problem: str = "the queue is full") -> None:
        super().__init__(f"{problem}: ask again in {seconds} s")
        self.seconds = seconds


class EndingError(FullError):
    """The engine takes no more work."""

    def __init__(self) -> None:
        super().__init__(PATIENCE, problem="this server is ending")


class Kind(NamedTuple):
    """The properties that answers must share to be decoded together."""

    solver: str
    velocity: str
    parallel: str
    samples: int  # bucket of the number of noise samples
    has_label: bool
    refines: bool  # whether the path itself reads the context
    is_long: bool  # whether a token takes many evaluations
    program: Hashable = None  # what else selects a program, if answers are deterministic


@dataclass(eq=False)
class Work:
    """A requested answer, and the callback that gets its pieces."""

    answer: Answer
    tell: Callable[[Piece | list[TokenTrace] | Exception], None]  # the trace comes before the last piece
    is_traced: bool = False
    is_cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0  # time at which it got its lane


@dataclass(eq=False)
class PieceWork:
    """Other work with the model. Its pieces take turns with the kinds of answers."""

    pieces: Iterator[int]  # does a piece per step; yields its approximate cost, in passes over the weights
    tell: Callable[[Exception | None], None]  # called at its end
    is_cancelled: bool = False


@dataclass(eq=False)
class _Group:
    """The lanes of one kind, the works in them, and the passes that the kind has cost so far."""

    lanes: Lanes
    spent: int
    works: dict[int, Work] = field(default_factory=dict)  # keys: numbers of answers


class Engine:
    """Answers requests in the order in which they arrive, `lanes` of each kind at a time; at most `queue` wait."""

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        lanes: int,
        queue: int,
        prefixes: PrefixCache | None = None,
        context: int | None = None,
    ) -> None:
        """`prefixes` is the cache that all kinds share; `context` makes answers deterministic, as in `Lanes`."""
        self._context = context
        self._loaded, self._size, self._limit, self.prefixes = loaded, lanes, queue, prefixes
        self._waiting: list[Work] = []
        self._pieces: deque[PieceWork] = deque()
        self._spent = 0  # passes that other work has cost
        self._groups: dict[Kind, _Group] = {}
        self._changed = threading.Condition()
        self._is_closing = False
        self._seconds = 1.0  # recent mean time of an answer

    def submit(self, works: Sequence[Work], pieces: Sequence[PieceWork] = ()) -> None:
        """Submit answers and other work; raises `FullError`, and `InputError` for more than the queue can ever hold."""
        count = max(len(works), len(pieces))
        problem = f"a request asks for at most {self._limit} answers here, got {count}: ask several times"
        require(count <= self._limit, problem)
        with self._changed:
            if self._is_closing:
                raise EndingError
            waiting = [*(work for work in self._waiting if not work.is_cancelled), *works]
            others = [*(work for work in self._pieces if not work.is_cancelled), *pieces]
            longest = max(len(waiting), len(others))
            if longest > self._limit:
                raise FullError(math.ceil(self._seconds * longest / self._size))
            if not self._pieces:
                self._spent = min((group.spent for group in [*self._groups.values()]), default=0)
            self._waiting, self._pieces = waiting, deque(others)
            self._changed.notify()

    def cancel(self, works: Sequence[Work | PieceWork]) -> None:
        """Cancel works for which nobody waits any more; answers leave their lanes at the next chunk."""
        for work in works:
            work.is_cancelled = True

    def close(self) -> None:
        """Let `run` return after all submitted work is done."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """The numbers of running and of waiting answers."""
        return sum(len(group.works) for group in [*self._groups.values()]), len(self._waiting)

    def run(self) -> None:
        """Decode until `close`. An error of an answer goes to its client, an error of a program to its whole kind."""
        try:
            while self._wait():
                with self._changed:
                    admitted = self._choose()
                for kind, works in admitted.items():
                    self._admit(kind, works)
                turn = min(self._groups, key=lambda kind: self._groups[kind].spent, default=None)
                if turn is None or (self._pieces and self._spent <= self._groups[turn].spent):
                    self._advance()
                else:
                    self._step(turn)
        finally:  # whatever ends this thread, no client waits forever
            self.close()
            for work in (*self._waiting, *(work for group in self._groups.values() for work in group.works.values())):
                _tell(work, EndingError())
            for other in self._pieces:
                other.tell(EndingError())
            self._waiting, self._groups, self._pieces = [], {}, deque()

    def _wait(self) -> bool:
        """Wait for work; returns whether there is any."""
        with self._changed:
            while not (self._waiting or self._groups or self._pieces or self._is_closing):
                self._changed.wait()
            return bool(self._waiting or self._groups or self._pieces)

    def kind(self, answer: Answer) -> Kind:
        """The kind of an answer."""
        settings, path = answer.settings, self._loaded.model.path
        refines = path is not None and path.config.reader != "lm" and settings.budget > 1
        samples, is_slow = sample_bucket(settings.draws), is_long(settings.budget, settings.draws)
        shared = (settings.solver, settings.velocity, settings.parallel, samples)
        program = None if self._context is None else program_key(answer)
        return Kind(*shared, answer.prompt.label is not None, refines, is_slow, program)

    def _choose(self) -> dict[Kind, list[Work]]:
        """Take the works from the queue for which there is a free lane.

        If a kind has no lanes and no further kind can be opened, all later works of long (or short) kinds wait as well.
        """
        self._waiting = [work for work in self._waiting if not work.is_cancelled]
        chosen: dict[Kind, list[Work]] = {}
        held: set[bool] = set()
        for work in list(self._waiting):
            kind = self.kind(work.answer)
            known = {*self._groups, *chosen}
            most = LONG_KINDS if kind.is_long else SHORT_KINDS
            if kind not in known and sum(other.is_long == kind.is_long for other in known) == most:
                held.add(kind.is_long)
            free = self._groups[kind].lanes.free if kind in self._groups else self._size
            if kind.is_long not in held and len(chosen.get(kind, [])) < free:
                chosen.setdefault(kind, []).append(work)
                self._waiting.remove(work)
        return chosen

    def _admit(self, kind: Kind, works: Sequence[Work]) -> None:
        """Give each work a lane."""
        try:
            if kind not in self._groups:
                model = self._loaded.decoder.reading(refines=kind.refines)
                cached: dict[str, Any] = {"prefixes": self.prefixes, "reader": kind.refines, "context": self._context}
                lanes = Lanes(model, lanes=self._size, stop_ids=self._loaded.stop_ids, **cached)
                spent = min((group.spent for group in self._groups.values()), default=0)
                self._groups[kind] = _Group(lanes, spent)
            group = self._groups[kind]
            for work in works:
                group.works[work.answer.number], work.began = work, time.monotonic()
            group.lanes.admit([work.answer for work in works])
        except BaseException as error:
            self._fail(kind, contained(error), works)

    def _advance(self) -> None:
        """Do the next piece of the other work that has waited longest; that work then goes to the end of the queue."""
        with self._changed:
            work = self._pieces.popleft() if self._pieces else None
        if work is None or work.is_cancelled:
            return
        try:
            self._spent += next(work.pieces)
        except StopIteration:
            work.tell(None)
        except BaseException as error:
            work.tell(contained(error))
        else:
            with self._changed:
                self._pieces.append(work)

    def _step(self, kind: Kind) -> None:
        """Decode the next tokens of one kind, and report them."""
        group = self._groups[kind]
        for work in [*group.works.values()]:
            if work.is_cancelled:
                self._leave(work, group)
        try:
            pieces = group.lanes.step()
        except BaseException as error:
            self._fail(kind, contained(error))
            return
        group.spent += group.lanes.cost
        for piece in pieces:
            work = group.works[piece.answer]
            work.tokens += piece.tokens
            if piece.is_last:
                self._leave(work, group)
                self._seconds += (time.monotonic() - work.began - self._seconds) / 10
            self._report(work, piece)
        if group.lanes.is_idle:
            del self._groups[kind]

    def _report(self, work: Work, piece: Piece) -> None:
        """Report a piece; before the last piece, also the trace."""
        if piece.error is not None:
            _tell(work, piece.error)
            return
        if piece.is_last and work.is_traced and piece.ending != "broken" and not work.is_cancelled:
            request = Request([work.answer.prompt], work.answer.settings, work.answer.seed)
            try:
                traced = trace(self._loaded, request, [work.tokens])[0]
            except BaseException as error:
                _tell(work, contained(error))
                return
            _tell(work, traced)
        _tell(work, piece)

    def _fail(self, kind: Kind, error: Exception, others: Sequence[Work] = ()) -> None:
        """Report an error to all works of a kind, and to `others`; drop its lanes and all prefixes, maybe lost."""
        group = self._groups.pop(kind, None)
        if self.prefixes is not None:
            self.prefixes.clear()
        for work in {*others, *(group.works.values() if group is not None else ())}:
            _tell(work, error)

    def _leave(self, work: Work, group: _Group) -> None:
        group.lanes.drop(work.answer)
        group.works.pop(work.answer.number, None)


def _tell(work: Work, told: Piece | list[TokenTrace] | Exception) -> None:
    """Call a client's callback; if that fails, the client has left."""
    try:
        work.tell(told)
    except BaseException as error:
        contained(error)
        work.is_cancelled = True
