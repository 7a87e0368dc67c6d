"""The trace of an answer: how much compute each of its tokens took, and when its arg max was settled.

Decoding keeps no record and pays nothing for this. An answer that it gave is integrated again, all tokens side by side
after one frozen pass over prompt and answer, from the same noise and with the same keys. The result is that of decoding
up to rounding, for products of other shapes round differently. Rounding decides only near ties, but an adaptive solver
whose velocity is a sampled token or an arg max may then take other steps.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.ranges import MOST_PARALLEL
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.pace import can_be_parallel
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import FIXED
from l2d_jax.decoding.requests import Request, check_prompts, class_labels, path_config
from l2d_jax.decoding.sampler import answer_keys
from l2d_jax.decoding.stop_strings import GrowingText
from l2d_jax.errors import require


class TokenTrace(NamedTuple):
    """What one token of an answer took."""

    token: int  # id of the token that was generated
    text: str  # what it adds to the answer: nothing if it is special, or ends within a character
    likeliest: int  # arg max of the final distribution; at temperature 0, without masks, the token itself
    evaluations: int  # of the path, the final one included
    passes: int  # over the path's weights that these take side by side, or one by one where they have to
    rejected: int  # steps that an adaptive solver rejected
    settled: float  # t from which on the arg max was `likeliest` at every recorded point: grid or accepted steps
    entropy: float  # of the final distribution at temperature 1, in nats
    plain_likeliest: int  # of the LM alone, likewise
    plain_entropy: float
    skipped: bool  # whether the gate left the token to the LM alone: no evaluation, settled at 0


def trace(loaded: LoadedModel, request: Request, answers: Sequence[Sequence[int]]) -> list[list[TokenTrace]]:
    """The trace of every token of the answers that `generation.generate_tokens` gave to the same request.

    Raises `InputError` as that does, for several noise samples per token, and a wrong number of answers.
    """
    model, settings, prompts, samples = loaded.decoder, request.settings, request.prompts, request.samples
    refinement = Refinement.prepare(model, settings)
    if model.path is not None and can_be_parallel(settings):
        refinement = refinement.side_by_side([settings.budget], window=MOST_PARALLEL)
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
        for start in range(0, len(answer), trajectory.CHUNK):  # beyond the answer's end are more, of its last token
            found = follow(known, start=jnp.int32(start))
            columns = {name: np.asarray(column).tolist() for name, column in found.items()}
            rows += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
        texts = [""] * len(answer)
        if loaded.tokenizer is not None:  # a character of several tokens is added by the last of them
            growing = GrowingText(loaded.tokenizer)
            texts = [growing.add([token], is_last=i == len(answer)) for i, token in enumerate(answer, 1)]
        traces.append([TokenTrace(token, text, **row) for token, text, row in zip(answer, texts, rows, strict=False)])
    return traces


def check_single_sample(settings: DecodeConfig) -> None:
    """Raise `InputError` for settings whose tokens have more than one ODE."""
    require(settings.draws == 1, f"a trace follows one noise sample per token, got draws {settings.draws}: use draws 1")


def mean_evaluations(loaded: LoadedModel, request: Request, answers: Sequence[Sequence[int]]) -> list[float]:
    """The mean evaluations per token of each answer, as an adaptive solver chooses them."""
    return [float(np.mean([token.evaluations for token in tokens])) for tokens in trace(loaded, request, answers)]


def accuracy_by_time(loaded: LoadedModel, request: Request, answers: Sequence[Sequence[int]]) -> dict[str, list[float]]:
    """`expected` and `greedy` accuracy of the tokens of answers at every `t` of the grid.

    Each is the accuracy of the distribution that the path gives at the state x_t on the way; the first is the LM's,
    unless the path is anchored.
    Raises `InputError` as `check_grid`, for a budget that cannot be spent, and where logits are not numbers.
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
    return {"t": [point / steps for point in range(steps + 1)], **means}


def check_grid(settings: DecodeConfig) -> None:
    """Raise `InputError` for an adaptive solver, whose points differ from token to token."""
    require(settings.solver in FIXED, f"accuracy against t needs a grid, {settings.solver} has none: use midpoint")
