"""Completes any number of prompts in batches of few shapes; no answer depends on its batch or on their order."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import FREE, Loaded, Part, Restrictions, generate
from l2d_jax.errors import InputError

SHARED = 128  # tokens: what prompts share is cut to a multiple


class Prompt(NamedTuple):
    """A prompt of a larger set."""

    number: int  # in that set, which its noise and draws depend on
    ids: Sequence[int]
    label: int | None = None  # class for guidance


def shared_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with, as the examples before a question; each has more, and it is rounded down.

    Rounding spares few tokens and many programs. One prompt shares nothing.
    """
    if len(prompts) < 2:
        return 0
    shortest, first = min(map(len, prompts)), prompts[0]
    same = next((i for i in range(shortest) if any(prompt[i] != first[i] for prompt in prompts)), shortest)
    return min(same, shortest - 1) // SHARED * SHARED


def batches(lengths: Sequence[int], size: int) -> Iterator[tuple[list[int], list[int]]]:
    """The places of texts of these lengths in batches of one size, the longest first.

    Each batch comes with its rows: its places, and in the last batch the last place again and again.
    """
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    for first in range(0, len(order), size):
        batch = order[first : first + size]
        yield batch, batch + batch[-1:] * (size - len(batch))


def complete(
    loaded: Loaded,
    prompts: Sequence[Prompt],
    *,
    settings: DecodeConfig,
    batch_size: int,
    samples: int = 1,
    seed: int = 0,
    shared: int = 0,
    restrictions: Restrictions = FREE,
) -> Iterator[dict[int, list[list[int]]]]:
    """Yield the answers of each batch, `samples` of them by the number of their prompt; the longest prompts come first.

    Every batch has as many rows, the last one by repeating a prompt, and a length from `generation.bucket`: so there
    are as many programs as buckets.

    Args:
      loaded: from `load`.
      prompts: to complete; all with a label, or none.
      settings: of decoding.
      batch_size: sequences at a time; `samples` of a prompt share a batch.
      samples: answers to each prompt.
      seed: with the prompt's number, determines its draws.
      shared: of `shared_tokens`, for all prompts of the set.
      restrictions: of the answers.

    Raises:
      InputError: as `generation.stream`, and for a batch that does not hold the samples of one prompt.
    """
    rows = batch_size // samples
    if rows < 1:
        raise InputError(f"a batch of {batch_size} does not hold {samples} samples of a prompt: use {samples} or more")
    for batch, places in batches([len(prompt.ids) for prompt in prompts], rows):
        filled = [prompts[place] for place in places]
        labels = [prompt.label for prompt in filled if prompt.label is not None]
        answers = generate(
            loaded,
            [prompt.ids for prompt in filled],
            settings=settings,
            seed=seed,
            samples=samples,
            labels=labels or None,
            part=Part([prompt.number for prompt in filled], shared),
            restrictions=restrictions,
        )
        yield {prompts[place].number: answers[samples * i : samples * (i + 1)] for i, place in enumerate(batch)}
