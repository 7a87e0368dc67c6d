r"""ARC-Easy and ARC-Challenge: science questions from school exams (Clark et al., 2018).

    user       Question:\nWhich is a star?\nChoices:\nA. Mars\nB. the Sun\n\nAnswer:
    assistant  B

Some questions number their options, and the labels stay as they are.
"""

from dataclasses import replace
from typing import Any

from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks import multiple_choice
from l2d_jax.evaluation.tasks.problem import Item, Row, text_of, texts_of
from l2d_jax.evaluation.tasks.task import Task


def _word(row: Row) -> Item:
    given: Any = row["choices"]
    if not (isinstance(given, dict) and {"label", "text"} <= given.keys()):
        raise InputError(f"'choices' must hold the lists 'label' and 'text', got {given!r:.60}")
    labels, options = texts_of(given, "label"), texts_of(given, "text")
    if len(labels) != len(options) or not all(len(label) == 1 and label.isalnum() for label in labels):
        raise InputError(f"each option needs a label of one character, got {labels} for {len(options)} options")
    right = text_of(row, "answerKey")
    if right not in labels:
        raise InputError(f"the answer must be one of the labels {', '.join(labels)}, got {right!r}: mend it")
    return multiple_choice.worded(text_of(row, "question"), options, answer=labels.index(right), labels=labels)


ARC_EASY = Task(
    name="arc_easy",
    hub="allenai/ai2_arc",
    subset="ARC-Easy",
    columns=("question", "choices", "answerKey"),
    shot_split="validation",
    rows={"train": 2251, "validation": 570, "test": 2376},
    word=_word,
    judge=multiple_choice.judge_letter,
)
ARC_CHALLENGE = replace(
    ARC_EASY, name="arc_challenge", subset="ARC-Challenge", rows={"train": 1119, "validation": 299, "test": 1172}
)
