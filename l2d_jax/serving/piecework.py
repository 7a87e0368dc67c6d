"""Other work than answers: its pieces take turns with each other, and together with the kinds of answers."""

import threading
from collections import deque
from collections.abc import Sequence
from functools import partial

from l2d_jax.errors import contained
from l2d_jax.serving.turns import Worker
from l2d_jax.serving.work import EndingError, PieceWork


class PieceQueue:
    """A queue of work in pieces. The work that has waited longest is next; after a piece it goes to the end.

    There are several workers, so that one work can compile while others go on. Any thread may call `add`.
    """

    def __init__(self, workers: Sequence[Worker]) -> None:
        self.spent = 0  # passes that the pieces have cost so far
        self._workers = workers
        self._lock = threading.Lock()
        self._waiting: deque[PieceWork] = deque()
        self._running: list[PieceWork] = []  # works whose piece has begun and not ended

    def __len__(self) -> int:
        return len(self._waiting) + len(self._running)

    def add(self, works: Sequence[PieceWork]) -> None:
        """Add works, and forget the cancelled ones that wait."""
        with self._lock:
            self._waiting = deque(work for work in (*self._waiting, *works) if not work.is_cancelled)

    def next_worker(self) -> Worker | None:
        """The worker that can use a turn, or None."""
        able = [worker for worker in self._workers if not worker.is_compiling]
        resuming = [worker for worker in able if not worker.is_idle]
        return next(iter(resuming or (able if self._waiting else ())), None)

    def advance(self, worker: Worker) -> None:
        """Give a worker a turn, in which it does a piece, or completes the one that it has compiled for."""
        if not worker.is_idle:
            worker.resume()
            return
        with self._lock:
            work = self._waiting.popleft() if self._waiting else None
            self._running += [] if work is None else [work]
        if work is not None:
            worker.begin(partial(self._do_piece, work))

    def end(self) -> None:
        """Tell all clients that their work is not done, and end the workers."""
        for work in (*self._waiting, *self._running):
            work.tell(EndingError())
        self._waiting, self._running = deque(), []
        for worker in self._workers:
            worker.end()

    def _do_piece(self, work: PieceWork) -> None:
        error: Exception | None = None
        cost: int | None = None
        try:
            cost = None if work.is_cancelled else next(work.pieces, None)
        except BaseException as problem:
            error = contained(problem)
        with self._lock:
            self._running.remove(work)
            self._waiting.extend([] if cost is None else [work])
        if cost is not None:
            self.spent += cost
        elif not work.is_cancelled:
            work.tell(error)
