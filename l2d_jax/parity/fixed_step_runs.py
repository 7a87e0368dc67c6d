"""Recomputes the recorded runs of the release: trajectories of the ODE, and whole generations.

A trajectory is checked in two ways. The states on the grid come from diffrax, with the program that decodes. Times,
temperatures and chosen tokens of every evaluation come from a plain loop over the solver's tableau, from these states.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import softmax

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import make_target
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import FIXED
from l2d_jax.decoding.state import State
from l2d_jax.decoding.token_step import advance, next_logits
from l2d_jax.errors import require
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.parity.recording import Check, Recording, logits_at, read

METHODS = {"euler": "euler", "midpoint": "midpoint", "rk4": "rk4", "heun2": "heun", "heun3": "heun3"}  # fixed grids
DRAWS = 32  # every run has this number of places for draws, so that programs compile once


class Draws(NamedTuple):
    """The tokens that a recorded run sampled for its velocity, by evaluation."""

    times: np.ndarray  # [DRAWS], times of the evaluations; infinite beyond the last
    tokens: np.ndarray  # [DRAWS, B]
    drawn: np.ndarray  # [DRAWS], whether there is such a draw


def trajectories(model: Model, a: Recording) -> Iterator[Check]:
    """Check all recorded ODEs with a fixed grid."""
    runs = a.meta.get("odes", {})
    for key in sorted({name.rsplit(".", 1)[0].removeprefix("ode.") for name in a if name.startswith("ode.")}):
        require(key in runs, f"{a.file} has a run {key!r}, which its meta.json does not describe: add it there")
        if runs[key].get("method") in METHODS:
            yield from trajectory(model, a, key, runs[key])


def trajectory(model: Model, a: Recording, key: str, run: Mapping[str, Any]) -> Iterator[Check]:
    """Check one recorded ODE: the states on the grid, the final logits, and every evaluation of the plain loop.

    The final evaluation uses the recorded end state. At t = 1 it magnifies a change of x up to 400 times, so the last
    bits of our end state would already be as large as the tolerance.
    """
    grid, end = a[f"ode.{key}.t_grid"], float(run["final_timestep"])
    options = {"solver": METHODS[run["method"]], "budget": 1 + FIXED[METHODS[run["method"]]].stages * (len(grid) - 1)}
    options |= {"anneal": True, "velocity_temperature": 1.0} if "poly" in key else {}
    recorded, settings, context, noise, last = start_of(model, a, key, run, options)
    count = recorded["x0"].shape[1]
    samples = a[f"ode.{key}.samples"] if f"ode.{key}.samples" in a else np.zeros((0, len(recorded["x0"])))
    times = np.append(recorded["times"], [np.inf] * DRAWS)[:DRAWS].astype(np.float32)
    tokens = np.pad(np.asarray(samples, np.int32), [(0, DRAWS - len(samples)), (0, 0)])
    draws = Draws(times, tokens, np.arange(DRAWS) < len(samples))
    states = np.asarray(_states(model, context, settings, draws, noise, jnp.float32(end), steps=len(grid) - 1))
    loop = _loop(model, context, settings, draws, states, grid)
    check = partial(Check, judged=run["robust"])
    yield check(f"ode.{key}.traj", states[:, :, :count], recorded["traj"])
    final = logits_at(model, context, last, end, context.labels)
    yield check(f"ode.{key}.logits", final[:, :count], recorded["logits"])
    yield check(f"ode.{key}.argmax", loop["argmax"][..., :count], recorded["argmax"], 0.0)
    for name in ("times", "temps"):
        yield check(f"ode.{key}.{name}", loop[name], recorded[name], 1e-6)


def start_of(
    model: Model, a: Recording, key: str, run: Mapping[str, Any], options: dict[str, Any], rows: Sequence[int] = (0, 1)
) -> tuple[dict[str, np.ndarray], Refinement, Context, np.ndarray, np.ndarray]:
    """The start of a recorded ODE: its arrays, settings with `options`, context of some rows, noise, and end state."""
    recorded = {name: a[f"ode.{key}.{name}"] for name in ("x0", "t_grid", "traj", "logits", "times", "argmax", "temps")}
    temperature = 0.0 if isinstance(run["temperature"], str) else float(run["temperature"])
    velocity = "expectation" if run["x1_estimation"] == "average" else "sample"
    options = {"velocity": velocity, "velocity_temperature": temperature} | options
    padded = a["lp.input_ids"], a["lp.attention_mask"]
    context = read(model.llm, *(padded if ".pad" in key else (a["input_ids"][rows, :],)), last=run["mode"] == "last")
    if run["class_labels"] is not None:
        labels = jnp.array(run["class_labels"], jnp.int32)[:, None]
        context = context._replace(labels=jnp.broadcast_to(labels, context.hidden.shape[:2]))
    shape = (*context.hidden.shape[:2], recorded["x0"].shape[-1])
    noise, last = (np.broadcast_to(x, shape) for x in (recorded["x0"], recorded["traj"][-1]))
    return recorded, _refinement(options, guidance=run["w_g"]), context, noise, last


def _refinement(options: dict[str, Any], *, guidance: float | None) -> Refinement:
    options |= {} if guidance is None else {"guidance": float(guidance)}
    return Refinement.from_config(from_dict(DecodeConfig, options, prefix="run"))


@partial(jax.jit, static_argnames="steps")
def _states(
    model: Model, context: Context, settings: Refinement, draws: Draws, noise: Any, end: Any, *, steps: int
) -> Any:
    keys = jax.random.split(jax.random.key(0), context.hidden.shape[:2])
    target = make_target(model, context, settings=dataclasses.replace(settings, end=end), keys=keys)

    def injected(t: Any, x: Any) -> Any:  # recorded tokens; after them the temperature was zero
        assert model.table is not None
        at = jnp.argmin(jnp.abs(draws.times - t))
        return jnp.where(draws.drawn[at], model.table[draws.tokens[at]][:, None], target(t, x))

    return integrate.fixed_states(injected, noise, solver=settings.solver, steps=steps, end=end)


def _loop(
    model: Model, context: Context, settings: Refinement, draws: Draws, states: np.ndarray, grid: np.ndarray
) -> dict[str, np.ndarray]:
    """Times, temperatures and arg max of every evaluation, stage by stage, starting from the states on the grid."""
    tableau = getattr(settings.solver.method, "tableau", None)
    nodes, lower = ([], []) if tableau is None else (tableau.c, tableau.a_lower)
    velocity, seen = noted_velocity(model, context, settings, draws=draws, length=grid[-1] / (len(grid) - 1))
    for start, stop, x in zip(grid, grid[1:], states, strict=False):
        slopes: list[np.ndarray] = []
        for node, row in zip([0.0, *nodes], [[], *lower], strict=True):
            t = np.float32(stop if node == 1 else start + node * (stop - start))
            slopes.append(velocity(t, x + (stop - start) * combine(row, slopes)))
    return {name: np.stack(values) for name, values in seen.items()}


def combine(shares: Any, slopes: list[np.ndarray]) -> Any:
    """The weighted sum of slopes."""
    return sum(share * slope for share, slope in zip(shares, slopes, strict=True))


def noted_velocity(
    model: Model, context: Context, settings: Refinement, *, draws: Draws | None = None, length: Any = 0.0
) -> tuple[Callable[[Any, np.ndarray], np.ndarray], dict[str, list[np.ndarray]]]:
    """A velocity function of t and x, and its record of all evaluations; `length` is that of a grid interval."""
    table = np.asarray(model.table)
    seen: dict[str, list[np.ndarray]] = {"times": [], "temps": [], "argmax": []}

    def velocity(t: Any, x: np.ndarray) -> np.ndarray:
        seen["times"].append(np.asarray(t))
        if 1 - t <= diffusion.END:
            return np.zeros_like(x)
        branches = [logits_at(model, context, x, t, context.labels)]
        if context.labels is not None:
            branches.append(logits_at(model, context, x, t))
        temperature = float(settings.temperature(jnp.float32([[t]]), jnp.float32([[length]]))[0, 0])
        number = len(seen["temps"])
        if settings.velocity == "sample" or temperature == 0:  # the vector of the most likely token
            targets = [table[np.argmax(logits, axis=-1)] for logits in branches]
        else:  # the mean over the vocabulary
            targets = [softmax(np.asarray(logits) / temperature, axis=-1) @ table for logits in branches]
        if draws is not None and draws.drawn[number]:
            targets = [table[draws.tokens[number]][:, None]]
        seen["temps"] += [np.asarray(temperature)] * len(branches)
        seen["argmax"] += [np.argmax(logits, axis=-1) for logits in branches]
        strength = np.asarray(settings.guidance)
        target = targets[0] if len(targets) == 1 else strength * targets[0] + (1 - strength) * targets[1]
        return (target - x) / (1 - t)

    return velocity, seen


def generations(model: Model, a: Recording) -> Iterator[Check]:
    """Check whole generations, token by token, with the recorded noise; "base" is the LM alone."""
    assert model.path is not None
    recorded = a.meta.get("decode") or {"outputs": {}}
    for name, theirs in recorded["outputs"].items():
        prompts, count = recorded["prompts"], recorded["max_new_tokens"]
        rows, lengths = len(prompts), [len(prompt) for prompt in prompts]
        ids = jnp.array(list(zip_longest(*prompts, fillvalue=0)), jnp.int32).T
        budget, noise = 1, np.zeros((count, rows, model.path.config.width), np.float32)
        solver = "euler" if name == "base" else name.rstrip("0123456789")
        if name != "base":
            budget = 1 + FIXED[solver].stages * (int(name.removeprefix(solver)) - 1)
            noise = a[f"dec.{name}.noise"][:, :, 0]
        settings = _refinement({"solver": solver, "budget": budget}, guidance=recorded["guidance_parameter"])
        labels = recorded["class_labels"] and jnp.array(recorded["class_labels"], jnp.int32)
        keys = jax.random.split(jax.random.key(0), rows)
        state = prefill(model.llm, ids, jnp.array(lengths, jnp.int32), keys, capacity=count)
        chosen = []
        for step in range(count):
            state, token = _next(model, state, settings, jnp.asarray(noise[step]), labels)
            chosen.append(token)
        yield Check(f"dec.{name}", np.stack(chosen, axis=1), theirs, 0.0)


@jax.jit
def _next(model: Model, state: State, settings: Refinement, noise: Any, labels: Any) -> tuple[Any, Any]:
    keys = state.keys[:, None]
    logits, _ = next_logits(model, state, noise[:, None], settings=settings, keys=keys, labels=labels)
    token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    return advance(model.llm, state, token, state.done), token
