"""What happens within one diffusion: how right it is at each t on its way, and how many evaluations each token takes.

Teacher-forced, on given answers: every token is refined with the true tokens before it.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax import rules, trajectory
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.generation import Loaded, check_settings
from l2d_jax.refine import tabulate
from l2d_jax.trace import read, trace


def accuracy_by_time(
    loaded: Loaded,
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
    refinement = check_settings(settings, has_path=loaded.model.path is not None)
    steps = rules.steps_of(settings.solver, settings.budget)
    options: dict[str, Any] = {
        "settings": tabulate(loaded.model, refinement, budget=settings.budget),
        "steps": steps,
    }
    found: dict[str, list[np.ndarray]] = {"expected": [], "greedy": []}
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        given = read(loaded.model, prompt, answer, key=jax.random.fold_in(jax.random.key(seed), number))
        for start in range(0, len(answer), trajectory.CHUNK):
            targets = np.resize(np.array(answer[start : start + trajectory.CHUNK], np.int32), trajectory.CHUNK)
            count = min(len(answer) - start, trajectory.CHUNK)
            scores = trajectory.score_points(loaded.model, given, jnp.array(targets), start=jnp.int32(start), **options)
            for name, values in scores.items():
                found[name].append(np.asarray(values)[:, :count])
    means = {name: np.concatenate(parts, axis=1).mean(axis=1).tolist() for name, parts in found.items()}
    return {"t": [point / steps for point in range(steps + 1)], **means}


def check_grid(settings: DecodeConfig) -> None:
    """Raise `InputError` for a solver whose points are not the same for all tokens."""
    if settings.solver not in rules.FIXED:
        raise InputError(f"accuracy against t needs a grid, which {settings.solver} has not: use midpoint")


def evaluations(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig,
    seed: int = 0,
) -> list[float]:
    """The mean evaluations per token of each answer, as an adaptive solver chooses them."""
    traces = trace(loaded, prompts, answers, settings=settings, seed=seed)
    return [float(np.mean([token.evaluations for token in tokens])) for tokens in traces]
