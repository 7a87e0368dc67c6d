"""Plans which examples share a row, from their lengths alone, so that any row of any epoch is known at once.

grain packs a stream (`FirstFitPackIterDataset`): the content of a row depends on all rows before it and on the number
of processes. Here a batch is a function of seed and step, so the plan is made once, from the sizes of all examples.
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

LEVELS = 32  # resolution of free answer positions; doubling it saves 1 % of the rows and takes twice the time


@dataclass(frozen=True)
class PackingPlan:
    """Rows of places; each place is for an example of a fixed size."""

    order: Int[np.ndarray, " n"]  # indices of examples, largest first; equal sizes are neighbours
    sizes: Int[np.ndarray, " n"]  # id of the size of each example in `order`
    places: Int[np.ndarray, " n"]  # indices into `order`, row by row
    starts: Int[np.ndarray, " rows"]  # index in `places` at which each row begins

    def __len__(self) -> int:
        return len(self.starts)

    def deal(self, *seed: int) -> list[Int[np.ndarray, " k"]]:
        """The examples of every row; the seed decides which example takes which place of its size."""
        chance = np.random.default_rng(seed).random(len(self.order))
        dealt = self.order[np.lexsort((chance, self.sizes))]
        return np.split(dealt[self.places], self.starts[1:])


def pack(
    tokens: Int[np.ndarray, " n"], answers: Int[np.ndarray, " n"], *, length: int, answer_length: int
) -> PackingPlan:
    """Make a plan with few rows of `length` and `answer_length`; `tokens` and `answers` are the examples' sizes."""
    order = np.lexsort((answers, tokens, -(tokens / length + answers / answer_length)))
    sizes = np.stack([tokens, answers], axis=1)[order]
    is_other = np.any(np.diff(sizes, axis=0, prepend=-1) != 0, axis=1)
    rows = np.asarray(best_fit(sizes.tolist(), length=length, answer_length=answer_length))
    places = np.argsort(rows, kind="stable")
    starts = np.searchsorted(rows[places], np.arange(rows.max() + 1))
    return PackingPlan(order=order, sizes=np.cumsum(is_other), places=places, starts=starts)


def best_fit(sizes: list[list[int]], *, length: int, answer_length: int) -> list[int]:
    """Assign each (tokens, answer positions), in order, to a row that it nearly fills; returns the row of each.

    Rows are on stacks by their number of free tokens, and stacks on levels by free answer positions. The bits of an
    integer per level say which stacks are not empty. This way, a million examples take seconds.
    """
    unit = -(-answer_length // LEVELS)
    levels = answer_length // unit + 1
    stacks: list[list[list[tuple[int, int]]]] = [[[] for _ in range(length + 1)] for _ in range(levels)]
    filled = [0] * levels
    rows, begun = [], 0
    for tokens, answer in sizes:
        row, left, free = begun, length, answer_length
        for level in range(-(-answer // unit), levels):
            stacks_that_fit = filled[level] >> tokens
            if stacks_that_fit:
                left = tokens + (stacks_that_fit & -stacks_that_fit).bit_length() - 1  # the lowest bit that is set
                stack = stacks[level][left]
                row, free = stack.pop()
                filled[level] ^= (not stack) << left
                break
        else:
            begun += 1
        rows.append(row)
        left, free = left - tokens, free - answer
        stacks[free // unit][left].append((row, free))
        filled[free // unit] |= 1 << left
    return rows
