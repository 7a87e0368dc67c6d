"""Threads that take turns with the devices: one computes at a time, and each gives its turn back while it compiles."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import jax
from jax.sharding import Mesh

from l2d_jax.decoding.buckets import pausing


class Worker:
    """A thread that works in turns. Within its turn it alone computes; while it compiles a program, others can.

    One thread hands out the turns of all workers: it calls `begin` and `resume`, which return when the turn comes back.
    """

    def __init__(self, *, on_compiled: Callable[[], None]) -> None:
        """`on_compiled` is called when the worker can resume."""
        self.is_compiling = False
        self._on_compiled = on_compiled
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._has_started = self._is_ended = False
        self._turn, self._back = threading.Semaphore(0), threading.Semaphore(0)

    @property
    def is_idle(self) -> bool:
        """Whether there is no work that has begun and not ended."""
        return self._work is None

    def begin(self, work: Callable[[], None]) -> None:
        """Begin some work, under the mesh of the calling thread; raises what the work raises."""
        assert self.is_idle
        self._work = work
        if not self._has_started:
            self._has_started = True
            threading.Thread(target=self._run, args=[jax.sharding.get_mesh()], daemon=True).start()
        self.resume()

    def resume(self) -> None:
        """Continue the work that has compiled what it needs; raises what the work raises."""
        assert not self.is_compiling
        self._turn.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the thread, at once or when it has compiled; it gets no more turns."""
        self._is_ended = True
        self._turn.release()

    def _run(self, mesh: Mesh) -> None:
        set_mesh = contextlib.nullcontext() if mesh.empty else jax.set_mesh(mesh)
        with contextlib.suppress(SystemExit), set_mesh, pausing(self._pause):
            while True:
                self._wait()
                assert self._work is not None
                try:
                    self._work()
                except SystemExit:
                    raise
                except BaseException as error:  # for the thread that handed out the turn
                    self._error = error
                self._work = None
                self._back.release()

    def _wait(self) -> None:
        """Wait for a turn; at the end it raises `SystemExit`, which ends the thread, and which nothing contains."""
        self._turn.acquire()
        if self._is_ended:
            raise SystemExit

    @contextlib.contextmanager
    def _pause(self) -> Iterator[None]:
        """Give the turn back, and wait for the next one at the end."""
        self.is_compiling = True
        self._back.release()
        try:
            yield
        finally:
            self.is_compiling = False
            self._on_compiled()
            self._wait()
