"""Recomputes the release's recorded runs of adaptive solvers.

A plain loop follows torchdiffeq exactly: it steps past the end, where the velocity is zero, and interpolates back. Its
evaluations must equal the recorded ones, and diffrax's accepted steps must equal the loop's. Both are compared up to
t = 1 - 1/sigma; from there to t = 1, the last bits of a float32 network decide which steps are taken. diffrax shortens
the last step to end at t = 1. So the two end points must agree at a fine tolerance, with the expectation as velocity:
with the arg max, the velocity is piecewise constant, and the solvers chatter at its jumps.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from scipy.interpolate import KroghInterpolator

from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import make_target
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import ADAPTIVE, EmbeddedPair
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.parity.fixed_step_runs import combine, noted_velocity, start_of
from l2d_jax.parity.recording import Check, Recording, logits_at

# Tolerances of times, and of states relative to the largest: step lengths depend on the last bits of error estimates.
STEPS = 1e-3
FINE = 1e-5  # solver tolerance at which both end points must agree
MEET = 1e-2  # absolute difference within which they agree
BEYOND = 16.0  # no step of a recorded run goes beyond this time
ROOM = 1024  # largest number of steps of a recorded run
ROWS = {"b1": [0, 0], "b1r1": [1, 1], "b2": [0, 1]}  # two rows of the recorded batch, by part of the run's name
MIDDLE = {"fehlberg2": [0, 0.5, 0], "adaptive_heun": [0.5, 0], "bosh3": [0, 0.5, 0, 0]}  # torchdiffeq's weights at h/2


class Step(NamedTuple):
    """An accepted step of the plain loop."""

    start: float
    stop: float
    x: np.ndarray  # at the start
    new: np.ndarray  # at the end
    slopes: list[np.ndarray]
    evaluations: int  # evaluations of the loop so far


def adaptive_trajectories(model: Model, a: Recording) -> Iterator[Check]:
    """Check all recorded ODEs with adaptive steps."""
    for key, run in a.meta.get("odes", {}).items():
        if run.get("method") in ADAPTIVE:
            yield from adaptive_trajectory(model, a, key, run)


def adaptive_trajectory(model: Model, a: Recording, key: str, run: Mapping[str, Any]) -> Iterator[Check]:
    """Check one recorded ODE. Not judged: near ties, and the release's Qwen where it evaluates beyond t = 1."""
    assert model.path is not None
    options = {"solver": run["method"], "budget": 2 + ROOM * ADAPTIVE[run["method"]].stages, "tolerance": run["tol"]}
    rows = ROWS[next(part for part in key.split(".") if part in ROWS)]
    recorded, settings, context, noise, last = start_of(model, a, key, run, options, rows)
    end, count = float(run["final_timestep"]), recorded["x0"].shape[1]
    is_guarded = run["nfe"] - run["net_evals"] == np.sum(recorded["times"] >= 1)

    evaluations, steps = _loop(model, context, settings, noise, end=end)
    kept = slice(len(recorded["x0"])), slice(count)
    traj = np.stack([_interpolate(steps, float(t), settings.solver.name) for t in recorded["t_grid"]])[:, *kept]
    check = partial(Check, judged=bool(run["robust"] and is_guarded))
    near_end = 1 - 1 / model.path.config.sigma
    early = [step for step in steps if step.stop <= near_end]
    number = early[-1].evaluations if end > near_end else len(evaluations["times"])
    inside = recorded["t_grid"] <= near_end
    yield check(f"ode.{key}.times", evaluations["times"][:number], recorded["times"][:number], STEPS)
    yield check(f"ode.{key}.traj", traj[inside], recorded["traj"][inside])
    number = int(np.sum(recorded["times"][:number] < 1))  # beyond t = 1, the path is not evaluated
    yield check(f"ode.{key}.argmax", evaluations["argmax"][:, *kept][:number], recorded["argmax"][:number], 0.0)
    yield check(f"ode.{key}.temps", evaluations["temps"][:number], recorded["temps"][:number], 1e-6)
    yield Check(f"ode.{key}.logits", logits_at(model, context, last, end)[kept], recorded["logits"], judged=is_guarded)

    start = jnp.asarray(noise, jnp.float32)
    times, states = _follow(model, context, settings, start)
    times, states = times[: len(early)], states[: len(early)]
    yield check(f"ode.{key}.diffrax.times", times, np.array([step.stop for step in early]), STEPS)
    yield check(f"ode.{key}.diffrax.traj", states, np.stack([step.new for step in early]), STEPS, relative=True)
    if settings.velocity == "expectation" and end < 1:
        fine = dataclasses.replace(settings, tolerance=jnp.float32(FINE))
        theirs = _interpolate(_loop(model, context, fine, noise, end=end)[1], end, settings.solver.name)
        yield Check(f"ode.{key}.converged", _end(model, context, fine, start, jnp.float32(end)), theirs, MEET)


