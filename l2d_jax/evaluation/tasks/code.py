"""Scores of code: completions become programs for the sandbox, and its verdicts become scores."""

import re
from collections.abc import Sequence

from l2d_jax.evaluation.sandbox.submission import Submission
from l2d_jax.evaluation.tasks.problem import Problem, Run, Score

FENCE = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:\n```|$)", flags=re.DOTALL | re.IGNORECASE)


def fenced(completion: str) -> str:
    r"""The first fenced block of code, or the whole completion where there is none.

    >>> fenced("Here it is:\n```python\nx = 1\n```\nThis sets x.")
    'x = 1'
    """
    found = FENCE.search(completion)
    return found[1] if found else completion


def score_programs(problems: Sequence[Problem], pairs: Sequence[tuple[str, str]], run: Run) -> list[Score]:
    """Score completions by running the strict and the relaxed candidate that each pair has.

    A candidate that is both runs once, and a completion that passes the strict way is right the relaxed way too. The
    reference of a problem is all that a `Submission` has beside the candidate, in its order: tests, names and setup.
    """
    places = [(number, candidate) for number, pair in enumerate(pairs) for candidate in dict.fromkeys(pair)]
    programs = [Submission(candidate, *problems[number].reference) for number, candidate in places]
    verdicts = dict(zip(places, run(programs), strict=True))
    scores = []
    for number, pair in enumerate(pairs):
        strict, relaxed = (verdicts[number, candidate] for candidate in pair)
        reason = "" if strict.passed else str(strict.reason)
        scores.append(Score(float(strict.passed), float(strict.passed or relaxed.passed), *pair, reason))
    return scores
