"""Text in, text out: streams the answers of a model. The Python interface of the package."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import prompt_ids
from l2d_jax.decoding import decode
from l2d_jax.decoding.buckets import pad
from l2d_jax.decoding.refine import Refinement, tabulate
from l2d_jax.decoding.sampler import Sampling, allow
from l2d_jax.decoding.stop_strings import StopSearch, to_text
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.l2d import Model, check_labels


class Loaded(NamedTuple):
    """A model that is ready to generate."""

    model: Model
    tokenizer: PreTrainedTokenizerFast | None
    ends: tuple[int, ...]  # tokens that end an answer
    defaults: DecodeConfig  # how it was validated while it was trained
    step: int | None = None  # of the checkpoint; None: it was not read from one


CHUNK = 8  # tokens between two pieces of streamed text


class Restrictions(NamedTuple):
    """What an answer may not contain."""

    stops: Sequence[str] = ()  # texts that end an answer, and are left out of it
    allowed: Sequence[int] | None = None  # tokens that may be drawn; None: all
    banned: Sequence[int] = ()  # tokens that may not
    keeps_stop: bool = False  # what has come with a stop stays in the answer, for a caller that cuts the text itself


FREE = Restrictions()


class Part(NamedTuple):
    """How the prompts of a batch belong to a larger set."""

    numbers: Sequence[int] | None = None  # of the prompts, which draws depend on; None: 0, 1 and so on
    shared: int = 0  # tokens that all prompts begin with, which are read once; each prompt has more


WHOLE = Part()


def generate(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig | None = None,
    seed: int = 0,
    samples: int = 1,
    labels: Sequence[int] | None = None,
    part: Part = WHOLE,
    restrictions: Restrictions = FREE,
) -> list[list[int]]:
    """Token ids that follow each prompt of token ids, without the end token; `samples` answers to a prompt in a row.

    A sequence's result does not depend on the others in the batch. Arguments and errors are those of `stream`.
    """
    answers: list[list[int]] = [[] for _ in range(len(prompts) * samples)]
    options = {"settings": settings, "seed": seed, "samples": samples, "labels": labels, "part": part}
    for piece in stream(loaded, prompts, restrictions=restrictions, **options):  # type: ignore[arg-type]
        for answer, new in zip(answers, piece, strict=True):
            answer.extend(new)
    return answers


def stream(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig | None = None,
    seed: int = 0,
    samples: int = 1,
    labels: Sequence[int] | None = None,
    part: Part = WHOLE,
    restrictions: Restrictions = FREE,
) -> Iterator[list[list[int]]]:
    """Yield the next few token ids of every sequence until all have ended.

    Args:
      loaded: from `load`.
      prompts: token ids.
      settings: budget, solver, temperatures and length; None: the model's own.
      seed: sequence i draws from a key that is a function of the seed and of its number.
      samples: answers to each prompt, which share its prefill and follow each other.
      labels: classes for guidance, one per prompt.
      part: how the prompts belong to a larger set.
      restrictions: stop strings, and tokens that may or may not be drawn.

    Raises:
      InputError: for an empty prompt, one that leaves no room in the model's context, a budget that the solver or the
        model does not know, an unknown class or token, a stop string that cannot occur; and, once all other sequences
        have ended, for those whose logits were not numbers.
    """
    settings = loaded.defaults if settings is None else settings
    model = loaded.model
    refinement = check_settings(settings, has_path=model.path is not None)
    check_prompts(prompts, settings, model.llm.architecture)
    if samples < 1:
        raise InputError(f"samples must be at least 1, got {samples}")
    check_classes(model, labels, prompts=len(prompts))
    mask = allow(model.llm.architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
    search = StopSearch(
        restrictions.stops, loaded.tokenizer, len(prompts) * samples, keeps_stop=restrictions.keeps_stop
    )
    chunks = -(-settings.max_new_tokens // CHUNK)
    ids, lengths = pad([prompt[part.shared :] for prompt in prompts])
    refinement = tabulate(model, refinement, budget=settings.budget)
    own = jnp.arange(len(prompts)) if part.numbers is None else jnp.array(part.numbers)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), own)
    beginning = jnp.array(prompts[0][: part.shared], jnp.int32) if part.shared else None
    state = decode.prefill(model.llm, ids, lengths, keys, room=chunks * CHUNK, shared=beginning)
    if samples > 1:
        state = decode.fan_out(state, copies=samples)
    finished = [False] * len(prompts) * samples
    ends = loaded.ends or (-1,)  # what a sequence goes on with where the model has no end token
    options: dict[str, Any] = {
        "settings": refinement,
        "sampling": Sampling.from_config(settings, allowed=mask),
        "ends": jnp.array(ends, jnp.int32),
        "labels": None if labels is None else jnp.repeat(jnp.array(labels, jnp.int32), samples),
    }
    for number in range(chunks):
        state, new = decode.decode(model, state, steps=CHUNK, draws=settings.draws, **options)
        left = settings.max_new_tokens - number * CHUNK
        piece = []
        for i, row in enumerate(processes.gather_array(new)[:, :left].tolist()):
            stop = next((j for j, token in enumerate(row) if token in ends), None)
            is_last = stop is not None or number == chunks - 1
            new_ids, is_stopped = ([], True) if finished[i] else search.add(i, row[:stop], is_last=is_last)
            piece.append(new_ids)
            finished[i] = finished[i] or stop is not None or is_stopped
        state = dataclasses.replace(state, done=jnp.array(finished))
        broken = np.flatnonzero(processes.gather_array(state.broken)).tolist()
        finished = [end or i in broken for i, end in enumerate(finished)]
        yield piece
        if all(finished):
            break
    if broken:
        raise InputError(
            f"logits of sequences {broken} were not numbers, which ended them there: check the weights, or use float32"
        )


def check_settings(settings: DecodeConfig, *, has_path: bool) -> Refinement:
    """The settings as the solver takes them; raises `InputError` for a budget that cannot be spent."""
    if not has_path and settings.budget != 1:
        raise InputError(
            f"a budget of {settings.budget} needs a diffusion path, and this model has none: use a budget of 1"
        )
    return Refinement.from_config(settings)


def check_prompts(prompts: Sequence[Sequence[int]], settings: DecodeConfig, architecture: Architecture) -> None:
    """Raise `InputError` for an empty prompt, and for one that leaves no room for the answer."""
    if not prompts or not all(prompts):
        raise InputError("a prompt is empty: give at least one token")
    longest, limit = max(map(len, prompts)), architecture.max_position_embeddings
    if longest + settings.max_new_tokens > limit:
        raise InputError(
            f"a prompt of {longest} tokens and {settings.max_new_tokens} new ones exceed the {limit} positions of the "
            "model: shorten the prompt or lower max_new_tokens"
        )


def check_classes(model: Model, labels: Sequence[int] | None, *, prompts: int) -> None:
    """Raise `InputError` unless there is one known class for each prompt, or none at all."""
    if labels is not None:
        if len(labels) != prompts:
            raise InputError(f"guidance takes one class label per prompt, got {len(labels)} for {prompts} prompts")
        check_labels(None if model.path is None else model.path.config, labels)


def encode_prompt(messages: Sequence[dict[str, str]], tokenizer: PreTrainedTokenizerFast | None) -> list[int]:
    """The token ids of a conversation up to the next answer; raises `InputError` as `stream_text` does."""
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files to generate text")
    return prompt_ids(messages, tokenizer)


def stream_text(
    loaded: Loaded,
    messages: Sequence[dict[str, str]],
    *,
    settings: DecodeConfig | None = None,
    seed: int = 0,
    label: int | None = None,
    restrictions: Restrictions = FREE,
) -> Iterator[str]:
    """Yield the assistant's answer to a conversation as pieces of text, each complete in UTF-8.

    Raises `InputError` as `stream` does, and if the model has no tokenizer or its tokenizer no chat template.
    """
    prompt = encode_prompt(messages, loaded.tokenizer)
    answer: list[int] = []
    shown = ""
    labels = None if label is None else [label]
    for piece in stream(loaded, [prompt], settings=settings, seed=seed, labels=labels, restrictions=restrictions):
        answer.extend(piece[0])
        text = to_text(answer, loaded.tokenizer)
        if not text.endswith("\ufffd"):  # the rest of a character is still to come
            yield text[len(shown) :]
            shown = text
    yield to_text(answer, loaded.tokenizer)[len(shown) :]
