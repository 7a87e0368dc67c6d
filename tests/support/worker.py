"""The training program with a mishap, for a process of its own: "TERM@4" is SIGTERM after step 4, and slow then."""

import os
import signal
import sys
import time
from typing import Any

# Where torch is installed, TensorBoard imports it, which takes a third of the start.
if "torch" not in sys.modules:
    sys.modules["torch"] = None  # type: ignore[assignment]
    import tensorboardX.event_file_writer  # noqa: F401

    del sys.modules["torch"]

from l2d_jax import train as program
from l2d_jax.training.preemption import Preemption
from tests.support import forked


def train(mishap: str, *arguments: Any) -> None:
    name, _, at = mishap.partition("@")
    reached = Preemption.reached

    def strike(self: Preemption, step: int) -> bool:
        if at and step == int(at):
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        if at and step >= int(at):
            time.sleep(0.5)  # the notice takes a second to reach the others, and a step of this model a hundredth
        return reached(self, step)

    Preemption.reached = strike
    forked.program(program.main, *arguments)
