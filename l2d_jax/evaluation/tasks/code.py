"""Scores of code: completions become programs for the sandbox, and its verdicts become scores."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from l2d_jax.evaluation.sandbox.submission import Submission
from l2d_jax.evaluation.tasks.problem import Problem, Run, Score

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|$)", flags=re.DOTALL | re.IGNORECASE)


class Tests(NamedTuple):
    """The reference of a problem of code: all that a `Submission` has beside the candidate, in its order."""

    tests: str  # source that raises unless the program is right
    names: tuple[str, ...]  # the program's functions that the tests call
    setup: str  # source from the data set that the tests need: helpers, imports


def fenced(completion: str) -> str:
    r"""The first fenced block of code, or the whole completion where there is none.

    >>> fenced("Here it is:\n```python\nx = 1\n```\nThis sets x.")
    'x = 1'
    """
    found = FENCE.search(completion)
    return found[1] if found else completion


def score_programs(
    completions: Sequence[tuple[Problem, str]],
    *,
    candidates: Callable[[Problem, str], tuple[str, str]],
    run: Run,
) -> list[Score]:
    """Score completions, each with its problem, by running their strict and relaxed candidates.

    A candidate that is both runs once, and a completion that passes the strict way is right the relaxed way too.
    """
    pairs = [candidates(problem, text) for problem, text in completions]
    places: dict[tuple[int, str], int] = {}
    programs: list[Submission] = []
    for number, ((problem, _), pair) in enumerate(zip(completions, pairs, strict=True)):
        for candidate in dict.fromkeys(pair):
            places[number, candidate] = len(programs)
            programs.append(Submission(candidate, *problem.reference))
    verdicts = run(programs)
    assert len(verdicts) == len(programs)
    scores = []
    for number, pair in enumerate(pairs):
        strict, relaxed = (verdicts[places[number, candidate]] for candidate in pair)
        reason = "" if strict.passed else str(strict.reason)
        scores.append(Score(float(strict.passed), float(strict.passed or relaxed.passed), *pair, reason))
    return scores
