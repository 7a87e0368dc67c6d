"""The training program with a mishap: `... worker TERM@4 ARGUMENTS` gets SIGTERM after step 4, and is slow then.

`test_processes` starts it as one of several processes, or alone; it is not collected.
"""

import os
import signal
import sys
import time

# Where torch is installed, TensorBoard imports it, which takes a third of the start.
sys.modules["torch"] = None  # type: ignore[assignment]
import tensorboardX  # noqa: E402, F401

del sys.modules["torch"]

from l2d_jax import command_line, train  # noqa: E402
from l2d_jax.training.preemption import Preemption  # noqa: E402


def main() -> None:
    name, _, at = sys.argv.pop(1).partition("@")
    reached = Preemption.reached

    def strike(self: Preemption, step: int) -> bool:
        if at and step == int(at):
            os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
        if at and step >= int(at):
            time.sleep(0.5)  # the notice takes a second to reach the others, and a step of this model a hundredth
        return reached(self, step)

    Preemption.reached = strike
    command_line.run(train.main)


if __name__ == "__main__":
    main()
