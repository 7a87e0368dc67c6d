"""Generates token ids: a prefill of the prompts, then chunks of tokens until every answer has ended.

The rows of a batch are computed apart: an answer is a function of its prompt, its number, the seed and the settings, up
to rounding, which depends on the shape of the batch (rows, padded length, common prefix). In float32 that changes a
logit by some 1e-5, so that a token changes only where two are as good as equal. In bfloat16 and int8 it may change one
by some tenths, and answers with it.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int
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
    model: Model, request: Request, *, stop_ids: Sequence[int] = (), tokenizer: PreTrainedTokenizerFast | None = None
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
    model: Model, request: Request, *, stop_ids: Sequence[int] = (), tokenizer: PreTrainedTokenizerFast | None = None
) -> Iterator[list[list[int]]]:
    """Yield the next few token ids of every answer until all answers have ended.

    One of the `stop_ids` ends an answer, and is left out of it; the tokenizer is for stop strings.

    Raises:
      InputError: for an empty prompt, one that leaves no positions for its answer, a budget that the solver or the
        model does not know, an unknown class or token, a stop string that cannot occur; and, once all other answers
        have ended, for those whose logits were not numbers.
    """
    stop_ids = stop_ids or (-1,)  # -1 is what an ended answer goes on with where the model has no stop token
    count = len(request.prompts) * check_value(request.samples, ranges.Rows, "samples")
    search = StopSearch(request.restrictions.stops, tokenizer, count, keeps_stop=request.restrictions.keeps_stop)
    model, state, refinement, sampling, labels = start_request(model, request)
    decode_chunk = partial(
        decode.decode_tokens,
        model,
        settings=refinement,
        sampling=sampling,
        stop_ids=jnp.array(stop_ids, jnp.int32),
        steps=CHUNK,
        noise_samples=request.settings.draws,
        labels=labels,
    )
    finished = np.zeros(count, bool)
    for left in range(request.settings.max_new_tokens, 0, -CHUNK):
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


def start_request(
    model: Model, request: Request
) -> tuple[Model, decode.State, Refinement, SamplingOptions, Int[jax.Array, " B"] | None]:
    """The model that reads the context, the state behind the prompts, and how to go on from there.

    The state has a row for each answer and a whole number of chunks for its tokens; so have the class labels, if any.
    Raises `InputError` as `stream_tokens` does, before the prompts are read.
    """
    settings, restrictions, prompts, prefix = request.settings, request.restrictions, request.prompts, request.prefix
    architecture, path = model.llm.architecture, None if model.path is None else model.path.config
    check_budget(settings, has_path=path is not None)
    check_prompts([prompt.ids for prompt in prompts], settings, architecture)
    check_seed(request.seed)
    labels = class_labels(model, prompts)
    mask = allow(architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
    count, longest = len(prompts) * request.samples, max(len(prompt.ids) for prompt in prompts) - prefix
    remedy = "the number of prompts, samples, draws or max_new_tokens"
    check_decoding_memory(model.llm, path, settings, rows=count, longest=longest, remedy=remedy)
    model = model.reading(refines=settings.budget > 1)
    ids, lengths = pad([prompt.ids[prefix:] for prompt in prompts])
    numbers = jnp.array([prompt.number for prompt in prompts])
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), numbers)
    shared = jnp.array(prompts[0].ids[:prefix], jnp.int32) if prefix else None
    capacity = answer_slots(settings.max_new_tokens)
    state = decode.prefill(model.llm, ids, lengths, keys, capacity=capacity, prefix=shared)
    if request.samples > 1:
        state = decode.fan_out(state, copies=request.samples)
        labels = None if labels is None else jnp.repeat(labels, request.samples)
    return (
        model,
        state,
        Refinement.prepare(model, settings),
        SamplingOptions.from_config(settings, allowed=mask),
        labels,
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
