"""Submissions of one function, `answer`, and whether this machine can judge any."""

import pytest

from l2d_jax.evaluation.sandbox import grade
from l2d_jax.evaluation.sandbox.submission import Submission
from tests.support.attacks import ASK

REASON = grade.unavailable()
isolated = pytest.mark.skipif(REASON is not None, reason=str(REASON))


def ask(candidate: str, tests: str = ASK, *, setup: str = "") -> Submission:
    return Submission(candidate, tests, ("answer",), setup=setup)


def answer(value: str) -> Submission:
    return ask(f"def answer(x): return {value}")
