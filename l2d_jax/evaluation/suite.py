"""Suites: several tasks in one command, and the means of their categories.

`suites.toml` names the tasks of each suite by category. The score of a task is its strict accuracy, which follows the
rules of the authors' release. For programs this is pass@1, estimated from all samples of a problem.
"""

from collections.abc import Mapping

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


def complete_averages(scored: Mapping[str, object]) -> dict[str, list[str]]:
    """The means of which every task has a score, with their tasks; the keys of `scored` are the tasks with scores."""
    return {name: tasks for name, tasks in averages().items() if scored.keys() >= set(tasks)}


def suite_scores(rates: Mapping[str, Rate]) -> dict[str, Rate]:
    """The scores of tasks, then the means of the categories of which every task has a score.

    The tasks of a mean have equal weights. Their problems are independent, which the interval of the mean assumes.
    """
    means = complete_averages(rates)
    return {**rates} | {name: mean_of_rates([rates[task] for task in tasks]) for name, tasks in means.items()}
