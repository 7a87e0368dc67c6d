r"""MMLU-Pro: harder questions of 14 subjects with up to ten options (Wang et al., 2024).

A prompt has five examples of the question's subject in the validation split, and no "Answer:" at its end:

    user       Question:\nWhat is 2 + 2?\nChoices:\nA. 3\nB. 4\nC. 5\n
    assistant  B

With thoughts, the examples' answers are the data set's own chains of thought.
"""

from l2d_jax.evaluation.tasks import multiple_choice
from l2d_jax.evaluation.tasks.problem import Item, Row, text_of, texts_of
from l2d_jax.evaluation.tasks.task import Task


def _word(row: Row) -> Item:
    question, options, subject = text_of(row, "question"), texts_of(row, "options"), text_of(row, "category")
    thought = text_of(row, "cot_content").removeprefix("A: ") or None
    item = multiple_choice.worded(question, options, answer=row["answer_index"], end="")
    return item._replace(subject=subject, category="math" if subject == "math" else None, thought=thought)


MMLU_PRO = Task(
    name="mmlu_pro",
    hub="TIGER-Lab/MMLU-Pro",
    columns=("question", "options", "answer_index", "category", "cot_content"),
    shot_split="validation",
    rows={"test": 12032, "validation": 70},
    word=_word,
    judge=multiple_choice.judge_letter,
    by_subject=True,
    thought_shots=5,
)
