"""Submissions: a candidate's source with its tests, the two isolated processes that judge it, and their verdict."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from types import ModuleType
from typing import Any, BinaryIO, NamedTuple

from l2d_jax.errors import RunError
from l2d_jax.evaluation.sandbox import isolation
from l2d_jax.evaluation.sandbox.isolated import candidate, grader
from l2d_jax.evaluation.sandbox.isolated.plain_data import Channel, ClosedError
from l2d_jax.evaluation.sandbox.places import Place

_START_SECONDS = 60.0  # time for two processes to start on a busy machine
_REPORT_BYTES = 2**16
_REASON_LENGTH = 200
_SIGNALS = {signal.SIGXCPU: "CPU time", signal.SIGKILL: "killed"}


class Submission(NamedTuple):
    """A candidate's source and its tests."""

    candidate: str  # source that defines functions
    tests: str  # source that calls these functions, and raises if a result is wrong
    names: tuple[str, ...]  # names of the functions; everything else that the tests use must be in `setup`
    setup: str = ""  # source that runs before the tests; from the data set, never from the candidate


class Verdict(NamedTuple):
    """Whether the tests passed, and if not, why, in one line."""

    passed: bool
    reason: str  # "not plain data: ..." if it could not be judged


def judge_submission(submission: Submission, *, bwrap: str, limits: isolation.Limits, place: Place) -> Verdict:
    """Judge a submission in two new isolated processes; raises `RunError` if one of them did not start."""
    with contextlib.ExitStack() as stack:
        # The candidate's process and the tests' process talk to each other; only the latter reports to this process.
        requests, requesting = _pipe(stack)
        answers, answering = _pipe(stack)
        report, reporting = _pipe(stack)

        def start(module: ModuleType, pipes: Sequence[BinaryIO], account: int | None, **task: Any) -> Any:
            numbers, task = [pipe.fileno() for pipe in pipes], {"limits": limits._asdict(), "account": account, **task}
            process = isolation.start_isolated(module, numbers, task, bwrap=bwrap, group=place.group)
            stack.enter_context(process)  # waits for it after it was killed
            stack.callback(process.kill)
            return process

        source, tests, names, setup = submission
        tried = start(candidate, (requests, answering), place.accounts[0], source=source)
        pipes = (answers, requesting, reporting)
        testing = start(grader, pipes, place.accounts[1], setup=setup, tests=tests, names=names)
        for pipe in (requests, requesting, answers, answering, reporting):
            pipe.close()  # so that each pipe ends when its process does
        messages = Channel(report.fileno(), -1, limit=_REPORT_BYTES)
        try:
            messages.receive(seconds=_START_SECONDS)
        except ClosedError:
            raise RunError(_complaint(tried, testing)) from None
        try:
            reason = messages.receive(seconds=limits.seconds)["reason"]
        except TimeoutError:
            return Verdict(passed=False, reason="timeout")
        except ClosedError:
            return Verdict(passed=False, reason=f"the tests' process: {_ending(testing)}")
        return Verdict(passed=reason == "passed", reason=_ending(tried) if reason == "ended" else _line(reason))


def _pipe(stack: contextlib.ExitStack) -> tuple[BinaryIO, BinaryIO]:
    reader, writer = os.pipe()
    return stack.enter_context(open(reader, "rb", buffering=0)), stack.enter_context(open(writer, "wb", buffering=0))


def _complaint(*processes: subprocess.Popen[bytes]) -> str:
    """Kill processes that did not start, and return their error message."""
    said = []
    for process in processes:
        process.kill()
        assert process.stderr is not None
        said += process.stderr.read().decode(errors="replace").strip(".").splitlines()[-1:]
    return _line(said[0]) if said else "an isolated process has not started, and does not say why"


def _ending(process: subprocess.Popen[bytes]) -> str:
    try:
        status = process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return "closed its pipe"
    number = next((number for number in signal.Signals if number == status - 128), None)
    return _SIGNALS.get(number, f"crashed: {number.name}") if number else f"ended with status {status}"


def _line(text: str) -> str:
    """The text as one printable line, because candidates may write parts of it."""
    return "".join(character if character.isprintable() else " " for character in text)[:_REASON_LENGTH].strip()
