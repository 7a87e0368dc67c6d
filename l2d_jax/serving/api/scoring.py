"""Log-probabilities of a text after a prompt, in pieces that take turns with the answers of other requests."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from l2d_jax.decoding.likelihood import score_in_pieces
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.sampler import LIKELIEST
from l2d_jax.errors import require

DRAWS = 8  # default number of noise samples per token, as in `model.score`
SAMPLES = (2, 4, 8, 16, 32, 64)  # allowed numbers of noise samples; few, so that few programs are compiled
EVALUATIONS = 1024  # largest number of evaluations in one piece, because others wait
PIECES = (1, 4, 16, 64, 256)  # sizes of a piece in tokens; few, so that few programs are compiled
TOGETHER = 8  # this number of evaluations takes about as long as one of a single answer


class PricedPiece(NamedTuple):
    """The scores of a few tokens, as in `likelihood.ScoredPiece`, and their approximate cost in passes."""

    log_probs: Float[np.ndarray, " n"]
    errors: Float[np.ndarray, " n"]
    likeliest: Int[np.ndarray, "n top"]
    likeliest_log_probs: Float[np.ndarray, "n top"]
    evaluations: int
    cost: int


def check_draws(draws: int, *, budget: int, name: str, most: int) -> None:
    """Raise `InputError` for a number of noise samples that is not allowed, or more than `most`; `name`: its field."""
    rule = f"log-probabilities of a text take the mean over {', '.join(map(str, SAMPLES))} noise samples"
    require(budget == 1 or draws in SAMPLES, f"{rule}, got {name} {draws}: change {name}")
    limit = max(most, DRAWS)
    require(draws <= limit, f"{name} {draws} exceeds the {limit} noise samples of this server: lower {name}")


def score_tokens(
    loaded: LoadedModel, request: Request, *, prompt: Prompt, answer: Sequence[int], draws: int
) -> Iterator[PricedPiece]:
    """Score a text after a prompt, with the settings and seed of a request; raises `InputError`."""
    asked = Request([prompt], request.settings, request.seed)
    cost = request.settings.budget * (draws if request.settings.budget > 1 else 1)
    piece = max((size for size in PIECES if size * cost <= EVALUATIONS), default=PIECES[0])
    for scored in score_in_pieces(loaded.model, asked, answer, draws=draws, piece=piece, top=LIKELIEST):
        yield PricedPiece(*scored, cost=1 + scored.evaluations // TOGETHER)
