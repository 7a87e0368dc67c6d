"""Accuracy on the way through one diffusion: what the path would answer at each t of a uniform grid."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import trajectory
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refine import Refinement
from l2d_jax.decoding.solver import FIXED
from l2d_jax.errors import InputError


def accuracy_by_time(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig,
    seed: int = 0,
) -> dict[str, list[float]]:
    """`expected` and `greedy` accuracy of the tokens of answers at every `t` of the grid.

    Each is the accuracy of the distribution that the path gives at the state x_t on the way; the first is the LM's,
    unless the path is anchored.
    Raises `InputError` as `check_grid`, and for a budget that cannot be spent.
    """
    check_grid(settings)
    refinement = Refinement.prepare(loaded.model, settings)
    steps = refinement.solver.steps(settings.budget)
    model = loaded.model.reading(refines=steps > 0)
    accuracies: dict[str, list[np.ndarray]] = {"expected": [], "greedy": []}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        known = trajectory.read_answer(model, prompt, answer, key=jax.random.fold_in(jax.random.key(seed), number))
        for start in range(0, len(answer), trajectory.CHUNK):
            targets = np.resize(np.array(answer[start : start + trajectory.CHUNK], np.int32), trajectory.CHUNK)
            count = min(len(answer) - start, trajectory.CHUNK)
            scores = trajectory.score_points(
                model, known, jnp.array(targets), start=jnp.int32(start), settings=refinement, steps=steps
            )
            for name, values in scores.items():
                accuracies[name].append(np.asarray(values)[:, :count])
    means = {name: np.concatenate(parts, axis=1).mean(axis=1).tolist() for name, parts in accuracies.items()}
    return {"t": [point / steps for point in range(steps + 1)], **means}


def check_grid(settings: DecodeConfig) -> None:
    """Raise `InputError` for an adaptive solver, whose points differ from token to token."""
    if settings.solver not in FIXED:
        raise InputError(f"accuracy against t needs a grid, which {settings.solver} does not have: use midpoint")
