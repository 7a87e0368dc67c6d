"""`echo` of `/v1/completions`: the reply repeats the prompt, with the log-probabilities of its tokens.

lm-evaluation-harness scores the choices of a task this way. The first token has no log-probability, because nothing
precedes it. The others have those that `model.score` gives for them after the first token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from l2d_jax.decoding.likelihood import score_in_pieces
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request, TokenScore
from l2d_jax.decoding.sampler import LIKELIEST

DRAWS = 8  # default number of noise samples per token, as in `model.score`
SAMPLES = (2, 4, 8, 16, 32, 64)  # allowed numbers of noise samples; few, so that few programs are compiled
EVALUATIONS = 1024  # largest number of evaluations in one piece, because others wait
PIECES = (1, 4, 16, 64, 256)  # sizes of a piece in tokens; few, so that few programs are compiled
TOGETHER = 8  # this number of evaluations takes about as long as one of a single answer


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
    asked = Request([prompt._replace(ids=[first])], request.settings, request.seed)
    cost = request.settings.budget * (draws if request.settings.budget > 1 else 1)
    piece = max((size for size in PIECES if size * cost <= EVALUATIONS), default=PIECES[0])
    for scored in score_in_pieces(loaded.model, asked, answer, draws=draws, piece=piece, top=LIKELIEST):
        rows = (scored.log_probs, scored.likeliest, scored.likeliest_log_probs)
        echo.scores += map(TokenScore, *(array.tolist() for array in rows))
        echo.evaluations += scored.evaluations
        yield 1 + scored.evaluations // TOGETHER
