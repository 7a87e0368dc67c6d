"""What the evaluation tasks share: the wording of a row, problems, how completions are drawn, and scores."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

from l2d_jax.errors import InputError

Row = Mapping[str, Any]
Prompts = Literal["paper", "thoughts"]  # few-shot as in the paper; examples that think, or the request to


class Item(NamedTuple):
    """A row as a task words it."""

    question: str  # what the user says
    answer: str  # what the assistant says to it in an example, and would say to be right
    reference: Any  # what is right, as the task's judge takes it; None: the release does not count such a row
    subject: str | None = None  # whose examples precede it and whose table it is counted in
    category: str | None = None  # class for guidance; None: the task's own
    options: tuple[str, ...] = ()  # what the answer may be, for the likelihood of options
    opening: str = ""  # what the assistant has said already when the completion begins
    thought: str | None = None  # an answer that thinks first, for examples with thoughts
    request: str | None = None  # the question with the request to think, for prompts without such examples
    id: str | None = None  # None: its number in the split


@dataclass(frozen=True)
class Problem:
    """One question to a model."""

    id: str  # the same in every run: "gsm8k/test/17"
    messages: tuple[dict[str, str], ...]  # ends with the question, or with an opening that the completion continues
    answer: str  # a right answer; its length counts for the limit of the prompt's
    reference: Any  # what the judge compares with
    category: str  # one of CATEGORIES
    subject: str | None = None
    options: tuple[str, ...] = ()  # of a choice: the letters


class Score(NamedTuple):
    """What a completion is worth."""

    strict: float  # 1 or 0, by the release's rules
    relaxed: float  # 1 or 0
    extracted: str | None  # the answer that the strict rules find; None: none
    relaxed_extracted: str | None
    reason: str  # why it is not right, in a few words; empty where both scores are 1


class Program(NamedTuple):
    """A completed program and its tests: the fields of the sandbox's `Submission`, in their order."""

    id: str  # another one for each program of a call
    candidate: str
    tests: str  # source that raises unless the program is right
    names: tuple[str, ...]  # what of the candidate the tests call
    setup: str  # source that the tests need before them


@runtime_checkable
class Verdict(Protocol):
    """What the sandbox says of a program."""

    passed: bool
    reason: str


Run = Callable[[Sequence[Program]], Sequence[Any]]  # to one Verdict for each program, in order


@dataclass(frozen=True)
class Sampling:
    """How completions are drawn; the values are the release's for tasks with short answers.

    Its command line leaves the temperature at 1 for every task, with neither top-k nor top-p, and nothing ends a
    completion but the end of the turn and the length.
    """

    max_new_tokens: int = 256
    samples: int = 1  # completions of each problem
    temperature: float = 1.0  # of the draw of a token; 0: arg max
    velocity_temperature: float = 0.0  # of the draws within the diffusion
    anneal: bool = False  # let that one fall linearly to 0


def text_of(row: Row, column: str) -> str:
    """A column that holds text; `InputError` where it holds something else."""
    value = row[column]
    if not isinstance(value, str):
        raise InputError(f"{column!r} must be text, got {value!r:.60}")
    return value


def texts_of(row: Row, column: str) -> list[str]:
    """A column that holds a list of texts; `InputError` where it holds something else."""
    value = row[column]
    if not (isinstance(value, list) and value and all(isinstance(entry, str) for entry in value)):
        raise InputError(f"{column!r} must be a list of texts, got {value!r:.60}")
    return value
