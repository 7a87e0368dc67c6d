"""The held-out part of a task: its own, or that of another task of its category."""

from argparse import Namespace

import pytest

from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.evaluation.held_out import NoHeldOutError, find_held_out
from l2d_jax.evaluation.tasks.task import find_task
from tests.support.task_rows import split_rows, varied, write


def test_a_task_without_one_takes_that_of_its_category(tmp_path):
    split_rows(tmp_path, "humaneval")
    split_rows(tmp_path, "mbpp")
    data = write(tmp_path, "mbpp", "validation", [varied("mbpp", number) for number in range(50, 54)])
    options = Namespace(data_dir=data, split=None, shots=1, prompts="paper", tune_problems=3)
    humaneval, mbpp = find_task("humaneval"), find_task("mbpp")
    for task in (humaneval, mbpp):
        lender, split, problems = find_held_out(task, [humaneval, mbpp], options, {"coding"}, byte_tokenizer())
        assert (lender, split, len(problems)) == (mbpp, "validation", 3)
    with pytest.raises(NoHeldOutError, match="humaneval has no held-out part for --tune"):
        find_held_out(humaneval, [humaneval, find_task("gsm8k")], options, {"coding"}, byte_tokenizer())
