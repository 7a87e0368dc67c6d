"""The tasks by their names.

>>> find_task("gsm8k").size
1319
"""

from typing import Any

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks import code, gsm8k, math, multiple_choice
from l2d_jax.evaluation.tasks.problem import TaskSampling
from l2d_jax.evaluation.tasks.task import Task
from l2d_jax.files import package_table

RULES: dict[str, dict[str, Any]] = {**gsm8k.RULES, **math.RULES, **code.RULES, **multiple_choice.RULES}
TASKS = {
    name: Task(name, **RULES[name], **facts | {"sampling": TaskSampling(**facts.get("sampling", {}))})
    for name, facts in package_table("evaluation/tasks/tasks.toml").items()
}


def find_task(name: str) -> Task:
    """The task of this name; `InputError` where there is none."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]
