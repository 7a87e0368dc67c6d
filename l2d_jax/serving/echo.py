"""Prompts that a reply repeats, with the log-probabilities of their tokens: `echo` of `/v1/completions`.

lm-evaluation-harness scores the choices of a task so. The first token has no log-probability, since nothing comes
before it. Those of the others are what `model.score` gives for them behind the first one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from l2d_jax.decoding.likelihood import score_in_pieces
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request, TokenScore
from l2d_jax.decoding.sampler import LIKELIEST

DRAWS = 8  # noise samples per token where the request does not say, as of `model.score`
SAMPLES = (2, 4, 8, 16, 32, 64)  # numbers of noise samples: few, so that few programs are compiled
EVALUATIONS = 1024  # of the path in one piece, at most, while others wait
PIECES = (1, 4, 16, 64, 256)  # tokens of a piece: few sizes, so that few programs are compiled
TOGETHER = 8  # evaluations that take as long as one of a single answer, about


@dataclass(eq=False)
class Echo:
    """One prompt in a reply, and how far its tokens have been scored."""

    text: str
    ids: Sequence[int]
    scores: list[TokenScore] = field(default_factory=list)  # of all tokens but the first
    evaluations: int = 0  # of the path, for the scores


def score(loaded: LoadedModel, echo: Echo, request: Request, *, prompt: Prompt, draws: int) -> Iterator[int]:
    """Score a prompt piece by piece, with the settings and the seed of its request; yield what each has cost.

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
