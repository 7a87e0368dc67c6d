"""Runs generated code and judges it, where Linux can isolate it.

Each submission takes two new isolated processes (`isolation`). One runs the candidate, the other the tests; the tests'
calls of the candidate's functions, and the values that these return, travel between them as plain data
(`isolated.plain_data`). So a candidate sees neither the expected values nor the verdict, which comes over a pipe that
only the tests' process holds.

This has a price: tests do not see a function change its arguments in place, and tests that pass or expect functions or
instances of classes cannot be judged (`Verdict.not_plain`).

The sandbox does not protect from
* faults of the kernel, of bubblewrap or of the processor, nor from what two processes learn of each other by timing;
* the use of resources: each candidate may use a processor, memory and its folder, which lies in memory, up to the
  limits, and some memory of the kernel beyond them (pipes, the names of files);
* reading what every machine has: Python's standard library, and the shared libraries of the system;
* tests that are wrong, or that the model knows by heart: answers are judged, not how they came about.
"""

import functools
import os
import platform
import queue
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from l2d_jax.errors import InputError, RunError
from l2d_jax.evaluation.sandbox import isolation, seccomp
from l2d_jax.evaluation.sandbox.isolation import Limits
from l2d_jax.evaluation.sandbox.submission import Submission, Verdict, judge_submission

_ACCOUNTS = range(64000, 64512)  # users that root's isolated processes become, two for each submission in progress
_TRIAL = Submission(candidate="def answer(): return 42", tests="assert answer() == 42", names=("answer",))


def unavailable() -> str | None:
    """Why generated code cannot run here, in one line with the remedy; None where it can. The first call tries it."""
    if sys.platform != "linux":
        return f"generated code needs the isolation of Linux, and this is {sys.platform}: run it on Linux"
    if platform.machine() not in seccomp.ARCHITECTURES:
        known = " and ".join(seccomp.ARCHITECTURES)
        return f"the filter of system calls is written for {known}, not for {platform.machine()}: run it on one of them"
    bwrap = shutil.which("bwrap")
    if bwrap is None:
        return "generated code is isolated by bubblewrap, and bwrap is not on the PATH: apt-get install bubblewrap"
    _, reason = _try(bwrap, os.geteuid())
    return reason


def grade(
    submissions: Sequence[Submission],
    *,
    processes: int | None = None,
    limits: Limits | None = None,
    progress: Callable[[int], object] | None = None,
) -> list[Verdict]:
    """Judge submissions, several at a time; the verdicts come in their order.

    Args:
        submissions: what to judge, each in two isolated processes of its own.
        processes: submissions at a time; by default, one for each processor.
        limits: of each isolated process; by default those of `Limits()`.
        progress: is called after each submission with the number of those done.

    Raises:
        InputError: there is no isolation here, or `processes` is out of range.
        RunError: an isolated process has not started, though others have.
    """
    reason, most = unavailable(), len(_ACCOUNTS) // 2
    if reason is not None:
        raise InputError(reason)
    processes = min(len(os.sched_getaffinity(0)), most) if processes is None else processes
    if not 1 <= processes <= most:
        raise InputError(f"1 to {most} submissions are judged at a time, not {processes}: change processes")
    bwrap = str(shutil.which("bwrap"))
    with_accounts, _ = _try(bwrap, os.geteuid())
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(processes):
        slots.put(slot)

    def judge_next(submission: Submission) -> Verdict:
        slot = slots.get()
        try:
            accounts = _accounts(slot) if with_accounts else (None, None)
            return judge_submission(submission, bwrap=bwrap, limits=limits or Limits(), accounts=accounts)
        finally:
            slots.put(slot)

    with ThreadPoolExecutor(processes, thread_name_prefix="sandbox") as pool:
        futures = [pool.submit(judge_next, submission) for submission in submissions]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                if progress is not None:
                    progress(done)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)  # submissions in progress end by their limits
            raise
    return [future.result() for future in futures]


def _accounts(slot: int) -> tuple[int, int]:
    return _ACCOUNTS[2 * slot], _ACCOUNTS[2 * slot + 1]


@functools.cache
def _try(bwrap: str, user: int) -> tuple[bool, str | None]:
    """Whether isolated processes become other users, and the reason where isolation fails, or None."""
    isolation.compile_sources()
    reasons = []
    for with_accounts in [True, False] if user == 0 else [False]:
        accounts = _accounts(0) if with_accounts else (None, None)
        try:
            verdict = judge_submission(_TRIAL, bwrap=bwrap, limits=Limits(seconds=60.0), accounts=accounts)
        except (RunError, OSError) as error:
            reasons.append(str(error))
            continue
        if verdict.passed:
            return with_accounts, None
        reasons.append(verdict.reason)
    remedy = "allow user namespaces (a container: start it with --privileged), and use bubblewrap 0.8 or newer"
    return False, f"generated code cannot be isolated here ({reasons[-1]}): {remedy}"
