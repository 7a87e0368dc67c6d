r"""MATH: competition problems whose worked solutions end with a boxed answer (Hendrycks et al., 2021).

    user       What is $1 + 1$?
    assistant  We have $1 + 1 = \boxed{2}.$

The examples contain thoughts, so prompts with thoughts differ only in greedy decoding. The relaxed rule is
math-verify's. The release reads lighteval/MATH, which is no longer on the hub. It does not count rows whose solution
has no `\boxed{}` with braces, so the number of rows is not checked.

The strict rules are those of the data set's authors (github.com/hendrycks/math, is_equiv) as in the release, including
their quirks. Where the release's functions would raise and end the evaluation, for a `\frac` or `\sqrt` with nothing
after it, the functions here find no answer.
"""

import logging
import re
import threading
from functools import lru_cache
from typing import Any

from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, Score, text_of

SECONDS = 5  # limit for reading an answer, and for comparing two: 9^{9^{9}} would take forever
# Texts and their replacements, applied in this order.
REPLACEMENTS = {"\n": "", "\\!": "", "\\\\": "\\", "tfrac": "frac", "dfrac": "frac", "\\left": "", "\\right": ""}
REPLACEMENTS |= {"^{\\circ}": "", "^\\circ": "", "\\$": ""}


def boxed(text: str) -> str | None:
    r"""The last `\boxed` (or, if there is none, `\fbox`) up to its closing brace; None if it is not closed.

    >>> boxed(r"so \boxed{1} or \boxed{\frac{1}{2}}.")
    '\\boxed{\\frac{1}{2}}'
    """
    start = text.rfind("\\boxed") if "\\boxed" in text else text.rfind("\\fbox")
    depth = 0
    for end in range(start, len(text)) if start >= 0 else ():
        depth += (text[end] == "{") - (text[end] == "}")
        if text[end] == "}" and depth == 0:
            return text[start : end + 1]
    return None


def extract(text: str) -> str | float | None:
    r"""The answer in a solution: the rewritten content of the last box; without a closed box, the last number.

    That number has no sign, and a box other than `\boxed{}` has no answer:

    >>> extract(r"\boxed{\tfrac12}"), extract("it is -0.5 or -3"), extract(r"\fbox{3}")
    ('\\frac{1}{2}', 3.0, None)
    """
    box = boxed(text)
    if box is not None:
        return rewrite(box[len("\\boxed{") : -1]) if box.startswith("\\boxed{") else None
    numbers = re.findall(r"\d*\.?\d+", text)
    return float(numbers[-1]) if numbers else None


def rewrite(text: str) -> str | None:
    r"""Rewrite an answer in the notation in which answers are compared; None where the release raises.

    >>> rewrite(r"x = 3\text{ cm}"), rewrite(r"\dfrac34"), rewrite(r"\sqrt3"), rewrite(".5"), rewrite("1/2")
    ('3', '\\frac{3}{4}', '\\sqrt{3}', '\\frac{1}{2}', '\\frac{1}{2}')
    """
    for old, new in REPLACEMENTS.items():
        text = text.replace(old, new)
    text = text.partition("\\text{ ")[0]  # units
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.")
    text = "0" + text if text.startswith(".") else text
    name, *values = text.split("=")
    text = values[0] if len(values) == 1 and len(name) <= 2 else text
    if re.search(r"\\sqrt(?:\\sqrt|\Z)", text):
        return None
    braced = _brace_fractions(re.sub(r"\\sqrt([^{])", r"\\sqrt{\1}", text).replace(" ", ""))
    if braced is None:
        return None
    text = "\\frac{1}{2}" if braced == "0.5" else braced
    if found := re.fullmatch(r"(-?[1-9][0-9]*|0)/(-?[1-9][0-9]*|0)", text):
        text = f"\\frac{{{found[1]}}}{{{found[2]}}}"
    text = text.strip()
    if "_" in text:
        first, second, *rest = text.split("_")
        text = "_".join([first, second.replace("{", "").replace("}", ""), *rest])
    return text if "(" in text else text.replace(",", "")


def is_same(reference: str | float, found: str | float) -> bool:
    r"""Whether two extracted answers are the same text, the same number, or a number and a fraction that rounds to it.

    >>> is_same("5", 5.0), is_same(r"\frac{1}{2}", 0.5), is_same(r"\frac{1}{2}", 0.4), is_same("-5", 5.0)
    (True, True, True, False)
    """
    if reference == found:
        return True
    one, other = _number(reference), _number(found)
    for latex, value in ((one, other), (other, one)):
        if isinstance(latex, str) and isinstance(value, float):
            fraction = re.fullmatch(r"\\frac\{(-?\d+)\}\{(-?\d+)\}", latex)
            try:
                return fraction is not None and round(value * int(fraction[2])) == int(fraction[1])
            except (OverflowError, ValueError):  # infinity or NaN: the release would end here
                return False
    return one == other


def _brace_fractions(text: str) -> str | None:
    short = next((piece for piece in text.split("\\frac")[1:] if len(piece) < 2 and piece != "{"), None)
    if short is not None:  # too few characters after it
        return text if short else None
    parts = re.compile(r"\\frac([^{])([^{]?)")
    return parts.sub(lambda found: "\\frac" + "".join(f"{{{part}}}" for part in found.groups() if part), text)


def _number(answer: str | float) -> str | float:
    try:
        return float(answer)
    except ValueError:
        return answer


def _word(row: Row) -> Item:
    question, solution = text_of(row, "problem"), text_of(row, "solution")
    return Item(question, solution, extract(solution), subject=text_of(row, "type"), thought=solution)


def _judge(problem: Problem, completion: str) -> Score:
    import math_verify  # here: it takes half a second with SymPy, which no other task needs

    strict = extract(completion)
    is_strict = strict is not None and is_same(problem.reference, strict)
    right, relaxed = _parse(problem.answer), _parse(completion)
    is_relaxed = math_verify.verify(right, relaxed, timeout_seconds=SECONDS)
    reason = "" if is_strict and is_relaxed else "no answer" if strict is None else f"{problem.reference} is right"
    found = None if strict is None else str(strict)
    return Score(float(is_strict), float(is_relaxed), found, str(relaxed[-1]) if relaxed else None, reason)


@lru_cache(maxsize=64)  # a problem's answer is read once for all its samples
def _parse(text: str) -> list[Any]:
    import math_verify

    # math-verify measures time by alarms, which only the main thread gets; in other threads it silently finds nothing.
    assert threading.current_thread() is threading.main_thread()
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it prints every answer that it gives up on
    return math_verify.parse(text, parsing_timeout=SECONDS)


RULES = {"math": {"word": _word, "judge": _judge}}
