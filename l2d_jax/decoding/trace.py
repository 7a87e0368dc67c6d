"""The trace of an answer: how much compute each token took, and at which t its most likely token was settled.

Decoding records nothing and pays nothing for this. A finished answer is integrated again, all tokens in parallel after
one frozen pass over prompt and answer, with the same noise and keys. The result equals that of decoding up to rounding,
because products of other shapes round differently. Rounding decides only near ties, but there an adaptive solver whose
velocity is a sampled token or an arg max may take other steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.ranges import MOST_PARALLEL
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.parallel.pace import can_be_parallel
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import FIXED, Grid
from l2d_jax.decoding.requests import Request, check_prompts, class_labels, path_config
from l2d_jax.decoding.sampler import answer_keys
from l2d_jax.decoding.stop_strings import GrowingText
from l2d_jax.errors import require
from l2d_jax.model.l2d import Model


@runtime_checkable
class Decodable(Protocol):
    """What a trace needs of a `LoadedModel`, which imports this module."""

    @property
    def decoder(self) -> Model:
        """The model that gave the answer."""

    @property
    def tokenizer(self) -> PreTrainedTokenizerFast | None:
        """The tokenizer, for the text of each token; None: no text."""


class TokenTrace(NamedTuple):
    """What happened to one token of an answer."""

    token: int  # id of the generated token
    text: str  # the text that it adds; empty if it is special or ends within a character
    likeliest: int  # arg max of the final distribution; at temperature 0, without masks, the token itself
    evaluations: int  # evaluations of the path, including the final one
    passes: int | None  # over the path's weights if evaluations run in parallel wherever possible; None: not counted
    rejected: int  # steps that an adaptive solver rejected
    settled: float  # t from which on the arg max was `likeliest` at every recorded point (grid or accepted steps)
    entropy: float  # entropy of the final distribution at temperature 1, in nats
    plain_likeliest: int  # arg max of the LM alone
    plain_entropy: float  # entropy of the LM alone at temperature 1, in nats
    skipped: bool  # whether the gate left the token to the LM: no evaluation, settled at 0


def trace(
    loaded: Decodable, request: Request, answers: Sequence[Sequence[int]], *, counts_passes: bool = True
) -> list[list[TokenTrace]]:
    """Trace every token of `answers`, which `generation.generate_tokens` must have given to the same request.

    Counting passes takes as long as the rest: it evaluates every guess that decoding would.
    Raises `InputError` as `generate_tokens` does, for several noise samples per token, and for a wrong number of
    answers.
    """
    model, settings, prompts, samples = loaded.decoder, request.settings, request.prompts, request.samples
    refinement = Refinement.prepare(model, settings)
    if counts_passes and model.path is not None and can_be_parallel(settings):
        refinement = refinement.side_by_side([Grid(settings.budget, settings.end)], window=MOST_PARALLEL)
    model = model.reading(refines=settings.budget > 1)
    check_single_sample(settings)
    count = samples * len(prompts)
    problem = f"{len(prompts)} prompts with {samples} samples each take {count} answers, got {len(answers)}"
    require(samples > 0 and len(answers) == count, problem)
    longest = max(1, *map(len, answers)) if answers else 1
    check_prompts([prompt.ids for prompt in prompts], model.llm.architecture, new_tokens=longest)
    class_labels(path_config(model), prompts)
    gate, steps = jnp.float32(settings.gate), refinement.solver.steps(settings.budget)
    most = 1 << (steps - 1).bit_length() if steps > 0 else 0
    follow = partial(trajectory.trace_tokens, model, settings=refinement, gate=gate, most=most)
    traces = []
    for number, answer in enumerate(answers):
        prompt, copy = prompts[number // samples], number % samples
        [key] = answer_keys(jnp.uint32([request.seed]), jnp.int32([prompt.number]), jnp.int32([copy]))
        known = trajectory.read_answer(model, prompt.ids, answer, key=key, label=prompt.label)
        rows: list[dict[str, Any]] = []
        for start in range(0, len(answer), trajectory.CHUNK):  # rows beyond the end repeat the last token
            found = follow(known, start=jnp.int32(start))
            columns = {name: np.asarray(column).tolist() for name, column in found.items()}
            if not counts_passes:
                columns["passes"] = [None] * trajectory.CHUNK
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        texts = [""] * len(answer)
        if loaded.tokenizer is not None:  # the last token of a character adds its text
            growing = GrowingText(loaded.tokenizer)
            texts = [growing.add([token], is_last=i == len(answer)) for i, token in enumerate(answer, 1)]
        traces.append([TokenTrace(token, text, **row) for token, text, row in zip(answer, texts, rows, strict=False)])
    return traces


def check_single_sample(settings: DecodeConfig) -> None:
    """Raise `InputError` for settings with more than one noise sample, and so more than one ODE, per token."""
    require(settings.draws == 1, f"a trace follows one noise sample per token, got draws {settings.draws}: use draws 1")


def mean_evaluations(loaded: Decodable, request: Request, answers: Sequence[Sequence[int]]) -> list[float]:
    """The mean number of evaluations per token for each answer; an adaptive solver chooses them."""
    traces = trace(loaded, request, answers, counts_passes=False)
    return [float(np.mean([token.evaluations for token in tokens])) for tokens in traces]


def accuracy_by_time(loaded: Decodable, request: Request, answers: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """Teacher-forced accuracy at every `t` of the grid: `expected` (probability of the token) and `greedy` (arg max).

    At each t it is the accuracy of the distribution that the path gives at x_t. At the first t this is the LM's, unless
    the path is anchored.
    Raises `InputError` as `check_grid` does, for a budget that cannot be spent, and if logits are NaN.
    """
    check_grid(request.settings)
    refinement = Refinement.prepare(loaded.decoder, request.settings)
    steps = refinement.solver.steps(request.settings.budget)
    model = loaded.decoder.reading(refines=steps > 0)
    accuracies: dict[str, list[np.ndarray]] = {"expected": [], "greedy": []}
    for prompt, answer in zip(request.prompts, answers, strict=True):
        key = jax.random.fold_in(jax.random.key(request.seed), prompt.number)
        known = trajectory.read_answer(model, prompt.ids, answer, key=key, label=prompt.label)
        for start in range(0, len(answer), trajectory.CHUNK):
            targets = np.resize(np.array(answer[start : start + trajectory.CHUNK], np.int32), trajectory.CHUNK)
            count = min(len(answer) - start, trajectory.CHUNK)
            options: dict[str, Any] = {"start": jnp.int32(start), "settings": refinement, "steps": steps}
            for name, values in trajectory.score_points(model, known, jnp.array(targets), **options).items():
                accuracies[name].append(np.asarray(values)[:, :count])
    means = {name: np.concatenate(parts, axis=1).mean(axis=1).tolist() for name, parts in accuracies.items()}
    require(bool(np.isfinite(means["expected"]).all()), "logits of answers were not numbers: check the weights")
    return {"t": [request.settings.end * point / steps for point in range(steps + 1)], **means}


def check_grid(settings: DecodeConfig) -> None:
    """Raise `InputError` for an adaptive solver, whose points differ from token to token, and for a budget of 1."""
    require(settings.solver in FIXED, f"accuracy against t needs a grid, {settings.solver} has none: use midpoint")
    require(settings.budget > 1, "accuracy against t needs steps, and a budget of 1 has none: raise the budget")
