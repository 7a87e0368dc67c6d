"""Runs generated code and judges it, in isolation, on Linux.

Each submission takes two new isolated processes (`isolation`): one runs the candidate, the other the tests. The tests
call the candidate's functions; arguments and results travel as plain data (`isolated.plain_data`). So a candidate sees
neither the expected values nor the verdict, which is sent over a pipe that only the tests' process has. Tests do not
see it if a function changes its arguments in place. Tests that pass or expect functions or instances of classes cannot
be judged ("not plain data").

docs/evaluation.md says what the sandbox does not protect from: among others, faults of the kernel and of bubblewrap.
"""

import functools
import os
import platform
import shutil
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from l2d_jax.errors import RunError, require
from l2d_jax.evaluation.sandbox import seccomp
from l2d_jax.evaluation.sandbox.isolation import Limits
from l2d_jax.evaluation.sandbox.places import taken_places
from l2d_jax.evaluation.sandbox.submission import Submission, Verdict, judge_submission

_EASY = Submission(candidate="def answer(): return 42", tests="assert answer() == 42", names=("answer",))


class _Trial(NamedTuple):
    """Whether generated code can be isolated on this machine, and how."""

    reason: str | None  # why it cannot, in one line with the remedy; None: it can
    bwrap: str = ""
    with_accounts: bool = False  # whether isolated processes become other users
    has_group: bool = False  # whether a control group limits their memory


def unavailable() -> str | None:
    """Why generated code cannot run here, in one line with the remedy; None if it can. The first call tries it."""
    return _trial().reason


def unbounded() -> str | None:
    """If no control group can be made: a line that says what limits the memory of generated code. Else None."""
    trial = _trial()
    if trial.reason is not None or trial.has_group:
        return None
    held = "generated code is held to its limits, and the kernel's own memory for it only by what it may ask"
    remedy = "run as root, or where systemd delegates the memory controller"
    return f"no control group can be made here: {held} the kernel for ({remedy})"


def grade(
    submissions: Sequence[Submission], *, processes: int | None = None, limits: Limits | None = None
) -> list[Verdict]:
    """Judge submissions, `processes` at a time (default: one per processor); verdicts are in the same order.

    If other graders leave fewer places, fewer run at a time. Raises `InputError` if isolation is impossible, and
    `RunError` if an isolated process did not start, or if other graders have taken all places.
    """
    trial, limits = _trial(), limits or Limits()
    require(trial.reason is None, str(trial.reason))
    judge, thread = functools.partial(judge_submission, bwrap=trial.bwrap, limits=limits), threading.local()
    count = min(processes or len(os.sched_getaffinity(0)), len(submissions)) or 1
    with (
        taken_places(count, with_accounts=trial.with_accounts, memory=limits.memory) as places,
        ThreadPoolExecutor(len(places), "sandbox", lambda: setattr(thread, "place", places.pop())) as pool,
    ):
        # After an error no further submission starts; running ones end by their limits.
        return list(pool.map(lambda submission: judge(submission, place=thread.place), submissions))


def _trial() -> _Trial:
    if sys.platform != "linux":
        return _Trial(f"generated code needs the isolation of Linux, and this is {sys.platform}: run it on Linux")
    if (machine := platform.machine()) not in seccomp.ARCHITECTURES:
        known = " and ".join(seccomp.ARCHITECTURES)
        return _Trial(f"the filter of system calls is written for {known}, not for {machine}: run it on one of them")
    if bwrap := shutil.which("bwrap"):
        return _try(bwrap, os.geteuid())
    return _Trial("generated code is isolated by bubblewrap, and bwrap is not on the PATH: apt-get install bubblewrap")


@functools.cache
def _try(bwrap: str, user: int) -> _Trial:
    """Try isolation with a first submission."""
    limits, reason = Limits(seconds=60.0), ""
    for with_accounts in [True, False] if user == 0 else [False]:
        try:
            with taken_places(1, with_accounts=with_accounts, memory=limits.memory) as [place]:
                verdict = judge_submission(_EASY, bwrap=bwrap, limits=limits, place=place)
            if verdict.passed:
                return _Trial(None, bwrap, with_accounts, place.group is not None)
            reason = verdict.reason
        except (RunError, OSError) as error:
            reason = str(error)
    remedy = "allow user namespaces (a container: start it with --privileged), and use bubblewrap 0.8 or newer"
    return _Trial(f"generated code cannot be isolated here ({reason}): {remedy}")
