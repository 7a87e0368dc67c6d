r"""MBPP: short Python programs from a sentence and one of their tests (Austin et al., 2021).

    user       '''\nWrite a function to add two numbers.\nassert add(1, 2) == 3\n'''\n  (with double quotes)
    assistant  def add(a, b):\n    return a + b

The strict program is the completion as it stands, the relaxed one the fenced block in it.
"""

import builtins
import re

from l2d_jax.errors import InputError
from l2d_jax.evaluation.tasks.code import fenced
from l2d_jax.evaluation.tasks.problem import Item, Row, TaskSampling, text_of, texts_of
from l2d_jax.evaluation.tasks.task import Task

IMPORT = re.compile(r"^(?:import|from) [^\r\n]*", flags=re.MULTILINE)


def _word(row: Row) -> Item:
    tests, code = texts_of(row, "test_list"), text_of(row, "code")
    return Item(
        question=f'"""\n{text_of(row, "text")}\n{tests[0]}\n"""\n',
        answer=code,
        # The release leaves `test_setup_code` out; its tests see the candidate's imports, ours those of the answer.
        reference=("\n".join(tests), _names(code, tests), "\n".join(IMPORT.findall(code))),
        id=f"MBPP/{row['task_id']}",
    )


def _names(code: str, tests: list[str]) -> tuple[str, ...]:
    """The right answer's functions that the tests call, else all that they call and Python does not have built in."""
    called = re.findall(r"(?<![\w.])(\w+)\s*\(", "\n".join(tests))
    defined = re.findall(r"^(?:def|class)[ \t]+(\w+)", code, flags=re.MULTILINE)
    names = [name for name in called if name in defined] or [name for name in called if not hasattr(builtins, name)]
    if not names:
        raise InputError(f"the tests must call a function of 'code', but {tests[0]!r:.60} calls none: mend it")
    return tuple(dict.fromkeys(names))


MBPP = Task(
    name="mbpp",
    hub="google-research-datasets/mbpp",
    subset="full",
    columns=("task_id", "text", "code", "test_list"),
    shot_split="prompt",
    rows={"train": 374, "test": 500, "validation": 90, "prompt": 10},
    word=_word,
    candidates=lambda _, completion: (completion, fenced(completion)),
    category="coding",
    sampling=TaskSampling(max_new_tokens=512, samples=10, velocity_temperature=1.0, anneal=True),
)