@jax.jit
def _follow(model: Model, context: Context, settings: Refinement, noise: Any) -> Any:
    """diffrax's accepted times and states, integrated far beyond the end, with one error norm for all rows."""
    options: Any = {"solver": settings.solver, "tolerance": settings.tolerance, "max_steps": ROOM}
    return integrate.adaptive_states(_target(model, context, settings), noise, end=BEYOND, **options)[:2]


@jax.jit
def _end(model: Model, context: Context, settings: Refinement, noise: Any, end: Any) -> Any:
    options: Any = {"solver": settings.solver, "tolerance": settings.tolerance, "max_steps": settings.steps}
    return integrate.solve_adaptive(_target(model, context, settings), noise, end=end, **options).x


def _target(model: Model, context: Context, settings: Refinement) -> integrate.Target:
    keys = jax.random.split(jax.random.key(0), context.hidden.shape[:2])
    return make_target(model, context, settings=settings, keys=keys)


def _loop(
    model: Model, context: Context, settings: Refinement, x: np.ndarray, *, end: float
) -> tuple[dict[str, np.ndarray], list[Step]]:
    """The plain loop: all evaluations and all accepted steps, in float64 except the path."""
    pair = settings.solver.method
    assert issubclass(pair, EmbeddedPair)
    tableau, order, tolerance = pair.tableau, pair.accuracy, float(settings.tolerance)
    velocity, seen = noted_velocity(model, context, settings)
    t, length, x = 0.0, integrate.FIRST_STEP, x.astype(np.float64)
    slope, steps = velocity(t, x), []
    while t < end and len(seen["times"]) < 4 * ROOM:
        slopes = [slope]
        for node, row in zip(tableau.c, tableau.a_lower, strict=True):
            slopes.append(velocity(t + node * length, x + length * combine(row, slopes)))
        new, error = (x + length * combine(tableau.b_sol, slopes), length * combine(tableau.b_error, slopes))
        ratio = np.sqrt(np.mean(np.square(error / (tolerance + tolerance * np.maximum(np.abs(x), np.abs(new))))))
        if is_kept := ratio <= 1:
            steps.append(Step(t, t + length, x, new, slopes, len(seen["times"])))
            t, x, slope = t + length, new, slopes[-1]
        shrunk = 10.0 if ratio == 0 else 0.9 / ratio ** (1 / order)
        length *= min(10.0, max(shrunk, 1.0 if is_kept else 0.2))
    return {name: np.stack(values) for name, values in seen.items()}, steps


def _interpolate(steps: list[Step], t: float, solver: str) -> np.ndarray:
    """Interpolate at t by the quartic through the ends and the middle of a step, with the slopes at both ends."""
    step = next((step for step in steps if t <= step.stop), steps[-1])
    length = step.stop - step.start
    middle = step.x + length * combine(MIDDLE[solver], step.slopes)
    values = np.stack([step.x, length * step.slopes[0], middle, step.new, length * step.slopes[-1]])
    return KroghInterpolator([0, 0, 0.5, 1, 1], values)((t - step.start) / length)  # at a repeated time: the slope
