"""Decodes what clients ask for, as it comes: a queue, and lanes for each kind of answer that can share a program.

The thread that calls `Engine.run` alone touches the model. Others submit work, and are called back with its pieces.
"""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from l2d_jax.decoding.lanes import Lanes
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Answer, Piece, Request
from l2d_jax.decoding.trace import TokenTrace, trace
from l2d_jax.errors import require

KINDS = 2  # of answers at a time: each has lanes of its own


class FullError(Exception):
    """The queue is full; `seconds` is about when it will not be."""

    def __init__(self, seconds: int) -> None:
        super().__init__(f"the queue is full: ask again in {seconds} s")
        self.seconds = seconds


class Kind(NamedTuple):
    """What answers that are decoded together share."""

    solver: str
    velocity: str
    draws: int
    has_label: bool
    refines: bool  # whether a path with a reader of its own reads the context


@dataclass(eq=False)
class Work:
    """An answer that a client asks for, and who is told of it."""

    answer: Answer
    tell: Callable[[Piece | list[TokenTrace] | Exception], None]  # the trace comes before the last piece
    is_traced: bool = False
    is_cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0  # when it got its lane


@dataclass(eq=False)
class Task:
    """Other work with the model; one piece of it is done between two chunks of tokens."""

    pieces: Iterator[None]
    tell: Callable[[Exception | None], None]  # at its end
    is_cancelled: bool = False


class Engine:
    """Answers in the order in which they were asked for, `lanes` of each kind at a time; at most `queue` wait."""

    def __init__(self, loaded: LoadedModel, *, lanes: int, queue: int) -> None:
        self._loaded, self._size, self._limit = loaded, lanes, queue
        self._waiting: list[Work] = []
        self._tasks: deque[Task] = deque()
        self._lanes: dict[Kind, Lanes] = {}
        self._working: dict[int, Work] = {}  # by the number of the answer
        self._changed = threading.Condition()
        self._is_closing = False
        self._seconds = 1.0  # that an answer has taken of late, in the mean

    def submit(self, works: Sequence[Work], tasks: Sequence[Task] = ()) -> None:
        """Ask for answers and for other work; raises `FullError`, and `InputError` for more than ever fit the queue."""
        count = max(len(works), len(tasks))
        problem = f"a request asks for at most {self._limit} answers here, got {count}: ask several times"
        require(count <= self._limit, problem)
        with self._changed:
            waiting = [*(work for work in self._waiting if not work.is_cancelled), *works]
            longest = max(len(waiting), len(self._tasks) + len(tasks))
            if longest > self._limit:
                raise FullError(math.ceil(self._seconds * longest / self._size))
            self._waiting = waiting
            self._tasks += tasks
            self._changed.notify()

    def cancel(self, works: Sequence[Work | Task]) -> None:
        """Nobody waits for these any more; answers leave their lanes at the next chunk."""
        for work in works:
            work.is_cancelled = True

    def close(self) -> None:
        """Let `run` return once nothing is left to be answered."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()

    @property
    def load(self) -> tuple[int, int]:
        """The answers that are decoded, and those that wait."""
        return len(self._working), len(self._waiting)

    def run(self) -> None:
        """Answer until `close`."""
        while True:
            with self._changed:
                while not (self._waiting or self._working or self._tasks or self._is_closing):
                    self._changed.wait()
                if not (self._waiting or self._working or self._tasks):
                    return
                admitted = self._choose()
            for kind, works in admitted.items():
                self._lanes[kind].admit([work.answer for work in works])
                for work in works:
                    self._working[work.answer.number], work.began = work, time.monotonic()
            for kind, lanes in list(self._lanes.items()):
                self._step(kind, lanes)
            self._advance()

    def kind(self, answer: Answer) -> Kind:
        """The kind of an answer."""
        settings, path = answer.settings, self._loaded.model.path
        refines = path is not None and path.config.reader != "lm" and settings.budget > 1
        return Kind(settings.solver, settings.velocity, settings.draws, answer.prompt.label is not None, refines)

    def _choose(self) -> dict[Kind, list[Work]]:
        """Take from the queue what has a free lane; a kind that has no lanes yet holds up all that came later."""
        self._waiting = [work for work in self._waiting if not work.is_cancelled]
        chosen: dict[Kind, list[Work]] = {}
        for work in list(self._waiting):
            kind = self.kind(work.answer)
            if kind not in self._lanes:
                if len(self._lanes) == KINDS:
                    break
                model = self._loaded.decoder.reading(refines=kind.refines)
                self._lanes[kind] = Lanes(model, lanes=self._size, stop_ids=self._loaded.stop_ids)
            if len(chosen.get(kind, [])) < self._lanes[kind].free:
                chosen.setdefault(kind, []).append(work)
                self._waiting.remove(work)
        return chosen

    def _advance(self) -> None:
        """Do the next piece of the task that has waited longest, which then waits behind the others."""
        with self._changed:
            task = self._tasks.popleft() if self._tasks else None
        if task is None or task.is_cancelled:
            return
        try:
            next(task.pieces)
        except StopIteration:
            task.tell(None)
        except Exception as error:
            task.tell(error)
        else:
            with self._changed:
                self._tasks.append(task)

    def _step(self, kind: Kind, lanes: Lanes) -> None:
        """Decode the next tokens of one kind, and tell of them; an error is told to all of that kind."""
        mine = [work for work in self._working.values() if self.kind(work.answer) == kind]
        for work in mine:
            if work.is_cancelled:
                self._leave(work, lanes)
        try:
            for piece in lanes.step():
                work = self._working[piece.answer]
                work.tokens += piece.tokens
                if piece.is_last:
                    if work.is_traced and piece.ending != "broken":
                        request = Request([work.answer.prompt], work.answer.settings, work.answer.seed)
                        work.tell(trace(self._loaded, request, [work.tokens])[0])
                    self._leave(work, lanes)
                    self._seconds += (time.monotonic() - work.began - self._seconds) / 10
                work.tell(piece)
        except Exception as error:
            for work in mine:
                self._leave(work, lanes)
                work.tell(error)
        if lanes.is_idle:
            del self._lanes[kind]

    def _leave(self, work: Work, lanes: Lanes) -> None:
        lanes.drop(work.answer)
        self._working.pop(work.answer.number, None)
