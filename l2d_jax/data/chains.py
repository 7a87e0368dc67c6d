"""Generates pairs of letters to be followed, `B F`, `F K`, ...: from one letter to the next, 14 times.

The letters are a circle in random order, so that no part of it says where the last hop ends. The answer is a letter,
and so is what each hop finds on the way to it, which the column `working` has. A language model that answers at once
has one pass for all hops, a diffusion path has an evaluation for each (`config.data.working`).
"""

from random import Random
from string import ascii_uppercase
from typing import Any

from l2d_jax.data.word_problems import check_split, split_of

LETTERS = ascii_uppercase[:20]
HOPS = 14  # what a budget of 15 spends, after the evaluation that reads the first letter
INSTRUCTION = f"Go from letter to letter, {HOPS} times."


def chain_rows(count: int, *, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """`count` chains of a split as rows of messages, with their working; `InputError` for an unknown split."""
    check_split(split)
    rows: list[dict[str, Any]] = []
    random = Random(f"{seed} {split}")
    while len(rows) < count:
        circle = random.sample(LETTERS, len(LETTERS))
        pairs = [f"{letter} {circle[place - 1]}" for place, letter in enumerate(circle)]
        random.shuffle(pairs)
        text = "\n".join([*pairs, f"from {circle[0]}"])
        if split_of(text) != split:
            continue
        *working, answer = [circle[-hop] for hop in range(HOPS + 1)]
        said = (("system", INSTRUCTION), ("user", text), ("assistant", answer))
        rows.append({"messages": [{"role": role, "content": content} for role, content in said], "working": working})
    return rows
