r"""HumanEval: functions to complete from their docstring (Chen et al., 2021), in two wordings.

InstructHumanEval, the paper's, asks in words and begins the answer itself; the model goes on from the signature:

    user       Write a function add(a, b) to solve the following problem:\nThe sum.
    assistant  def add(a, b):

HumanEval, in the release too, shows the docstring and expects the body:

    user       def add(a, b):\n    '''The sum.'''\n
    assistant  (of the examples)     return a + b\n

The strict program is HumanEval's prompt and the completion as it stands; the relaxed one also accepts a fenced block or
a whole function, and drops text behind the body. The examples are the first five of the only split, test, so that 159
of its 164 problems are scored.
"""

import re
from dataclasses import replace

from l2d_jax.evaluation.tasks.code import fenced
from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, TaskSampling, text_of
from l2d_jax.evaluation.tasks.task import Task

CONTINUES = re.compile(r"\s|def |class |import |from |@|#|[)\]}]|$")  # matches a line that may belong to a program


def _word(row: Row) -> Item:
    prompt, name = text_of(row, "prompt"), text_of(row, "entry_point")
    tests = f"{text_of(row, 'test')}\ncheck({name})"
    return Item(
        question=prompt,
        answer=text_of(row, "canonical_solution"),
        reference=(tests, (name,), prompt),  # three problems' tests call helpers that the prompt defines
        id=text_of(row, "task_id"),
    )


def _candidates(problem: Problem, completion: str) -> tuple[str, str]:
    """The strict and the relaxed program."""
    _, (name,), prompt = problem.reference
    code = fenced(completion)
    if re.search(rf"^(?:async )?def {name}\b", code, flags=re.MULTILINE):
        head = re.split(rf"^def {name}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]  # imports and helpers
        return prompt + completion, head + code
    lines = code.split("\n")
    end = next((number for number, line in enumerate(lines) if number and not CONTINUES.match(line)), len(lines))
    return prompt + completion, prompt + "\n".join(lines[:end])


HUMANEVAL = Task(
    name="humaneval",
    hub="openai/openai_humaneval",
    columns=("task_id", "prompt", "canonical_solution", "entry_point", "test"),
    shot_split="test",
    rows={"test": 164},
    word=_word,
    candidates=_candidates,
    category="coding",
    sampling=TaskSampling(max_new_tokens=512, samples=10, velocity_temperature=1.0, anneal=True),
)
INSTRUCT_HUMANEVAL = replace(
    HUMANEVAL,
    name="instructhumaneval",
    hub="codeparrot/instructhumaneval",
    columns=(*HUMANEVAL.columns, "instruction", "context"),
    word=lambda row: _word(row)._replace(question=text_of(row, "instruction"), opening=text_of(row, "context")),
)
