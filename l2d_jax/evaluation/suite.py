"""Suites: several tasks in one command, the rows they need, and the means of their categories.

`suites.toml` names the tasks of each suite by category. The score of a task is its strict accuracy, which follows the
rules of the authors' release. For programs this is pass@1, estimated from all samples of a problem.
"""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from l2d_jax.data.rows import find_files
from l2d_jax.errors import LONGEST_LINE, InputError, require, shorten
from l2d_jax.evaluation.tasks.task import Task
from l2d_jax.files import package_table
from l2d_jax.statistics import Rate, mean_of_rates

SUITE = "suite.json"  # file in the results folder: the suite's table
MAIN = "paper"  # the suite whose tasks count in the mean
MEAN = "mean"  # name of that mean


def task_categories() -> dict[str, list[str]]:
    """The tasks of each category of all suites, in the order of the tables."""
    suites: dict[str, dict[str, list[str]]] = package_table("evaluation/suites.toml")
    return {category: tasks for suite in suites.values() for category, tasks in suite.items()}


def averages() -> dict[str, list[str]]:
    """The tasks of each mean of the table: of every category, and of the paper's main table."""
    main = package_table("evaluation/suites.toml")[MAIN]
    return task_categories() | {MEAN: [task for tasks in main.values() for task in tasks]}


def suite_scores(rates: Mapping[str, Rate]) -> dict[str, Rate]:
    """The scores of tasks, then the means of the categories of which every task has a score.

    The tasks of a mean have equal weights. Their problems are independent, which the interval of the mean assumes.
    """
    complete = {name: tasks for name, tasks in averages().items() if rates.keys() >= set(tasks)}
    return {**rates} | {name: mean_of_rates([rates[task] for task in tasks]) for name, tasks in complete.items()}


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
