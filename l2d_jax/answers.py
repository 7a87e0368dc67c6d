"""The ways in which `generate` answers a conversation on the terminal: as it comes, with a trace, or by search."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from l2d_jax import generation
from l2d_jax.beams import SearchConfig
from l2d_jax.config import DecodeConfig
from l2d_jax.generation import Loaded, Restrictions, encode_prompt, stream_text, to_text
from l2d_jax.search import search
from l2d_jax.trace import TokenTrace, trace

Messages = Sequence[dict[str, str]]


@runtime_checkable
class Answer(Protocol):
    """Prints the answer to a conversation, and returns it."""

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Raises `InputError` as `generation.stream` does."""
        ...


@dataclass(frozen=True)
class Streamed:
    """Prints text as it comes."""

    restrictions: Restrictions
    label: int | None  # class for guidance

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        text = ""
        options = {"settings": settings, "seed": seed, "label": self.label}
        for piece in stream_text(loaded, messages, restrictions=self.restrictions, **options):  # type: ignore[arg-type]
            print(piece, end="", flush=True)
            text += piece
        print()
        return text


@dataclass(frozen=True)
class Traced:
    """Prints the whole answer, and keeps what each of its tokens took."""

    restrictions: Restrictions
    label: int | None
    traces: list[list[TokenTrace]] = field(default_factory=list)  # of all answers so far

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        prompts = [encode_prompt(messages, loaded.tokenizer)]
        labels = None if self.label is None else [self.label]
        answers = generation.generate(
            loaded, prompts, settings=settings, seed=seed, labels=labels, restrictions=self.restrictions
        )
        self.traces.extend(trace(loaded, prompts, answers, settings=settings, seed=seed, labels=labels))
        return _show(loaded, answers[0])


@dataclass(frozen=True)
class Searched:
    """Prints the best answer of a search."""

    config: SearchConfig
    label: int | None

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        prompt = encode_prompt(messages, loaded.tokenizer)
        found = search(loaded, prompt, settings=settings, config=self.config, seed=seed, label=self.label)
        return _show(loaded, found.answer)


def _show(loaded: Loaded, ids: Sequence[int]) -> str:
    text = to_text(ids, loaded.tokenizer)
    print(text, flush=True)
    return text
