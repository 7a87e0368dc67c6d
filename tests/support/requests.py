"""Asks a model in token ids, with the arguments of a request by name."""

from collections.abc import Iterator, Sequence
from typing import Any

from l2d_jax.decoding import generation, likelihood
from l2d_jax.decoding import trace as tracing
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Request, number_prompts


def request(loaded: LoadedModel, prompts: Any, *, settings: Any = None, labels: Any = None, **options: Any) -> Request:
    settings = loaded.defaults if settings is None else settings
    ends: dict[str, Any] = {"stop_ids": loaded.stop_ids, "tokenizer": loaded.tokenizer}
    return Request(number_prompts(prompts, labels=labels), settings, **ends, **options)


def stream(loaded: LoadedModel, prompts: Any, **options: Any) -> Iterator[list[list[int]]]:
    """The next tokens of each answer; none of one that has ended."""
    asked = request(loaded, prompts, **options)
    for pieces in generation.decode_lanes(loaded.model, asked):
        new: list[list[int]] = [[] for _ in range(len(asked.prompts) * asked.samples)]
        for piece in pieces:
            new[piece.answer] = piece.tokens
        yield new


def generate(loaded: LoadedModel, prompts: Any, **options: Any) -> list[list[int]]:
    asked = request(loaded, prompts, **options)
    return generation.generate_tokens(loaded.model, asked)


def trace(loaded: LoadedModel, prompts: Any, answers: Any, **options: Any) -> list[list[tracing.TokenTrace]]:
    return tracing.trace(loaded, request(loaded, prompts, **options), answers)


def score(
    loaded: LoadedModel,
    prompts: Any,
    answers: Sequence[Sequence[int]],
    *,
    settings: Any = None,
    labels: Any = None,
    numbers: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> list[likelihood.Likelihood]:
    numbered = number_prompts(prompts, labels=labels)
    numbered = [p._replace(number=p.number if numbers is None else numbers[p.number]) for p in numbered]
    settings = loaded.defaults if settings is None else settings
    return likelihood.score_answers(loaded.model, Request(numbered, settings, seed), answers, **options)
