r"""The built-in word problems (`data/word_problems`), asked as in training and scored as GSM8K's; nothing is read.

user       Tom has 3 bags of 4 apples. How many apples has he?
assistant  Tom has 3 * 4 = 12 apples.\n#### 12
"""

from dataclasses import replace

from l2d_jax.data.word_problems import SPLITS, problem
from l2d_jax.evaluation.tasks.gsm8k import GSM8K
from l2d_jax.evaluation.tasks.problem import Row, TaskSampling

ROWS = 1000  # of each split


def _make(split: str) -> list[Row]:
    made = (problem(index, split=split) for index in range(ROWS))
    return [{"question": one.question, "answer": one.solution} for one in made]


WORD_PROBLEMS = replace(
    GSM8K,
    name="word_problems",
    hub="",
    subset=None,
    make=_make,
    rows=dict.fromkeys(SPLITS, ROWS),
    shots=0,
    sampling=TaskSampling(max_new_tokens=128, temperature=0.0),
)
