"""Generates chains of letters: pairs such as `B F`, `F K` must be followed from letter to letter, 14 times.

The letters form a circle in random order, so no part of it reveals where the last hop ends. The answer is a letter. The
column `working` has the letter that each hop reaches. A language model that answers directly has one pass for all hops;
a diffusion path has an evaluation for each hop (`config.data.working`).
"""

from random import Random
from string import ascii_uppercase
from typing import Any

from l2d_jax.data.word_problems import check_split, split_of

LETTERS = ascii_uppercase[:20]
HOPS = 14  # a budget of 15: one evaluation for the first letter, and one for each hop
INSTRUCTION = f"Go from letter to letter, {HOPS} times."


def chain_rows(count: int, *, seed: int = 0, split: str = "train") -> list[dict[str, Any]]:
    """`count` chains of a split as rows of messages, with worked steps; raises `InputError` for an unknown split."""
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
