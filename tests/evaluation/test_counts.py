"""How many problems a task has, next to the paper's number."""

from argparse import Namespace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.evaluation.plan import count_problems
from l2d_jax.evaluation.tasks.counts import ProblemCounts, is_papers_tokenizer
from l2d_jax.evaluation.tasks.task import TASKS, encode_problems, find_task
from tests.support.task_rows import split_rows

PLAIN = {"limit": None, "split": None, "shots": None, "prompts": "paper"}


def words(ids: dict[str, int]) -> PreTrainedTokenizerFast:
    """A tokenizer with these tokens."""
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unk>")))


LLAMA, QWEN = words({"<|eot_id|>": 128009}), words({"<|im_end|>": 151645})


def test_the_papers_numbers_are_those_of_four_tasks() -> None:
    known = {name: task.papers for name, task in TASKS.items() if task.papers is not None}
    assert known == {"math": 4347, "mbpp": 499, "mmlu": 13666, "mmlu_pro": 11955}
    for name, number in known.items():
        task = TASKS[name]
        assert number < task.rows[task.split]


def test_the_papers_tokenizers_are_known_by_their_ends_of_turn() -> None:
    assert is_papers_tokenizer(LLAMA)
    assert is_papers_tokenizer(QWEN)
    assert not is_papers_tokenizer(words({"<|im_end|>": 2}))  # SmolLM2
    assert not is_papers_tokenizer(words({"<|im_end|>": 151645, "<think>": 151667}))  # Qwen 3
    assert not is_papers_tokenizer(byte_tokenizer())


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (ProblemCounts(8, 1), "8 problems, 1 dropped for their length"),
        (ProblemCounts(499, 0, 499), "499 problems, 0 dropped for their length, as many as in the paper"),
        (
            ProblemCounts(498, 1, 499),
            "498 problems, 1 dropped for their length, not the paper's 499: the rows, the tokenizer or its chat "
            "template are not the same",
        ),
        (
            ProblemCounts(499, 0, 499, "--limit 499"),
            "499 problems, 0 dropped for their length, the paper has 499, which is not compared: --limit 499",
        ),
    ],
)
def test_a_line_says_how_many_there_are_and_how_many_the_paper_has(counts: ProblemCounts, line: str) -> None:
    assert str(counts) == line
    assert counts.record()["problems"] == counts.kept
    assert (counts.record()["comparison"] or "") == counts.verdict


@pytest.mark.parametrize(
    ("tokenizer", "options", "reason"),
    [
        (QWEN, {}, ""),
        (LLAMA, {"split": "test", "shots": 5}, ""),  # the task's own
        (LLAMA, {"limit": 2}, "--limit 2"),
        (LLAMA, {"split": "dev", "shots": 0, "prompts": "thoughts"}, "--split dev, --shots 0, --prompts thoughts"),
        (byte_tokenizer(), {"limit": 2}, "--limit 2, another tokenizer"),
    ],
)
def test_a_count_is_compared_only_where_it_can_be_the_papers(tokenizer, options, reason, tmp_path: Path) -> None:
    task = find_task("mmlu")
    problems = task.load(split_rows(tmp_path, "mmlu"), shots=1)
    encoded = encode_problems(problems, byte_tokenizer())
    counts = count_problems(task, problems, encoded, tokenizer, Namespace(**PLAIN | options))
    assert counts == ProblemCounts(3, 0, 13666, reason)
    assert counts.record() == {"problems": 3, "too long": 0, "paper": 13666, "comparison": counts.verdict}
