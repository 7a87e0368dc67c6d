"""`echo` of `/v1/completions`: the reply repeats the prompt, with the log-probabilities of its tokens.

lm-evaluation-harness scores the choices of a task this way. The first token has no log-probability, because nothing
precedes it. The others have those that `model.score` gives for them after the first token, with its standard errors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request, TokenScore
from l2d_jax.serving.api.scoring import score_tokens


@dataclass(eq=False)
class Echo:
    """A prompt in a reply, and the scores of its tokens so far."""

    text: str
    ids: Sequence[int]
    scores: list[TokenScore] = field(default_factory=list)  # of all tokens except the first
    evaluations: int = 0  # evaluations of the path for these scores


def score(loaded: LoadedModel, echo: Echo, request: Request, *, prompt: Prompt, draws: int) -> Iterator[int]:
    """Score a prompt piece by piece, with the settings and seed of its request; yields the cost of each piece.

    Raises `InputError`.
    """
    first, *answer = prompt.ids
    if not answer:
        return
    for piece in score_tokens(loaded, request, prompt=prompt._replace(ids=[first]), answer=answer, draws=draws):
        rows = (piece.log_probs, piece.likeliest, piece.likeliest_log_probs, piece.errors)
        echo.scores += map(TokenScore, *(array.tolist() for array in rows))
        echo.evaluations += piece.evaluations
        yield piece.cost
