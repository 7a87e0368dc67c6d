"""Types that the evaluation tasks share: worded rows, problems, sampling of completions, and scores."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from l2d_jax.errors import require
from l2d_jax.evaluation.sandbox.submission import Submission, Verdict

Row = Mapping[str, Any]
# few-shot as in the paper; examples with (or a request for) thoughts; a request alone, for models that think at length
Prompts = Literal["paper", "thoughts", "reasoning"]


class Item(NamedTuple):
    """A row of a data set, in the wording of the task."""

    question: str  # the user's message
    answer: str  # a right answer; the assistant's message if the row is an example
    reference: Any  # the right answer as the task's judge reads it; None: the release does not count the row
    subject: str | None = None  # selects the examples before the question; a row in the table of subjects
    category: str | None = None  # class for guidance; None: the task's
    options: tuple[str, ...] = ()  # the possible answers of a multiple-choice question
    opening: str = ""  # the beginning of the assistant's message, which the completion continues
    thought: str | None = None  # an answer that thinks first, for examples with thoughts
    request: str | None = None  # the question with a request to think, for prompts without such examples
    id: str | None = None  # None: the row's number in the split


class Problem(NamedTuple):
    """One question for a model."""

    id: str  # the same in every run, such as "gsm8k/test/17"
    messages: tuple[dict[str, str], ...]  # ends with the question, or with an opening that the completion continues
    answer: str  # a right answer; prompt and answer together must fit `MAX_LENGTH`
    reference: Any  # the right answer as the task's judge reads it
    category: str  # one of CATEGORIES
    subject: str | None = None
    options: tuple[str, ...] = ()  # the letters of a multiple-choice question


class EncodedProblem(NamedTuple):
    """A problem with the token ids of its prompt."""

    problem: Problem
    ids: list[int]


class Score(NamedTuple):
    """The scores of one completion."""

    strict: float  # 1 or 0, by the release's rules
    relaxed: float  # 1 or 0, by what a reader would accept
    extracted: str | None  # the answer that the strict rules find; None: they find none
    relaxed_extracted: str | None
    reason: str  # why the completion is wrong, in a few words; empty if both scores are 1


Run = Callable[[Sequence[Submission]], Sequence[Verdict]]  # one verdict for each program with its tests, in order


class TaskSampling(NamedTuple):
    """How completions are sampled; the defaults are the release's for tasks with short answers."""

    max_new_tokens: int = 256
    samples: int = 1  # completions of each problem
    temperature: float = 1.0  # for sampling a token; 0: arg max
    velocity_temperature: float = 0.0  # for sampling the velocity's target within the diffusion
    anneal: bool = False  # let the velocity's temperature fall linearly to 0
    top_p: float | None = None  # sample from the likeliest tokens that reach this probability; None: as configured


def text_of(row: Row, column: str) -> str:
    """Read a column of text; raises `InputError` for anything else."""
    value = row[column]
    require(isinstance(value, str), f"{column!r} must be text, got {value!r:.60}")
    return str(value)


def texts_of(row: Row, column: str) -> list[str]:
    """Read a column that is a list of texts; raises `InputError` for anything else."""
    value = row[column]
    is_texts = isinstance(value, list) and value != [] and all(isinstance(entry, str) for entry in value)
    require(is_texts, f"{column!r} must be a list of texts, got {value!r:.60}")
    return list(value)
