"""Handles SIGTERM in training: after the running step, save a checkpoint and stop.

Schedulers announce the end of a machine with SIGTERM and kill processes after a grace period (30 s on Google's spot
VMs). The running step and a checkpoint must fit into it; otherwise the steps since the newest checkpoint are lost.
"""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED = 143  # the exit status: 128 + SIGTERM


class Preemption:
    """A context manager that handles SIGTERM; with several processes, JAX decides after which step all stop."""

    def __enter__(self) -> "Preemption":
        self._noticed, self._former = False, None
        # Python handles signals only in its main thread.
        if not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def reached(self, step: int) -> bool:
        """Whether to save and stop after this step; all processes must call this after every step."""
        return self._noticed or multihost_utils.reached_preemption_sync_point(step)

    def _notice(self, *_: Any) -> None:
        self._noticed = True
        signal.signal(signal.SIGTERM, self._former)
        os.write(2, b"SIGTERM: saving after the step under way; another one ends at once\n")  # print is not reentrant
