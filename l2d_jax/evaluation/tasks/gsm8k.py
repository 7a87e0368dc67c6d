r"""GSM8K: grade-school word problems whose worked solutions end with the number (Cobbe et al., 2021).

    user       Tom has 3 bags of 4 apples. How many apples has he?
    assistant  Tom has 3*4 = <<3*4=12>>12 apples.\n#### 12

The strict answer is the first number after "#### ", compared as text: "12." is not "12". Prompts with thoughts have
eight examples, the first rows of the train split, whose solutions are chains of thought; decoding is then greedy. The
built-in word problems (`data/word_problems`) are asked as in training, without examples, and scored by the same rules.
"""

import re
from decimal import Decimal

from l2d_jax.data.word_problems import marked_number, problem
from l2d_jax.errors import require
from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, Score, text_of

BUILT_IN = 1000  # number of word problems in each split
NUMBER = re.compile(r"(?:(?<![\w.)])-)?\d[\d,]*(?:\.\d+)?")


def last_number(completion: str) -> str | None:
    """The number that the relaxed rule finds: the first after the last "####" or "answer is", else the last number.

    >>> last_number("So he pays $1,200.50 in total.")
    '1200.50'
    >>> last_number("The answer is -3. That is 3 less.")
    '-3'
    """
    text = completion.replace("$", "").replace("\\", "")
    _, *behind = re.split(r"####|answer is|answer:", text, flags=re.IGNORECASE)
    numbers = NUMBER.findall(behind[-1]) if behind else []
    numbers = numbers[:1] or NUMBER.findall(text)
    return numbers[-1].replace(",", "") if numbers else None


def _word(row: Row) -> Item:
    question, answer = text_of(row, "question"), text_of(row, "answer")
    reference = marked_number(answer)
    is_number = reference is not None and NUMBER.fullmatch(reference) is not None
    require(is_number, f"the answer must end with '#### ' and a number, got {answer[-30:]!r}: fix it")
    return Item(question=question, answer=answer, reference=reference, thought=answer)


def _judge(problem: Problem, completion: str) -> Score:
    """Compare the strict answer as text, the relaxed one as a number."""
    right, strict, relaxed = problem.reference, marked_number(completion), last_number(completion)
    is_equal = relaxed is not None and Decimal(relaxed) == Decimal(right)
    reason = "" if strict == right and is_equal else "no number after ####" if strict is None else f"{right} is right"
    return Score(float(strict == right), float(is_equal), strict, relaxed, reason)


def _make(split: str) -> list[Row]:
    made = (problem(index, split=split) for index in range(BUILT_IN))
    return [{"question": one.question, "answer": one.solution} for one in made]


RULES = {"gsm8k": {"word": _word, "judge": _judge}, "word_problems": {"word": _word, "judge": _judge, "make": _make}}
