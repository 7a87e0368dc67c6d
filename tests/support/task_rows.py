"""Made-up rows of every evaluation task, and folders of them as `--data_dir` takes them."""

import json
from pathlib import Path
from typing import Any

from l2d_jax.evaluation.tasks.task import TASKS

ROWS: dict[str, dict[str, Any]] = {
    "gsm8k": {"question": "1 + 1?", "answer": "It is <<1+1=2>>2.\n#### 2"},
    "math": {"problem": "$1 + 1$?", "solution": "$\\boxed{2}$", "type": "Algebra", "level": "Level 1"},
    "mmlu": {"question": "1 + 1?", "choices": ["1", "2", "3", "4"], "answer": 1, "subject": "anatomy"},
    "mmlu_pro": {
        "question": "1 + 1?",
        "options": [str(number) for number in range(10)],
        "answer_index": 2,
        "category": "math",
        "cot_content": "A: Let's think step by step. It is 2. The answer is (C).",
    },
    "piqa": {"goal": "Eat soup.", "sol1": "Use a fork.", "sol2": "Use a spoon.", "label": 1},
    "arc_easy": {"question": "1 + 1?", "choices": {"text": ["1", "2"], "label": ["1", "2"]}, "answerKey": "2"},
    "arc_challenge": {"question": "1 + 1?", "choices": {"text": ["1", "2"], "label": ["A", "B"]}, "answerKey": "B"},
    "mbpp": {
        "task_id": 7,
        "text": "Add one.",
        "code": "import sys\r\ndef inc(x):\r\n    return x + 1",
        "test_list": ["assert inc(1) == 2", "assert inc(2) == 3"],
    },
    "humaneval": {
        "task_id": "HumanEval/9",
        "prompt": 'import re\n\n\ndef inc(x):\n    """Add one."""\n',
        "canonical_solution": "    return x + 1\n",
        "entry_point": "inc",
        "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    },
}
ROWS["instructhumaneval"] = ROWS["humaneval"] | {"instruction": "Write inc.", "context": "import re\n\n\ndef inc(x):\n"}
VARIED = {"gsm8k": "question", "math": "problem", "piqa": "goal", "mbpp": "text"}  # the column that a question is in


def varied(name: str, number: int) -> dict[str, Any]:
    """A row like that of ROWS, whose question ends with a number."""
    column = VARIED.get(name, "prompt" if "humaneval" in name else "question")
    row = ROWS[name] | {column: f"{ROWS[name][column]} {number}"}
    return row | {"instruction": f"Write inc. {number}"} if "instruction" in row else row


def write(folder: Path, name: str, split: str, rows: list[dict[str, Any]]) -> str:
    """Put rows where `--data_dir` finds them, and return that."""
    file = folder / name / f"{split}.jsonl"
    file.parent.mkdir(exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


READ = [name for name, task in TASKS.items() if task.make is None]  # whose rows come from files or the hub


def split_rows(folder: Path, name: str, *, examples: int = 6, scored: int = 3) -> str:
    """The two splits of a task, or its one."""
    task = TASKS[name]
    write(folder, name, task.split, [varied(name, 100 + number) for number in range(scored)])
    if task.shot_split == task.split:
        examples += scored
    return write(folder, name, task.shot_split, [varied(name, number) for number in range(examples)])
