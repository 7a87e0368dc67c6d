"""Generates chains of operations on single digits, to be done from left to right: `7-1-3*2+3`.

The answer is a digit, and so is each result on the way to it, which the column `working` has. A language model that
answers at once has one pass for all operations, a diffusion path has an evaluation for each (`config.data.working`).
"""

from random import Random
from typing import Any

from l2d_jax.data.word_problems import check_split, split_of

OPERATIONS = 14  # what a budget of 15 spends, after the evaluation that reads the first digit
INSTRUCTION = "Calculate from left to right."


def chain_rows(count: int, *, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """`count` chains as rows of messages, with their working; its characters decide the split that a chain belongs to.

    Raises `InputError` for an unknown split.
    """
    check_split(split)
    rows: list[dict[str, Any]] = []
    random = Random(f"{seed} {split}")
    while len(rows) < count:
        text, results = _chain(random)
        if split_of(text) != split:
            continue
        *working, answer = map(str, results)
        said = (("system", INSTRUCTION), ("user", text), ("assistant", answer))
        messages = [{"role": role, "content": content} for role, content in said]
        rows.append({"messages": messages, "working": working})
    return rows


def _chain(random: Random) -> tuple[str, list[int]]:
    """A chain, and its first digit with the result of every operation, all of them digits."""
    result = random.randint(1, 9)
    text, results = str(result), [result]
    for _ in range(OPERATIONS):
        possible = {
            "+": range(1, 10 - result),
            "-": range(1, result + 1),
            "*": range(2, 9 // result + 1) if result else (),
        }
        sign = random.choice([sign for sign, digits in possible.items() if digits])
        digit = random.choice(possible[sign])
        result = {"+": result + digit, "-": result - digit, "*": result * digit}[sign]
        text, results = f"{text}{sign}{digit}", [*results, result]
    return text, results
