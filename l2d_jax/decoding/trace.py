"""Follows the ODE of every token of an answer: how much compute it took, and when its arg max was settled.

Decoding keeps no record and pays nothing for this: an answer that it gave is integrated again, all tokens side by side,
after one frozen pass over prompt and answer, from the same noise and with the same keys. That is what decoding did up
to the rounding of products of other shapes. Rounding decides near ties alone, but an adaptive solver whose velocity is
a drawn token or an arg max may turn it into other steps.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Key
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.buckets import pad
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refine import Refinement
from l2d_jax.decoding.requests import Request, check_prompts, class_labels, number_prompts
from l2d_jax.decoding.solver import FIXED
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model


class TokenTrace(NamedTuple):
    """What one token of an answer took."""

    token: int  # id of the token that was generated
    text: str  # what it adds to the answer: nothing if it is special, or ends within a character
    likeliest: int  # arg max of the final distribution; at temperature 0, without masks, the token itself
    evaluations: int  # of the path, the final one included
    rejected: int  # steps of an adaptive solver that were taken back
    settled: float  # t from which on the arg max was `likeliest` at every recorded point: grid or accepted steps
    entropy: float  # of the final distribution at temperature 1, in nats
    plain_entropy: float  # of the LM alone, likewise
    skipped: bool  # whether the gate left the token to the LM alone: no evaluation, settled at 0


def trace(loaded: LoadedModel, request: Request, answers: Sequence[Sequence[int]]) -> list[list[TokenTrace]]:
    """The trace of every token of the answers that `generation.generate_tokens` gave to the same request.

    Raises:
      InputError: as `generation.stream_tokens`, for several noise draws, and for another number of answers.
    """
    model, settings, prompts, samples = loaded.model, request.settings, request.prompts, request.samples
    refinement = Refinement.prepare(model, settings)
    check_draws(settings)
    if samples < 1 or len(answers) != samples * len(prompts):
        raise InputError(f"{len(prompts)} prompts with {samples} samples each have not {len(answers)} answers")
    longest = max(1, *map(len, answers)) if answers else 1
    ids = [prompt.ids for prompt in prompts]
    check_prompts(ids, dataclasses.replace(settings, max_new_tokens=longest), model.llm.architecture)
    class_labels(model, prompts)
    follow = partial(
        trajectory.trace_tokens,
        model,
        settings=refinement,
        gate=jnp.float32(settings.gate),
        steps=refinement.solver.steps(settings.budget),
    )
    traces = []
    for number, answer in enumerate(answers):
        prompt, copy = prompts[number // samples], number % samples
        key = jax.random.fold_in(jax.random.key(request.seed), prompt.number)
        key = jax.random.fold_in(key, copy) if copy else key  # of `decode.fan_out`
        given = read(model, prompt.ids, answer, key=key, label=prompt.label)
        starts = range(0, len(answer), trajectory.CHUNK)
        pieces = [follow(given, start=jnp.int32(start)) for start in starts]
        traces.append(_token_traces(answer, _pieces_of_text(answer, loaded.tokenizer), pieces))
    return traces


def read(
    model: Model, prompt: Sequence[int], answer: Sequence[int], *, key: Key[Array, ""], label: int | None = None
) -> trajectory.KnownAnswer:
    """An answer whose tokens are known, ready to be followed."""
    return trajectory.read_answer(
        model.llm,
        *pad([[*prompt, *answer[:-1]]]),
        length=jnp.int32(len(answer)),
        key=key,
        label=None if label is None else jnp.int32(label),
    )


def check_draws(settings: DecodeConfig) -> None:
    """Raise `InputError` for settings whose tokens have more than one ODE."""
    if settings.draws > 1:
        raise InputError(f"a trace follows one noise draw per token, got draws {settings.draws}: trace with draws 1")


def _token_traces(answer: Sequence[int], texts: Sequence[str], pieces: Sequence[Mapping[str, Any]]) -> list[TokenTrace]:
    """Rows from the columns of each piece; the last piece is padded."""
    columns = [{name: np.asarray(column).tolist() for name, column in piece.items()} for piece in pieces]
    rows = [dict(zip(piece, values, strict=True)) for piece in columns for values in zip(*piece.values(), strict=True)]
    return [TokenTrace(token=token, text=text, **row) for token, text, row in zip(answer, texts, rows, strict=False)]


def _pieces_of_text(answer: Sequence[int], tokenizer: PreTrainedTokenizerFast | None) -> list[str]:
    """What each token adds to the text, which a character of several tokens joins with the last of them."""
    if tokenizer is None:
        return [""] * len(answer)
    pieces, shown = [], ""
    for count in range(1, len(answer) + 1):
        text = to_text(answer[:count], tokenizer)
        is_whole = not text.endswith("\ufffd") or count == len(answer)
        pieces.append(text[len(shown) :] if is_whole else "")
        shown = text if is_whole else shown
    return pieces


def accuracy_by_time(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig,
    seed: int = 0,
) -> dict[str, list[float]]:
    """`expected` and `greedy` accuracy of the tokens of answers at every `t` of one run of the ODE.

    Each is that of reading the distribution off where the run is at t. The first is the LM's own. Raises `InputError`
    for an adaptive solver, whose points differ from token to token, and for a budget that is unreachable.
    """
    check_grid(settings)
    refinement = Refinement.prepare(loaded.model, settings)
    steps = refinement.solver.steps(settings.budget)
    found: dict[str, list[np.ndarray]] = {"expected": [], "greedy": []}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        given = read(loaded.model, prompt, answer, key=jax.random.fold_in(jax.random.key(seed), number))
        for start in range(0, len(answer), trajectory.CHUNK):
            targets = np.resize(np.array(answer[start : start + trajectory.CHUNK], np.int32), trajectory.CHUNK)
            count = min(len(answer) - start, trajectory.CHUNK)
            scores = trajectory.score_points(
                loaded.model, given, jnp.array(targets), start=jnp.int32(start), settings=refinement, steps=steps
            )
            for name, values in scores.items():
                found[name].append(np.asarray(values)[:, :count])
    means = {name: np.concatenate(parts, axis=1).mean(axis=1).tolist() for name, parts in found.items()}
    return {"t": [point / steps for point in range(steps + 1)], **means}


def check_grid(settings: DecodeConfig) -> None:
    """Raise `InputError` for a solver whose points are not the same for all tokens."""
    if settings.solver not in FIXED:
        raise InputError(f"accuracy against t needs a grid, which {settings.solver} has not: use midpoint")


def evaluations(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig,
    seed: int = 0,
) -> list[float]:
    """The mean evaluations per token of each answer, as an adaptive solver chooses them."""
    traces = trace(loaded, Request(number_prompts(prompts), settings, seed), answers)
    return [float(np.mean([token.evaluations for token in tokens])) for tokens in traces]
