r"""Programs: HumanEval (complete a function from its docstring) and MBPP (write a function from a sentence).

InstructHumanEval, which the paper uses, asks in words and begins the answer: the model continues after the signature.
MBPP shows one of the tests:

    user       Write a function add(a, b) to solve the following problem:\nThe sum.
    assistant  def add(a, b):

    user       '''\nWrite a function to add two numbers.\nassert add(1, 2) == 3\n'''\n  (with double quotes)
    assistant  def add(a, b):\n    return a + b

With thoughts, the question asks for them and for the whole program in a block of code at the end, without examples: the
data sets have none with thoughts. The program is then taken from the last block.

The strict program is, for HumanEval, the prompt and the completion unchanged, and for MBPP the completion alone. The
relaxed program also accepts a fenced block or a whole function, and drops text after the body. HumanEval's examples are
the first five rows of its only split, test, so 159 of its 164 problems are scored (Chen et al., 2021; Austin et al.,
2021).
"""

import builtins
import re

from l2d_jax.errors import require
from l2d_jax.evaluation.tasks.problem import Item, Problem, Row, text_of, texts_of

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|$)", flags=re.DOTALL | re.IGNORECASE)
CONTINUES = re.compile(r"\s|def |class |import |from |@|#|[)\]}]|$")  # matches a line that may belong to a program
IMPORT = re.compile(r"^(?:import|from) [^\r\n]*", flags=re.MULTILINE)


REQUEST = (
    "\nThink step by step. Then end with the whole program in one block that begins with ```python and ends with ```."
)


def fenced(completion: str) -> str:
    r"""The first fenced block of code, or the whole completion if there is none.

    >>> fenced("Here it is:\n```python\nx = 1\n```\nThis sets x.")
    'x = 1'
    """
    found = FENCE.search(completion)
    return found[1] if found else completion


def last_fenced(completion: str) -> str:
    r"""The last fenced block of code, or the whole completion if there is none.

    >>> last_fenced("First:\n```\nx = 1\n```\nBetter:\n```python\nx = 2\n```")
    'x = 2'
    """
    return (FENCE.findall(completion) or [completion])[-1]


def _word_humaneval(row: Row) -> Item:
    prompt, name = text_of(row, "prompt"), text_of(row, "entry_point")
    tests = f"{text_of(row, 'test')}\ncheck({name})"
    reference = (tests, (name,), prompt)  # three problems' tests call helpers that the prompt defines
    item = Item(prompt, text_of(row, "canonical_solution"), reference, id=text_of(row, "task_id"))
    return item._replace(request=f"Complete this program:\n```python\n{prompt}```{REQUEST}")


def _word_instruct_humaneval(row: Row) -> Item:
    question, opening = text_of(row, "instruction"), text_of(row, "context")
    return _word_humaneval(row)._replace(question=question, opening=opening, request=f"{question}{REQUEST}")


def _candidates(problem: Problem, completion: str) -> tuple[str, str]:
    _, (name,), prompt = problem.reference
    code = fenced(completion)
    if re.search(rf"^(?:async )?def {name}\b", code, flags=re.MULTILINE):
        head = re.split(rf"^def {name}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]  # imports and helpers
        return prompt + completion, head + code
    lines = code.split("\n")
    end = next((number for number, line in enumerate(lines) if number and not CONTINUES.match(line)), len(lines))
    return prompt + completion, prompt + "\n".join(lines[:end])


def _word_mbpp(row: Row) -> Item:
    tests, code = texts_of(row, "test_list"), text_of(row, "code")
    question = f'"""\n{text_of(row, "text")}\n{tests[0]}\n"""\n'
    # The release omits `test_setup_code`. Its tests see the candidate's imports; ours see those of the right answer.
    reference = ("\n".join(tests), _names(code, tests), "\n".join(IMPORT.findall(code)))
    return Item(question, code, reference, request=f"{question.strip()}{REQUEST}", id=f"MBPP/{row['task_id']}")


def _names(code: str, tests: list[str]) -> tuple[str, ...]:
    """The functions of the right answer that the tests call; if there are none, all non-builtin functions they call."""
    called = re.findall(r"(?<![\w.])(\w+)\s*\(", "\n".join(tests))
    defined = re.findall(r"^(?:def|class)[ \t]+(\w+)", code, flags=re.MULTILINE)
    names = [name for name in called if name in defined] or [name for name in called if not hasattr(builtins, name)]
    require(names != [], f"the tests must call a function of 'code', but {tests[0]!r:.60} calls none: fix it")
    return tuple(dict.fromkeys(names))


RULES = {
    "humaneval": {"word": _word_humaneval, "candidates": _candidates},
    "instructhumaneval": {"word": _word_instruct_humaneval, "candidates": _candidates},
    "mbpp": {"word": _word_mbpp, "candidates": lambda _, completion: (completion, fenced(completion))},
}
