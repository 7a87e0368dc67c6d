"""Looks for the rows of all tasks before any is read."""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path

from l2d_jax.data.rows import find_files
from l2d_jax.errors import LONGEST_LINE, InputError, require, shorten
from l2d_jax.evaluation.tasks.task import Task


def require_rows(tasks: Sequence[Task], options: Namespace) -> None:
    """Look for the files of all tasks in `--data_dir`, before any is read.

    Raises one `InputError` that names every task that lacks a split, and where the splits belong.
    """
    if options.data_dir is None:
        return
    lacking: dict[str, list[str]] = {}
    errors = []
    for task in tasks:
        for split in _splits(task, options):
            try:
                find_files(Path(options.data_dir, task.name), split)
            except InputError as error:
                lacking.setdefault(task.name, []).append(split)
                errors.append(error)
    if len(lacking) == 1:
        raise errors[0]
    named = ", ".join(f"{name} ({' '.join(splits)})" for name, splits in lacking.items())
    rule = f"lacks rows of {named}: put them there, as TASK/SPLIT.jsonl"
    room = LONGEST_LINE - len(f"error:  {rule}")  # for the folder, so that no task is cut off
    require(not lacking, f"{shorten(options.data_dir, max(20, room))} {rule}")


def _splits(task: Task, options: Namespace) -> list[str]:
    """The splits that a task reads: that of its examples, if it has examples, and that of its problems."""
    if task.make is not None:
        return []
    usual = task.shots if options.prompts == "paper" else task.thought_shots
    has_examples = (usual if options.shots is None else options.shots) > 0
    return list(dict.fromkeys([*([task.shot_split] if has_examples else []), options.split or task.split]))
