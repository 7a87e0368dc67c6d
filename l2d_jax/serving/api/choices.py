"""The probability of each choice of a `response_format` of type `choice`.

Each choice is scored as a continuation of the prompt, as `model.score` scores it: the sum of the log-probabilities of
its tokens, without the token that ends an answer. The probability of a choice is its likelihood divided by the sum over
all choices. It is not normalised by length; `tokens` lets a client do that.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.errors import require, shown
from l2d_jax.serving.api.scoring import score_tokens

KEY = "probabilities"  # field of a response_format: whether the reply has them
MOST = 64  # choices that get a probability: each costs a pass over its prompt
REMEDY = f"leave it out, or set response_format.{KEY} to false"


@dataclass(eq=False)
class RankedChoices:
    """The choices after one prompt, and their log-likelihoods so far, in nats."""

    texts: Sequence[str]
    ids: Sequence[Sequence[int]]
    log_probs: list[float] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)  # standard errors of `log_probs`
    evaluations: int = 0  # evaluations of the path for these

    def shown(self) -> list[dict[str, Any]]:
        """The entries of a reply, in the order of the request."""
        logs = np.array(self.log_probs)
        probs = np.exp(logs - np.logaddexp.reduce(logs))
        rows = zip(self.texts, probs.tolist(), self.log_probs, self.errors, map(len, self.ids), strict=True)
        return [
            {"text": text, "probability": share, "logprob": log_prob, "l2d_se": error, "tokens": tokens}
            for text, share, log_prob, error, tokens in rows
        ]


def split_format(format: Any) -> tuple[Any, list[str]]:
    """A response format without `probabilities`, and the choices to rank, each once; [] if there are none.

    Raises `InputError` for a value of `probabilities` other than true, false and null, and for probabilities of more
    than `MOST` choices. Without `probabilities`, a format with at most `MOST` choices has them.
    """
    if not (isinstance(format, Mapping) and format.get("type") == "choice"):
        return format, []
    rest = {name: value for name, value in format.items() if name != KEY}
    wanted, choices = format.get(KEY), format.get("choices")
    is_flag = wanted is None or isinstance(wanted, bool)
    require(is_flag, f"response_format.{KEY} must be true or false, got {shown(wanted)}: leave it out")
    if wanted is False or not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        return rest, []  # the grammar refuses choices that are no texts
    texts = list(dict.fromkeys(choices))
    problem = f"response_format.{KEY} are for at most {MOST} choices, got {len(texts)}: take fewer, or set it to false"
    require(wanted is None or len(texts) <= MOST, problem)
    return rest, texts if len(texts) <= MOST else []


def check_choices(texts: Sequence[str], ids: Sequence[Sequence[int]], *, prompt: int, context: int) -> None:
    """Raise `InputError` for a choice without tokens, and for one that exceeds the context after `prompt` tokens."""
    for text, tokens in zip(texts, ids, strict=True):
        require(len(tokens) > 0, f"a choice needs at least one token, got {shown(text)}: {REMEDY}")
        problem = f"prompt and choice exceed the {context} tokens of this server, got {prompt + len(tokens)}"
        require(prompt + len(tokens) <= context, f"{problem} with {shown(text)}: {REMEDY}")


def score_choices(
    loaded: LoadedModel, ranked: RankedChoices, request: Request, *, prompt: Prompt, draws: int
) -> Iterator[int]:
    """Score the choices one after the other, with the settings and seed of their request; yields what pieces cost.

    All choices have the same noise. Raises `InputError`.
    """
    for ids in ranked.ids:
        total, variance = 0.0, 0.0
        for piece in score_tokens(loaded, request, prompt=prompt, answer=ids, draws=draws):
            total += float(piece.log_probs.sum())
            variance += float(np.square(piece.errors).sum())
            ranked.evaluations += piece.evaluations
            yield piece.cost
        ranked.log_probs.append(total)
        ranked.errors.append(variance**0.5)
