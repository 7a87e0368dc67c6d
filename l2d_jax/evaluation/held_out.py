"""The held-out part of a task, and the options that `evaluate --tune` chooses on it.

The held-out part comes from a split that is not scored, without the rows that serve as examples. Options are chosen for
each category of problems. The grids are small, because a few dozen problems tell only large differences apart.
"""

import itertools
from argparse import Namespace
from collections.abc import Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.choices import TUNED_PROBLEMS
from l2d_jax.data.rows import splits_in
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Problem
from l2d_jax.evaluation.tasks.task import Task, encode_problems
from l2d_jax.files import digest

Part = Literal["guidance", "search"]
SPLITS = ("validation", "dev", "train")  # splits that may be held out; the first that a task has is used
STRENGTHS = (1.0, 0.5, 1.5, 2.0, 2.5, 3.0)  # of guidance; the paper's largest is 3
# Of a token search. The first values are the defaults, to which ties go.
SCORINGS = {"length_power": (1.0, 0.5, 0.0), "repetition_penalty": (0.0, 1.0)}
TEMPERATURES = (0.0, 0.1, 1.0)  # for sampling among the final beams: the same searches serve all of them


class HeldOut(NamedTuple):
    """The problems on which options are chosen."""

    parts: Sequence[Part]  # what is chosen, in this order
    task: Task  # the task whose problems these are: that of the plan, or another one of its category
    split: str
    problems: Sequence[EncodedProblem]

    def grid(self, part: Part) -> list[dict[str, float]]:
        """The values of the options that a run of the problems can have; the defaults come first."""
        if part == "guidance":
            return [{"guidance": strength} for strength in STRENGTHS]
        return [dict(zip(SCORINGS, values, strict=True)) for values in itertools.product(*SCORINGS.values())]

    def record(self) -> dict[str, Any]:
        """What determines the choice, as JSON."""
        grids: dict[str, Any] = {"guidance": {"guidance": list(STRENGTHS)}}
        grids["search"] = {name: list(values) for name, values in SCORINGS.items()}
        grids["search"]["final_temperature"] = list(TEMPERATURES)
        about = {"task": self.task.name, "split": self.split, "problems": len(self.problems), "digest": self.digest}
        return about | {"grid": {name: values for part in self.parts for name, values in grids[part].items()}}

    @property
    def digest(self) -> str:
        """Hash of the problems and their prompts."""
        return digest([[one.problem._asdict(), one.ids] for one in self.problems])


class NoHeldOutError(InputError):
    """A task has no problems on which options could be chosen."""


def find_held_out(
    task: Task,
    tasks: Sequence[Task],
    options: Namespace,
    categories: Collection[str],
    tokenizer: PreTrainedTokenizerFast,
) -> tuple[Task, str, list[EncodedProblem]]:
    """The held-out problems of a task, or of the first of `tasks` in its category that has some.

    Returns the task that has them, their split, and the problems. Raises `InputError` if there are none.
    """
    lacking: list[NoHeldOutError] = []
    for one in (task, *(other for other in tasks if other is not task and other.category == task.category)):
        try:
            return one, *read_held_out(one, options, categories, tokenizer)
        except NoHeldOutError as error:
            lacking.append(error)
    raise lacking[0]


def read_held_out(
    task: Task, options: Namespace, categories: Collection[str], tokenizer: PreTrainedTokenizerFast
) -> tuple[str, list[EncodedProblem]]:
    """Read the held-out problems of a task, and the name of their split: some of each category, evenly spaced.

    Raises `NoHeldOutError` if the task has no held-out part, and `InputError` if it lacks one of the categories.
    """
    scored, folder = options.split or task.split, Path(options.data_dir or "", task.name)
    is_local = options.data_dir is not None and task.make is None
    there = splits_in(folder) if is_local else task.rows
    for split in SPLITS:
        if split == scored or split not in there:
            continue
        read = partial(task.load, options.data_dir, split=split, shots=options.shots, prompts=options.prompts)
        try:
            problems = processes.take_turns(read)
        except InputError:
            if split != task.shot_split:
                raise
            continue  # all of its rows are examples
        count = options.tune_problems or TUNED_PROBLEMS
        groups = {name: [one for one in problems if one.category == name] for name in sorted(categories)}
        found = encode_problems([one for group in groups.values() for one in _spaced(group, count)], tokenizer)
        for name in groups.keys() - {one.problem.category for one in found}:
            raise InputError(f"--tune finds no problem of category {name} in {task.name}/{split}: leave --tune out")
        return split, found
    where = f"files of another split in {folder}" if is_local else "another split"
    rule = f"{task.name} has no held-out part for --tune: it needs {where}, {', '.join(SPLITS[:-1])} or {SPLITS[-1]}"
    remedy = "Leave --tune out, or evaluate it with another task of its category"
    raise NoHeldOutError(f"{rule}, with rows that are neither scored nor examples. {remedy}")


def _spaced(problems: Sequence[Problem], count: int) -> list[Problem]:
    """At most `count` of the problems, evenly spaced."""
    count = min(count, len(problems))
    return [problems[index * len(problems) // count] for index in range(count)]
