"""Processes forked from one that has imported the product and done nothing else: a start of Python costs seconds."""

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax

from l2d_jax import command_line

PATIENCE = 300  # seconds without output
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.support.worker", "l2d_jax.programs.evaluate", "l2d_jax.programs.train", "gcsfs"])


class Ended(NamedTuple):
    """Exit status, output and errors."""

    status: int
    out: str
    err: str


class Forked:
    """A process that calls a function, in an environment with these changes."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None):
        self._ends = [SERVER.Pipe(duplex=False) for _ in range(2)]
        streams = [written for _, written in self._ends]
        given = (function, arguments, {**os.environ, **(environment or {})}, *streams)
        self.process = SERVER.Process(target=_call, args=given)
        self.process.start()
        for stream in streams:
            stream.close()

    def end(self) -> Ended:
        """Wait for it, and for its own children that write to its streams."""
        texts = [self._read(read) for read, _ in self._ends]
        self.process.join()
        assert self.process.exitcode is not None
        return Ended(self.process.exitcode, *texts)

    def _read(self, stream: Connection) -> str:
        text = b""
        while stream.poll(PATIENCE):
            if not (piece := os.read(stream.fileno(), 2**16)):
                return text.decode()
            text += piece
        self.process.kill()
        raise TimeoutError(f"nothing in {PATIENCE} s after {text.decode()!r}")


def _call(function: Callable[..., Any], arguments: Any, environment: dict[str, str], *streams: Connection) -> None:
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    os.environ.update(environment)
    gc.freeze()  # as pytest_collection_finish in conftest.py
    gc.set_threshold(50_000)
    function(*arguments)


def program(main: Callable[[], int | None], *arguments: Any) -> None:
    """A program with its arguments, as its users start it."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    sys.argv = [main.__module__, *map(str, arguments)]
    command_line.run(main)
