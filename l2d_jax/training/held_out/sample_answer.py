"""Answers one held-out example in words as training goes on, so that whoever watches sees what the model has learnt."""

import dataclasses
import itertools
from collections.abc import Sequence

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.examples import Examples
from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.batching import complete
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.distributed import processes
from l2d_jax.errors import shorten
from l2d_jax.model.l2d import Model
from l2d_jax.weights.base_model import BaseFiles

COMPARED = 16  # prompts, whose common beginning and end are the chat template
LONGEST = 300  # characters of a text that is shown


class SampleAnswer:
    """The first held-out example, and its answer by the model under training."""

    def __init__(self, examples: Examples, base: BaseFiles, settings: DecodeConfig) -> None:
        """Take the first of the examples; `settings` say how to decode."""
        self._base, self._tokenizer = base, require_tokenizer(base.tokenizer)
        texts = list(itertools.islice(examples.texts(), COMPARED))
        (self._prompt, self._answer), self._question = texts[0], _differing([prompt for prompt, _ in texts])
        longest = 2 * len(self._answer)
        self._settings = dataclasses.replace(settings, max_new_tokens=min(settings.max_new_tokens, longest))

    def introduce(self) -> None:
        """Print the question and its right answer."""
        processes.print_once(f"a held-out question: {self._text(self._question)}")
        processes.print_once(f"  the right answer: {self._text(self._answer)}")

    def show(self, model: Model, step: int) -> None:
        """Print the model's answer after this step; every process has to call it."""
        budget = self._settings.budget if model.path is not None and step else 1
        loaded = LoadedModel(model, self._base.tokenizer, self._base.stop_ids, self._settings)
        settings = dataclasses.replace(self._settings, budget=budget)
        for answers in complete(loaded, [Prompt(0, self._prompt)], settings=settings, batch_size=1):
            after = f"after {step} steps" if step else "before training"
            processes.print_once(f"  the model's, {after}: {self._text(answers[0][0].ids)}")

    def _text(self, ids: Sequence[int]) -> str:
        return shorten(" ".join(to_text(list(ids), self._tokenizer).split()), LONGEST)


def _differing(prompts: Sequence[Sequence[int]]) -> list[int]:
    """The part of the first prompt that the others do not share; the whole prompt if there are no others."""
    if len(prompts) < 2:
        return list(prompts[0])
    before, after = _shared(prompts), _shared([prompt[::-1] for prompt in prompts])
    after = max(0, after - 1)  # questions share a question mark
    return list(prompts[0][before : len(prompts[0]) - after]) or list(prompts[0])


def _shared(texts: Sequence[Sequence[int]]) -> int:
    """The number of tokens that all texts begin with."""
    return sum(1 for _ in itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*texts, strict=False)))
