"""Decodes the requests of clients: a queue, and lanes for each kind of answers that can share a program.

The thread that calls `Engine.run` hands out turns to one worker for each kind. Only the worker that has the turn
touches the model, but it compiles without a turn. Other threads submit work, and get its pieces by callbacks. Kinds
take turns according to the passes over the weights that they have cost, so a kind with expensive tokens does not delay
the others.

Running answers do not wait for programs that only a new one needs. Such an answer gets lanes aside from the others of
its kind. Its programs are known from then on, and the next answer like it joins the others.
"""

import math
import threading
import time
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any

from l2d_jax.decoding.batch.lane_options import program_key
from l2d_jax.decoding.batch.prompt_reader import NO_SERVICE, Service
from l2d_jax.decoding.batch.shapes import Shape
from l2d_jax.decoding.buckets import is_long, sample_bucket
from l2d_jax.errors import require
from l2d_jax.serving.group import Group
from l2d_jax.serving.piecework import PieceQueue
from l2d_jax.serving.turns import Worker
from l2d_jax.serving.work import EndingError, FullError, Kind, PieceWork, Work, tell

SHORT_KINDS, LONG_KINDS = 2, 1  # number of kinds decoded at a time, with cheap and with expensive tokens
ASIDE = 1  # number of groups of lanes besides, for answers that need new programs
GROUPS = SHORT_KINDS + LONG_KINDS + ASIDE
PLAIN = ("euler", "sample", "auto", 1)  # what does not matter at a budget of 1, in lanes of several paths
KNOWN = 4096  # limit on what is remembered of programs that have run
SCORERS = 2  # number of works in pieces that can compile or compute at a time


