"""Answers any number of prompts in batches of a few shapes.

The noise of an answer depends only on the seed and the number of its prompt, not on its batch or the order of prompts.
Rounding does depend on the shape of the batch: see `generation`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import decode_lanes
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request, Restrictions
from l2d_jax.errors import require

PREFIX_MULTIPLE = 8  # tokens: the length of a common prefix is rounded down to a multiple, to compile few programs


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """The length of the prefix that all prompts share, such as the examples before a question, rounded down.

    Each prompt is at least one token longer than the prefix. A single prompt has no common prefix.
    """
    if len(prompts) < 2:
        return 0
    shortest, first = min(map(len, prompts)), prompts[0]
    same = next((i for i in range(shortest) if any(prompt[i] != first[i] for prompt in prompts)), shortest)
    return min(same, shortest - 1) // PREFIX_MULTIPLE * PREFIX_MULTIPLE


def plan_batches(lengths: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield batches of `size` rows, the longest texts first, as two lists of indices: texts and rows.

    The two differ only in the last batch, whose rows repeat its last text.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        yield batch, batch + batch[-1:] * (size - len(batch))


class Completion(NamedTuple):
    """A finished answer and its cost."""

    ids: list[int]  # without the stop token
    tokens: int = 0  # number of decoded tokens, including the stop token
    evaluations: int = 0  # evaluations of the path for these tokens
    passes: int = 0  # passes over the weights, including those of the language model


def complete(
    loaded: LoadedModel,
    prompts: Sequence[Prompt],
    *,
    settings: DecodeConfig,
    batch_size: int,
    samples: int = 1,
    seed: int = 0,
    prefix: int = 0,
    stops: Sequence[str] = (),
) -> Iterator[dict[int, list[Completion]]]:
    """Yield finished answers: a dictionary from the number of a prompt to its `samples` answers. Long prompts go first.

    There are `batch_size` lanes; when an answer ends, its lane goes to the next one. Prompts are padded to the lengths
    of `buckets.round_up`, so there is one compiled program per bucket. The other arguments are those of `Request`;
    `prefix` comes from `common_prefix`, and `stops` are texts that end an answer.
    A prompt is left out if the logits of one of its answers were not finite.
    Raises `InputError` as `generation.decode_lanes` does, and if a batch cannot hold the samples of one prompt.
    """
    lanes = batch_size // samples * samples
    require(lanes > 0, f"a batch of {batch_size} does not hold {samples} samples of a prompt: use {samples} or more")
    ordered = sorted(prompts, key=lambda prompt: -len(prompt.ids))
    answers = [Completion([]) for _ in range(len(ordered) * samples)]
    lacking, broken = [samples] * len(ordered), set[int]()
    common: dict[str, Any] = {"stop_ids": loaded.stop_ids, "tokenizer": loaded.tokenizer}
    request = Request(ordered, settings, seed, samples, prefix, Restrictions(stops=stops), **common)
    decoded = decode_lanes(loaded.decoder, request, lanes=lanes)
    for pieces in decoded if ordered else ():
        ended = {}
        for piece in pieces:
            place, former = piece.answer // samples, answers[piece.answer]
            tokens = former.tokens + len(piece.tokens) + (piece.ending == "stop")
            evaluations, passes = former.evaluations + piece.evaluations, former.passes + piece.passes
            answers[piece.answer] = Completion(former.ids + piece.tokens, tokens, evaluations, passes)
            lacking[place] -= piece.is_last
            broken |= {place} if piece.ending == "broken" else set()
            if not lacking[place] and place not in broken:
                ended[ordered[place].number] = answers[samples * place : samples * (place + 1)]
        if ended:
            yield ended
