"""Generates token ids: a prefill of the prompts, then chunks of tokens until every answer has ended.

The rows of a batch are computed apart: an answer is a function of its prompt, its number, the seed and the settings, up
to rounding, which depends on the shape of the batch (rows, padded length, common prefix). In float32 that changes a
logit by some 1e-5, so that a token changes only where two are as good as equal. In bfloat16 and int8 it may change one
by some tenths, and answers with it.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value
from l2d_jax.decoding import decode
from l2d_jax.decoding.buckets import CHUNK, answer_slots, pad
from l2d_jax.decoding.refine import Refinement, check_budget
from l2d_jax.decoding.requests import Request, check_decoding_memory, check_prompts, check_seed, class_labels
from l2d_jax.decoding.sampler import SamplingOptions, allow
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model


def generate_tokens(
    model: Model,
    request: Request,
    *,
    stop_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> list[list[int]]:
    """The token ids of each answer, without the stop token; the other prompts change the rounding alone.

    Arguments and errors are those of `stream_tokens`.
    """
    answers: list[list[int]] = [[] for _ in range(len(request.prompts) * request.samples)]
    for piece in stream_tokens(model, request, stop_ids=stop_ids, tokenizer=tokenizer):
        for answer, new in zip(answers, piece, strict=True):
            answer.extend(new)
    return answers


def stream_tokens(
    model: Model,
    request: Request,
    *,
    stop_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Iterator[list[list[int]]]:
    """Yield the next few token ids of every answer until all answers have ended.

    Args:
      model: the LM and the path.
      request: prompts, settings, seed, samples and restrictions.
      stop_ids: tokens that end an answer, and are left out of it.
      tokenizer: for stop strings.

    Raises:
      InputError: for an empty prompt, one that leaves no positions for its answer, a budget that the solver or the
        model does not know, an unknown class or token, a stop string that cannot occur; and, once all other answers
        have ended, for those whose logits were not numbers.
    """
    settings = request.settings
    search = _check_request(model, request, tokenizer)
    model = model.reading(refines=settings.budget > 1)
    stop_ids = stop_ids or (-1,)  # -1 is what an ended answer goes on with where the model has no stop token
    state = _start(model, request)
    decode_chunk = _prepare(model, request, stop_ids)
    finished = np.zeros(len(request.prompts) * request.samples, bool)
    for left in range(settings.max_new_tokens, 0, -CHUNK):
        state, new = decode_chunk(state=state)
        rows = processes.gather_array(new)[:, :left].tolist()
        piece, finished = _cut(rows, finished, search, stop_ids, is_last=left <= CHUNK)
        state = dataclasses.replace(state, done=jnp.array(finished))
        broken = processes.gather_array(state.broken)
        finished |= broken
        yield piece
        if finished.all():
            break
    if broken.any():
        raise InputError(
            f"logits of sequences {np.flatnonzero(broken).tolist()} were not numbers, which ended them there: check "
            "the weights, or use float32"
        )


def _check_request(model: Model, request: Request, tokenizer: PreTrainedTokenizerFast | None) -> StopSearch:
    """Raise `InputError` as `stream_tokens` does; what looks for stop strings in the answers."""
    settings, restrictions = request.settings, request.restrictions
    check_budget(settings, has_path=model.path is not None)
    check_prompts([prompt.ids for prompt in request.prompts], settings, model.llm.architecture)
    check_value(request.samples, ranges.Rows, "samples")
    check_seed(request.seed)
    class_labels(model, request.prompts)
    allow(model.llm.architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
    count, path = len(request.prompts) * request.samples, None if model.path is None else model.path.config
    longest = max(len(prompt.ids) for prompt in request.prompts) - request.prefix
    remedy = "the number of prompts, samples, draws or max_new_tokens"
    check_decoding_memory(model.llm, path, settings, rows=count, longest=longest, remedy=remedy)
    return StopSearch(restrictions.stops, tokenizer, count, keeps_stop=restrictions.keeps_stop)


def _start(model: Model, request: Request) -> decode.State:
    """The state behind the prompts, with a row for each answer and a whole number of chunks for its tokens."""
    prompts, prefix = request.prompts, request.prefix
    ids, lengths = pad([prompt.ids[prefix:] for prompt in prompts])
    numbers = jnp.array([prompt.number for prompt in prompts])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), numbers)
    shared = jnp.array(prompts[0].ids[:prefix], jnp.int32) if prefix else None
    capacity = answer_slots(request.settings.max_new_tokens)
    state = decode.prefill(model.llm, ids, lengths, keys, capacity=capacity, prefix=shared)
    return decode.fan_out(state, copies=request.samples) if request.samples > 1 else state


def _prepare(model: Model, request: Request, stop_ids: Sequence[int]) -> Callable[..., tuple[decode.State, jax.Array]]:
    """The compiled program that generates one chunk from a state, with all of its other arguments."""
    settings, restrictions = request.settings, request.restrictions
    mask = allow(model.llm.architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
    labels = class_labels(model, request.prompts)
    return partial(
        decode.decode_tokens,
        model,
        settings=Refinement.prepare(model, settings),
        sampling=SamplingOptions.from_config(settings, allowed=mask),
        stop_ids=jnp.array(stop_ids, jnp.int32),
        steps=CHUNK,
        noise_samples=settings.draws,
        labels=None if labels is None else jnp.repeat(labels, request.samples),
    )


def _cut(
    rows: Sequence[list[int]], finished: np.ndarray, search: StopSearch, stop_ids: Sequence[int], *, is_last: bool
) -> tuple[list[list[int]], np.ndarray]:
    """The new tokens of each answer up to its end, and which answers have ended by now."""
    piece, ended = [], finished.copy()
    for i, row in enumerate(rows):
        stop = next((j for j, token in enumerate(row) if token in stop_ids), None)
        new, is_stopped = ([], True) if finished[i] else search.add(i, row[:stop], is_last=is_last or stop is not None)
        piece.append(new)
        ended[i] |= is_stopped or stop is not None
    return piece, ended
