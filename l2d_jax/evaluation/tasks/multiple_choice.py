r"""Multiple-choice questions: MMLU, MMLU-Pro, PIQA and ARC, and the letter that a completion chooses.

    user       Question:\nWhat is 2 + 2?\nChoices:\nA. 3\nB. 4\nC. 5\nD. 6\n\nAnswer:
    assistant  B

The strict rule is the release's: the first option letter that is not followed by a letter or digit, anywhere, even at
the end of a word ("B" in "the GLOB of dust"). The relaxed rule looks for what the text calls its answer.
"""

import re
from collections.abc import Sequence
from typing import Any

from l2d_jax.errors import InputError, require
from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, Score, text_of, texts_of

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
    r"""Write a question in the release's wording; `answer` is the index of the right option.

    >>> worded("Which is red?", ["blood", "snow"], answer=0).question
    'Question:\nWhich is red?\nChoices:\nA. blood\nB. snow\n\nAnswer:'
    """
    count, most = len(options), len(LETTERS)
    require(count <= most, f"a question has at most {most} options, A to J, but here are {count}: shorten it")
    if not isinstance(answer, int) or isinstance(answer, bool) or not 0 <= answer < count:
        raise InputError(f"the answer must be the number of an option, 0 to {count - 1}, got {answer!r}: fix it")
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
    """The letter that the relaxed rule finds: the last one that the text calls its answer, else a letter alone.

    >>> named_letter("A cat is no fish, so the answer is (C).", "ABCD"), named_letter("b", "ABCD")
    ('C', 'B')
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
    # "A" and "I" are also words: at the start a letter counts only before a punctuation mark, elsewhere in brackets.
    found = re.findall(rf"^\W*{label}(?:[).:,*\]]|\s*$|\s*\n)", completion)
    found = found or re.findall(rf"[(\[]{label}[)\]]", completion)
    return str(found[-1]) if found else None


def judge_letter(problem: Problem, completion: str) -> Score:
    """Compare both letters with the right one; `problem.reference` has that letter, then the texts of the options."""
    right, *options = problem.reference
    strict = first_letter(completion, problem.options)
    relaxed = named_letter(completion, problem.options, options)
    reason = "" if strict == relaxed == right else "no letter" if strict is None else f"{right} is right"
    return Score(float(strict == right), float(relaxed == right), strict, relaxed, reason)


# Classes for guidance as in the release's tasks/constants.py; all other subjects are general knowledge.
MATHEMATICS = ("abstract_algebra", "college_mathematics", "elementary_mathematics", "high_school_mathematics")
SUBJECTS = dict.fromkeys((*MATHEMATICS, "high_school_statistics"), "math") | {"high_school_computer_science": "coding"}


def _word_mmlu(row: Row) -> Item:
    subject = text_of(row, "subject")
    item = worded(text_of(row, "question"), texts_of(row, "choices"), answer=row["answer"])
    return item._replace(subject=subject, category=SUBJECTS.get(subject))


def _word_mmlu_pro(row: Row) -> Item:
    question, options, subject = text_of(row, "question"), texts_of(row, "options"), text_of(row, "category")
    thought = text_of(row, "cot_content").removeprefix("A: ") or None
    item = worded(question, options, answer=row["answer_index"], end="")
    return item._replace(subject=subject, category="math" if subject == "math" else None, thought=thought)


def _word_piqa(row: Row) -> Item:
    goal, *options = (text_of(row, column) for column in ("goal", "sol1", "sol2"))
    return worded(goal, options, answer=row["label"], heads=("Goal", "Options"))


def _word_arc(row: Row) -> Item:
    given: Any = row["choices"]
    if not (isinstance(given, dict) and {"label", "text"} <= given.keys()):
        raise InputError(f"'choices' must hold the lists 'label' and 'text', got {given!r:.60}")
    labels, options = texts_of(given, "label"), texts_of(given, "text")
    if len(labels) != len(options) or not all(len(label) == 1 and label.isalnum() for label in labels):
        raise InputError(f"each option needs a label of one character, got {labels} for {len(options)} options")
    right = text_of(row, "answerKey")
    require(right in labels, f"the answer must be one of the labels {', '.join(labels)}, got {right!r}: fix it")
    return worded(text_of(row, "question"), options, answer=labels.index(right), labels=labels)


_WORDINGS = {"mmlu": _word_mmlu, "mmlu_pro": _word_mmlu_pro, "piqa": _word_piqa}
_WORDINGS |= dict.fromkeys(("arc_easy", "arc_challenge"), _word_arc)
RULES = {name: {"word": word, "judge": judge_letter} for name, word in _WORDINGS.items()}
