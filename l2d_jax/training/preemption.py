"""Turns SIGTERM into a question between two steps of training: save and stop after this one?

Schedulers announce the end of a machine by SIGTERM and kill after a grace time (30 s on Google's spot VMs). It has to
cover what is under way and a checkpoint; otherwise the steps since the newest checkpoint are lost.
"""

import os
import signal
import threading
from typing import Any

import jax
from jax.experimental import multihost_utils

STOPPED = 143  # the exit status: 128 + SIGTERM


class Preemption:
    """Handles SIGTERM within the `with`; several processes ask JAX for the step to stop after."""

    def __enter__(self) -> "Preemption":
        self._noticed, self._former = False, None
        # Python handles signals in its main thread alone.
        if not jax.distributed.is_initialized() and threading.current_thread() is threading.main_thread():
            self._former = signal.signal(signal.SIGTERM, self._notice)
        return self

    def __exit__(self, *_: Any) -> None:
        if self._former is not None:
            signal.signal(signal.SIGTERM, self._former)

    def reached(self, step: int) -> bool:
        """Whether to save and stop after this step; all processes must ask after every step."""
        return self._noticed or multihost_utils.reached_preemption_sync_point(step)

    def _notice(self, *_: Any) -> None:
        self._noticed = True
        signal.signal(signal.SIGTERM, self._former)
        os.write(2, b"SIGTERM: saving after the step under way; another one ends at once\n")  # print is not reentrant
