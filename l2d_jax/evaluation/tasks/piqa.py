r"""PIQA: which of two ways reaches a goal in the physical world (Bisk et al., 2020).

    user       Goal:\nKeep soup warm.\nOptions:\nA. Put it into a thermos.\nB. Put it into a sieve.\n\nAnswer:
    assistant  A

The hub's main branch holds a script, which `datasets` no longer runs: rows come from its own conversion to Parquet.
The test split has no answers, so the validation split is scored.
"""

from l2d_jax.evaluation.tasks import multiple_choice
from l2d_jax.evaluation.tasks.problem import Item, Row, text_of
from l2d_jax.evaluation.tasks.task import Task


def _word(row: Row) -> Item:
    goal, *options = (text_of(row, column) for column in ("goal", "sol1", "sol2"))
    return multiple_choice.worded(goal, options, answer=row["label"], heads=("Goal", "Options"))


PIQA = Task(
    name="piqa",
    hub="ybisk/piqa",
    revision="refs/convert/parquet",
    columns=("goal", "sol1", "sol2", "label"),
    split="validation",
    shot_split="train",
    rows={"train": 16113, "validation": 1838, "test": 3084},
    word=_word,
    judge=multiple_choice.judge_letter,
)