class Engine:
    """Answers requests in the order in which they arrive, `lanes` of each kind at a time; at most `queue` wait."""

    def __init__(self, *, lanes: int, queue: int, service: Service = NO_SERVICE) -> None:
        """`service` says what all kinds share: the prefix cache, and whether answers are deterministic."""
        self._size, self._limit, self.service = lanes, queue, service
        self._waiting: list[Work] = []
        self._changed = threading.Condition()
        self._pieces = PieceQueue([self._worker() for _ in range(SCORERS)])
        self._groups: dict[Kind, Group] = {}
        self._aside: Group | None = None
        self._known: set[tuple[Hashable, Shape, bool]] = set()  # what has run; True: tokens of several answers together
        self._spent = 0  # what the group that had the last turn has spent: where others begin or resume
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
            longest = max(len(waiting), len(self._pieces) + len(pieces))
            if longest > self._limit:
                raise FullError(math.ceil(self._seconds * longest / self._size))
            if not len(self._pieces):
                self._pieces.spent = max(self._pieces.spent, self._spent)
            self._pieces.add(pieces)
            self._waiting = waiting
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
        return sum(len(group.works) for group in self._all), len(self._waiting)

    def run(self) -> None:
        """Decode until `close`. An error of an answer goes to its client, an error of a program to its whole kind."""
        try:
            while self._wait():
                group, scorer = self._next()
                if group is None:
                    assert scorer is not None
                    self._pieces.advance(scorer)
                elif group.worker.is_idle:
                    group.worker.begin(partial(self._step, group))
                else:
                    group.worker.resume()
        finally:  # whatever ends this thread, no client waits forever
            self.close()
            for work in (*self._waiting, *(work for group in self._all for work in group.works.values())):
                tell(work, EndingError())
            self._pieces.end()
            for group in self._all:
                group.worker.end()
            self._waiting, self._groups, self._aside = [], {}, None

    def kind(self, work: Work) -> Kind:
        """The kind of an answer. At a budget of 1 it joins a running kind of several paths if it can."""
        answer, path = work.answer, work.model.loaded.model.path
        settings, has_label = answer.settings, answer.prompt.label is not None
        program = None if self.service.context is None else program_key(answer)
        lane_model, is_plain = work.model.lane_model(settings), settings.budget == 1 and not has_label
        if is_plain and self.service.context is None:
            mixed = (kind for kind in self._groups if kind.lane_model.are_mixed)
            host = next((kind for kind in mixed if not (kind.has_label or kind.is_long)), None)
            if host is not None:
                return host
        refines = path is not None and path.config.reader != "lm" and settings.budget > 1
        samples, is_slow = sample_bucket(settings.draws), is_long(settings.budget, settings.draws)
        options: Any = (settings.solver, settings.velocity, settings.parallel, samples)
        solver, velocity, parallel, samples = PLAIN if is_plain and lane_model.are_mixed else options
        return Kind(lane_model, solver, velocity, parallel, samples, has_label, refines, is_slow, program)

    @property
    def _all(self) -> list[Group]:
        return [*self._groups.values(), *([] if self._aside is None else [self._aside])]

    def _worker(self) -> Worker:
        return Worker(on_compiled=self._wake)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify()

    def _wait(self) -> bool:
        """Wait until someone can use a turn; returns whether there is any work."""
        with self._changed:
            while True:
                self._choose()
                if any(not group.worker.is_compiling for group in self._all) or self._pieces.next_worker():
                    return True
                if self._is_closing and not (self._waiting or self._all or len(self._pieces)):
                    return False
                self._changed.wait()

    def _next(self) -> tuple[Group | None, Worker | None]:
        """Who gets the next turn, of those that can use one: the group or the scorer that has spent the least."""
        able, scorer = [one for one in self._all if not one.worker.is_compiling], self._pieces.next_worker()
        for one in able:
            if not one.worker.is_idle:  # it has compiled: it does not make up for the time
                one.spent = max(one.spent, self._spent)
        group = min(able, key=lambda one: one.spent, default=None)
        if scorer is not None and (group is None or self._pieces.spent <= group.spent):
            group = None
        self._spent = self._pieces.spent if group is None else group.spent
        return group, scorer

    def _choose(self) -> None:
        """Give lanes to the works of the queue for which there are any.

        If a kind has no lanes and no further kind can be opened, all later works of long (or short) kinds wait as well,
        except those that need new programs: they wait for the lanes aside.
        """
        self._waiting = [work for work in self._waiting if not work.is_cancelled]
        aside, held = self._aside, set[bool]()
        if aside is not None and aside.is_proven and aside.kind not in self._groups and self._has_room(aside.kind):
            self._groups[aside.kind], self._aside = aside, None
        for work in list(self._waiting):
            kind = self.kind(work)
            group = self._groups.get(kind)
            if not self._is_known(work, kind, group):
                self._aside = self._aside or self._open(kind)
                group = self._aside if self._aside.kind == kind else None
            elif group is None and not self._has_room(kind):
                held.add(kind.is_long)
            elif kind.is_long in held:
                group = None
            elif group is None:
                group = self._groups[kind] = self._open(kind)
            if group is not None and group.free:
                group.add(work)
                self._waiting.remove(work)

    def _has_room(self, kind: Kind) -> bool:
        """Whether lanes for another such kind can be opened."""
        most = LONG_KINDS if kind.is_long else SHORT_KINDS
        return sum(other.is_long == kind.is_long for other in self._groups) < most

    def _open(self, kind: Kind) -> Group:
        return Group(kind, lanes=self._size, spent=self._spent, worker=self._worker(), service=self.service)

    def _is_known(self, work: Work, kind: Kind, group: Group | None) -> bool:
        """Whether a work needs no new program, in the lanes of its group or in new ones."""
        own = Shape.of(work.answer)
        shape = Shape.together([own]) if group is None else group.shape_of([*group.works.values(), work])
        return (kind.programs, own, False) in self._known and (kind.programs, shape, True) in self._known

    def _step(self, group: Group) -> None:
        """Decode the next tokens of a group, and remove it when it has no more works."""
        before = [*group.works.values()]
        read, shape = group.step()
        if len(self._known) > KNOWN:
            self._known.clear()
        self._known |= {(group.kind.programs, own, False) for own in read}
        self._known |= set() if shape is None else {(group.kind.programs, shape, True)}
        for work in before:
            if work.answer.number not in group.works and not work.is_cancelled:
                self._seconds += (time.monotonic() - work.began - self._seconds) / 10
        if not group.works:
            group.worker.end()
            if group is self._aside:
                self._aside = None
            else:
                del self._groups[group.kind]
