"""Generates arithmetic word problems with worked solutions: data that needs no download and has no licence.

A problem is a pure function of (seed, index, split). Its story and its numbers decide to which split it belongs. So no
two splits share a combination of story and numbers, whatever the seeds and counts. Eight in ten combinations of numbers
are for training, one each for validation and test.
`word_problems.toml` has the stories: their texts, their numbers, and the names and nouns in them.
Solutions write each step as `a * b = c` and end with the line `#### answer`, like GSM8K's. Answers are integers, 0 or
more. A problem takes 90 to 128 tokens in SmolLM2's tokenizer and chat template, 30 to 60 of them for the answer.
"""

import re
import zlib
from dataclasses import dataclass
from functools import cache, partial
from random import Random
from typing import Any

from l2d_jax.errors import require
from l2d_jax.files import package_table

TABLE = "data/word_problems.toml"
STORIES = tuple(name for name in package_table(TABLE) if name != "words")
NOUNS = ("thing", "fruit", "bake", "good", "place", "ride")
SPLITS = ("train", "validation", "test")
WORKINGS = ("sentences", "equations", "answers")  # what a solution shows before its last line; "answers": nothing
STEP = re.compile(r"\d+(?: [-+*/] \d+)+ = \d+")


@dataclass(frozen=True)
class WordProblem:
    """A question, a worked solution that ends with `#### answer`, and the answer."""

    question: str
    solution: str
    answer: int


def problem(index: int, *, seed: int = 0, split: str = "train") -> WordProblem:
    """The problem with this index; neighbours have different stories. Raises `InputError` for an unknown split."""
    check_split(split)
    story = STORIES[index % len(STORIES)]
    random = Random(f"{seed} {index}")
    while True:
        question, solution = _tell(story, random)
        numbers = " ".join(re.findall(r"\d+", question))
        if split_of(f"_{story} {numbers}") == split:
            answer = int(re.findall(r"\d+", solution)[-1])
            return WordProblem(question, f"{solution}\n#### {answer}", answer)


def check_split(split: str) -> None:
    """Raise `InputError` for an unknown split."""
    rule = f"the built-in problems have the splits {', '.join(SPLITS)}"
    require(split in SPLITS, f"{rule}, not {split!r}: choose one of them")


def split_of(text: str) -> str:
    """The split to which a problem with this text belongs."""
    return {0: "test", 1: "validation"}.get(zlib.crc32(text.encode()) % 10, "train")


def _tell(story: str, r: Random) -> tuple[str, str]:
    """Sample a question of a story, and its solution, whose last number is the answer."""
    texts, words = package_table(TABLE)[story], package_table(TABLE)["words"]
    they = r.choice(("she", "he"))
    name = r.choice(words[they].split())
    friend = r.choice([other for other in f"{words['she']} {words['he']}".split() if other != name])
    filled = {"name": name, "they": they, "They": they.title(), "friend": friend}
    filled |= {noun: r.choice(words[noun].split()) for noun in NOUNS}
    numbers: dict[str, Any] = {"r": r.randint}
    for number, formula in texts["numbers"].items():
        numbers[number] = eval(_compiled(formula), numbers)
    return texts["question"].format_map(filled | numbers), texts["solution"].format_map(filled | numbers)


_compiled = cache(partial(compile, filename=TABLE, mode="eval"))


def conversations(
    count: int, *, seed: int = 0, split: str = "train", working: str = "sentences"
) -> list[dict[str, Any]]:
    """The first `count` problems as rows of two messages; raises `InputError` for a `working` not in `WORKINGS`."""
    rule = f"the built-in problems have the subsets {', '.join(WORKINGS)} and chains"
    require(working in WORKINGS, f"{rule}, not {working!r}: choose one")
    rows = []
    for index in range(count):
        made = problem(index, seed=seed, split=split)
        *lines, last = made.solution.splitlines()
        steps = {"sentences": lines, "equations": STEP.findall(made.solution), "answers": []}
        texts = (("user", made.question), ("assistant", "\n".join([*steps[working], last])))
        rows.append({"messages": [{"role": role, "content": content} for role, content in texts]})
    return rows


def marked_number(text: str) -> str | None:
    r"""The number after the first "#### ", as in GSM8K's solutions and here; None if there is none.

    >>> marked_number("3 * 400 = 1200.\n#### 1,200 apples\n#### 7")
    '1200'
    >>> marked_number("####12") is None
    True
    """
    found = re.search(r"#### (-?[0-9.,]+)", text)
    return found[1].replace(",", "") if found else None


def final_answer(text: str) -> str | None:
    r"""The marked number, else the word after the first "#### ", else the whole answer if it is a single word.

    >>> final_answer("7"), final_answer("7 apples"), final_answer("K, B\n#### F"), final_answer("#### 1,200cm")
    ('7', None, 'F', '1200')
    """
    found = re.search(r"#### (\S+)", text) or re.fullmatch(r"\s*(\S+)\s*", text)
    return marked_number(text) or (found[1].replace(",", "") if found else None)
