r"""MATH: competition problems whose worked solutions end with a boxed answer (Hendrycks et al., 2021).

    user       What is $1 + 1$?
    assistant  We have $1 + 1 = \boxed{2}.$

The examples contain thoughts, so prompts with thoughts differ only in greedy decoding. The strict rules are in
`math_answers`; the relaxed one is math-verify's. The release reads lighteval/MATH, which has left the hub. It does not
count rows whose solution has no `\boxed{}` with braces, so no size is asserted.
"""

import logging
import threading
from functools import lru_cache
from typing import Any

import math_verify

from l2d_jax.evaluation.tasks import math_answers
from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, Score, text_of

SECONDS = 5  # limit for reading an answer, and for comparing two: 9^{9^{9}} would take for ever


def _word(row: Row) -> Item:
    question, solution = text_of(row, "problem"), text_of(row, "solution")
    return Item(question, solution, math_answers.extract(solution), subject=text_of(row, "type"), thought=solution)


def _judge(problem: Problem, completion: str) -> Score:
    """Compare by the release's rules, and by mathematics."""
    strict = math_answers.extract(completion)
    is_strict = strict is not None and math_answers.is_same(problem.reference, strict)
    right, relaxed = _parse(problem.answer), _parse(completion)
    is_relaxed = math_verify.verify(right, relaxed, timeout_seconds=SECONDS)
    reason = "" if is_strict and is_relaxed else "no answer" if strict is None else f"{problem.reference} is right"
    found = None if strict is None else str(strict)
    return Score(float(is_strict), float(is_relaxed), found, str(relaxed[-1]) if relaxed else None, reason)


@lru_cache(maxsize=64)  # a problem's answer is read once for all its samples
def _parse(text: str) -> list[Any]:
    # math-verify measures time by alarms, which only the main thread gets; elsewhere it would find nothing, silently.
    assert threading.current_thread() is threading.main_thread()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it prints every answer that it gives up on
    return math_verify.parse(text, parsing_timeout=SECONDS)


RULES = {"math": {"word": _word, "judge": _judge}}
