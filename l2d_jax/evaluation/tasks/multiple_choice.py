"""Multiple-choice questions: their wording, and the letter that a completion chooses.

The strict rule is the release's: the first of the letters that no letter or digit follows, wherever it stands, even at
the end of a word ("B" in "the GLOB of dust"). The relaxed rule looks for what the text calls its answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks.problem import Item, Problem, Score

LETTERS = "ABCDEFGHIJ"
REQUEST = '\nThink step by step. Then end with the sentence "The answer is (X).", where X is the letter of your choice.'


def worded(
    question: str,
    options: Sequence[str],
    *,
    answer: Any,
    labels: Sequence[str] = LETTERS,
    heads: tuple[str, str] = ("Question", "Choices"),
    end: str = "\nAnswer:",
) -> Item:
    r"""A question in the release's wording, with a heading above it and another above its options.

    `answer` is the number of the right option, from 0. Raises `InputError` where there is no such option, and for more
    than ten options.

    >>> worded("Which is red?", ["blood", "snow"], answer=0).question
    'Question:\nWhich is red?\nChoices:\nA. blood\nB. snow\n\nAnswer:'
    """
    count = len(options)
    if count > len(LETTERS):
        raise InputError(f"a question has at most {len(LETTERS)} options, A to J, but here are {count}: shorten it")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < count:
        raise InputError(f"the answer must be the number of an option, 0 to {count - 1}, got {answer!r}: mend it")
    letters = tuple(labels[:count])
    lines = "".join(f"{letter}. {option}\n" for letter, option in zip(letters, options, strict=True))
    text, right = f"{heads[0]}:\n{question}\n{heads[1]}:\n{lines}", letters[answer]
    return Item(text + end, right, (right, *options), options=letters, request=text + REQUEST)


def first_letter(completion: str, labels: Sequence[str]) -> str | None:
    """The letter that the strict rule finds, or None.

    >>> first_letter("(B) is right, not A.", "ABCD")
    'B'
    >>> first_letter("GLOB", "ABCD")
    'B'
    >>> first_letter("Because", "ABCD") is None
    True
    """
    found = re.search(f"([{''.join(labels)}])(?:[^a-zA-Z0-9]|$)", completion)
    return found[1] if found else None


def named_letter(completion: str, labels: Sequence[str], options: Sequence[str] = ()) -> str | None:
    """The letter that the relaxed rule finds: the last that the text calls its answer, else one on its own.

    >>> named_letter("A cat is no fish, so the answer is (C).", "ABCD")
    'C'
    >>> named_letter("b", "ABCD")
    'B'
    >>> named_letter("Snow.", "AB", ["blood", "snow"])
    'B'
    """
    labels = tuple(labels)
    label = f"([{''.join(labels)}])"
    called = rf"(?i:\banswer)(?i:\s+is|\s*:)*[\s:*]*(?:\\boxed\{{|\\text\{{|[(\[*\"'])*{label}(?![a-zA-Z0-9])"
    boxed = rf"\\boxed\{{\s*(?:\\text\w*\{{)?[( ]*{label}[) ]*\}}"
    for pattern in (called, boxed):
        if found := re.findall(pattern, completion):
            return str(found[-1])
    text = completion.strip().strip("()[]*.:\"' ")
    if text.upper() in labels:
        return text.upper()
    for name, option in zip(labels, options, strict=False):
        if text.casefold() == option.strip().strip(".").casefold():
            return name
    # "A" and "I" are words, too: at the start a letter counts only before a sign, elsewhere only within brackets.
    found = re.findall(rf"^\W*{label}(?:[).:,*\]]|\s*$|\s*\n)", completion) or re.findall(
        rf"[(\[]{label}[)\]]", completion
    )
    return str(found[-1]) if found else None


def judge_letter(problem: Problem, completion: str) -> Score:
    """Compare both letters with the right one; `problem.reference` holds that letter, then the texts of the options."""
    right, *options = problem.reference
    strict = first_letter(completion, problem.options)
    relaxed = named_letter(completion, problem.options, options)
    reason = "" if strict == relaxed == right else "no letter" if strict is None else f"{right} is right"
    return Score(float(strict == right), float(relaxed == right), strict, relaxed, reason)
