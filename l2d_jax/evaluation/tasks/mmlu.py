r"""MMLU: questions of 57 school and university subjects with four options (Hendrycks et al., 2021).

A prompt has the five examples of the question's subject in the dev split:

    user       Question:\nWhat is 2 + 2?\nChoices:\nA. 3\nB. 4\nC. 5\nD. 6\n\nAnswer:
    assistant  B

MMLU-Pro: harder questions of 14 subjects with up to ten options (Wang et al., 2024). Its examples are of the validation
split, its prompts have no "Answer:" at their end, and the examples' thoughts are the data set's own.
"""

from dataclasses import replace

from l2d_jax.evaluation.tasks import multiple_choice
from l2d_jax.evaluation.tasks.problem import Item, Row, text_of, texts_of
from l2d_jax.evaluation.tasks.task import Task

# Classes for guidance as in the release's tasks/constants.py; all other subjects are general knowledge.
CATEGORIES = {
    "abstract_algebra": "math",
    "college_mathematics": "math",
    "elementary_mathematics": "math",
    "high_school_mathematics": "math",
    "high_school_statistics": "math",
    "high_school_computer_science": "coding",
}


def _word(row: Row) -> Item:
    subject = text_of(row, "subject")
    item = multiple_choice.worded(text_of(row, "question"), texts_of(row, "choices"), answer=row["answer"])
    return item._replace(subject=subject, category=CATEGORIES.get(subject))


def _word_pro(row: Row) -> Item:
    question, options, subject = text_of(row, "question"), texts_of(row, "options"), text_of(row, "category")
    thought = text_of(row, "cot_content").removeprefix("A: ") or None
    item = multiple_choice.worded(question, options, answer=row["answer_index"], end="")
    return item._replace(subject=subject, category="math" if subject == "math" else None, thought=thought)


MMLU = Task(
    name="mmlu",
    hub="cais/mmlu",
    subset="all",
    columns=("question", "subject", "choices", "answer"),
    shot_split="dev",
    rows={"test": 14042, "validation": 1531, "dev": 285},
    word=_word,
    judge=multiple_choice.judge_letter,
    by_subject=True,
)
MMLU_PRO = replace(
    MMLU,
    name="mmlu_pro",
    hub="TIGER-Lab/MMLU-Pro",
    subset=None,
    columns=("question", "options", "answer_index", "category", "cot_content"),
    shot_split="validation",
    rows={"test": 12032, "validation": 70},
    word=_word_pro,
    thought_shots=5,
)
