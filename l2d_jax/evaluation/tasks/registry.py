"""The tasks by their names.

>>> find_task("gsm8k").size
1319
"""

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks.code import HUMANEVAL, INSTRUCT_HUMANEVAL, MBPP
from l2d_jax.evaluation.tasks.gsm8k import GSM8K, WORD_PROBLEMS
from l2d_jax.evaluation.tasks.math import MATH
from l2d_jax.evaluation.tasks.multiple_choice import ARC_CHALLENGE, ARC_EASY, MMLU, MMLU_PRO, PIQA
from l2d_jax.evaluation.tasks.task import Task

PAPER = (GSM8K, MATH, INSTRUCT_HUMANEVAL, MBPP, MMLU, MMLU_PRO, PIQA, ARC_EASY, ARC_CHALLENGE)  # in its order
TASKS = {task.name: task for task in (*PAPER, HUMANEVAL, WORD_PROBLEMS)}


def find_task(name: str) -> Task:
    """The task of this name; `InputError` where there is none."""
    if name not in TASKS:
        raise InputError(f"unknown task {name!r}{nearest(name, TASKS)}")
    return TASKS[name]
