"""Generates arithmetic word problems with worked solutions: data that needs no download and has no licence.

A problem is a pure function of (seed, index, split). Its story and its numbers decide the split it belongs to, so no
split ever holds the numbers of another in the same story, whatever the seeds and the counts: eight in ten combinations
of numbers are for training, one each for validation and test.
Solutions spell out each step as `a * b = c` and end with the line `#### answer`, as GSM8K's do; answers are integers, 0
or more. A problem takes 90 to 128 tokens in SmolLM2's tokenizer and chat template, 30 to 60 of them for the answer.
"""

import re
import zlib
from dataclasses import dataclass
from random import Random
from typing import Any

from l2d_jax.data.stories import STORIES, tell
from l2d_jax.errors import InputError

SPLITS = ("train", "validation", "test")
WORKINGS = ("sentences", "equations", "answers")  # what a solution shows before its last line; "answers": nothing
STEP = re.compile(r"\d+(?: [-+*/] \d+)+ = \d+")


@dataclass(frozen=True)
class WordProblem:
    """A question, its worked solution that ends with `#### answer`, and that answer."""

    question: str
    solution: str
    answer: int


def problem(index: int, *, seed: int = 0, split: str = "train") -> WordProblem:
    """The problem with this index, from 0; neighbours differ in story. Raises `InputError` for an unknown split."""
    if split not in SPLITS:
        rule = f"the built-in problems have the splits {', '.join(SPLITS)}"
        raise InputError(f"{rule}, not {split!r}: choose one of them")
    story = STORIES[index % len(STORIES)]
    random = Random(f"{seed} {index}")
    while True:
        question, solution = tell(story, random)
        numbers = " ".join(re.findall(r"\d+", question))
        share = zlib.crc32(f"{story.__name__} {numbers}".encode()) % 10
        if {0: "test", 1: "validation"}.get(share, "train") == split:
            answer = int(re.findall(r"\d+", solution)[-1])
            return WordProblem(question, f"{solution}\n#### {answer}", answer)


def conversations(
    count: int, *, seed: int = 0, split: str = "train", working: str = "sentences"
) -> list[dict[str, Any]]:
    """The first `count` problems as rows of two messages; raises `InputError` for a `working` not in `WORKINGS`."""
    if working not in WORKINGS:
        raise InputError(f"the built-in problems have the subsets {', '.join(WORKINGS)}, not {working!r}: choose one")
    rows = []
    for index in range(count):
        made = problem(index, seed=seed, split=split)
        *lines, last = made.solution.splitlines()
        steps = {"sentences": lines, "equations": STEP.findall(made.solution), "answers": []}
        texts = (("user", made.question), ("assistant", "\n".join([*steps[working], last])))
        rows.append({"messages": [{"role": role, "content": content} for role, content in texts]})
    return rows


def marked_number(text: str) -> str | None:
    r"""The number behind the first "#### ", as in GSM8K's solutions and here; None if there is none.

    >>> marked_number("3 * 400 = 1200.\n#### 1,200 apples\n#### 7")
    '1200'
    >>> marked_number("####12") is None
    True
    """
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found[1].replace(",", "") if found else None
