"""diffrax against loops of a few lines; what a budget buys; and that one program serves them all."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.decoding.refinement.integrate import adaptive_states, fixed_states, solve_adaptive, solve_fixed
from l2d_jax.decoding.refinement.solver import ADAPTIVE, FIXED, SOLVERS
from tests.support.marks import slow

EACH_KIND = ("midpoint", "restart", "bosh3")

# --- the loops: dx/dt = (target - x) / (1 - t), in float64 NumPy ---

Velocity = Callable[[float, np.ndarray], np.ndarray]


def euler(v: Velocity, t: float, x: np.ndarray, h: float) -> np.ndarray:
    return x + h * v(t, x)


def midpoint(v: Velocity, t: float, x: np.ndarray, h: float) -> np.ndarray:
    return x + h * v(t + h / 2, x + h / 2 * v(t, x))


def heun(v: Velocity, t: float, x: np.ndarray, h: float) -> np.ndarray:
    k1 = v(t, x)
    return x + h / 2 * (k1 + v(t + h, x + h * k1))


def heun3(v: Velocity, t: float, x: np.ndarray, h: float) -> np.ndarray:
    k1 = v(t, x)
    k2 = v(t + h / 3, x + h / 3 * k1)
    return x + h / 4 * (k1 + 3 * v(t + 2 * h / 3, x + 2 * h / 3 * k2))


def rk4(v: Velocity, t: float, x: np.ndarray, h: float) -> np.ndarray:
    k1 = v(t, x)
    k2 = v(t + h / 3, x + h / 3 * k1)
    k3 = v(t + 2 * h / 3, x + h * (k2 - k1 / 3))
    return x + h / 8 * (k1 + 3 * k2 + 3 * k3 + v(t + h, x + h * (k1 - k2 + k3)))


METHODS = {"euler": euler, "midpoint": midpoint, "heun": heun, "heun3": heun3, "rk4": rk4}


def restarts(target: Any, noise: np.ndarray, steps: int, end: float = 1.0) -> list[np.ndarray]:
    states, t = [np.asarray(noise, np.float64)], 0.0
    for i in range(steps):
        estimate, t = target(t, states[-1]), (i + 1) * end / steps
        states.append((1 - t) * states[0] + t * estimate)
    return states


def loop(solver: str, target: Any, x: np.ndarray, steps: int, end: float = 1.0) -> list[np.ndarray]:
    """The states on the grid."""

    def velocity(t: float, x: np.ndarray) -> np.ndarray:
        return (target(t, x) - x) / (1 - t) if t < 1 - 1e-6 else np.zeros_like(x)

    if solver == "restart":
        return restarts(target, x, steps, end)
    states = [np.asarray(x, np.float64)]
    for i in range(steps):
        states.append(METHODS[solver](velocity, i * end / steps, states[-1], end / steps))
    return states


# --- targets ---

RNG = np.random.default_rng(0)
MATRIX = RNG.normal(size=(6, 6))
TABLE = RNG.normal(size=(9, 6))
NOISE = 64 * RNG.normal(size=(2, 3, 6))


def smooth(t: Any, x: Any) -> Any:
    """Bends with x all the way from sigma = 64 down to one."""
    xp = jnp if isinstance(x, jax.Array) else np
    bent = x / xp.sqrt(1 + x * x)
    return bent @ xp.asarray(MATRIX, dtype=x.dtype) / 3 + xp.sin(2 * t)


def nearest(t: Any, x: Any) -> Any:
    """A vocabulary vector, as the arg max velocity picks it; another one at each t."""
    xp = jnp if isinstance(x, jax.Array) else np
    table = xp.asarray(TABLE, dtype=x.dtype)
    turn = xp.round(14 * t).astype(int) if xp is jnp else round(14 * t)
    return table[(xp.argmax(x @ table.T, axis=-1) + turn) % len(TABLE)]


def ours(target: Any, noise: np.ndarray, *, solver: str, **settings: Any) -> np.ndarray:
    return np.asarray(
        jax.jit(partial(solve_fixed, target, solver=FIXED[solver], **settings))(jnp.asarray(noise, jnp.float32))
    )


# --- diffrax equals the loops ---


@pytest.mark.slow
@pytest.mark.parametrize("solver", FIXED)
@pytest.mark.parametrize("end", [1.0, 63 / 64])
def test_each_solver_equals_its_loop(solver: str, end: float) -> None:
    run = jax.jit(partial(solve_fixed, smooth, solver=FIXED[solver]))
    for steps in (1, 2, 5, 14):
        wanted = loop(solver, smooth, NOISE, steps, end)[-1]
        found = run(jnp.asarray(NOISE, jnp.float32), steps=steps, end=end)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=3e-5 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("solver", FIXED)
def test_a_trajectory_has_every_point_of_the_grid(solver: str) -> None:
    states = jax.jit(partial(fixed_states, smooth, solver=FIXED[solver], steps=4))(jnp.asarray(NOISE, jnp.float32))
    np.testing.assert_allclose(states, np.stack(loop(solver, smooth, NOISE, 4)), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_no_interval_leaves_the_noise_as_it_is() -> None:
    noise = NOISE.astype(np.float32)
    for solver in FIXED:
        np.testing.assert_array_equal(ours(smooth, noise, solver=solver, steps=0), noise)


def test_the_scaled_state_loses_nothing_of_the_noise() -> None:
    """x_0 is 64 times larger than what remains of x at the end, where float32 must still resolve it."""
    wanted = loop("midpoint", smooth, NOISE, 60)[-1]
    np.testing.assert_allclose(ours(smooth, NOISE, solver="midpoint", steps=60), wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "order"), [("euler", 1), ("midpoint", 2), ("heun", 2), ("heun3", 3), ("rk4", 4)])
def test_order_of_convergence(solver: str, order: int) -> None:
    noise = RNG.normal(size=(4, 6))
    exact = loop("rk4", smooth, noise, 400, 0.75)[-1]
    errors = [np.abs(ours(smooth, noise, solver=solver, steps=n, end=0.75) - exact).max() for n in (8, 16)]
    assert errors[1] > 2e-6  # above the rounding of float32
    assert order - 0.4 < np.log2(errors[0] / errors[1]) < order + 1


def test_arg_max_euler_ends_on_a_vocabulary_vector() -> None:
    x = ours(nearest, NOISE, solver="euler", steps=14)
    gaps = np.abs(x[..., None, :] - TABLE).max(axis=-1).min(axis=-1)
    np.testing.assert_allclose(gaps, 0.0, atol=1e-4)


def test_arg_max_midpoint_ends_beyond_its_last_two_picks() -> None:
    """At 2 V_b - V_a of the last two picks."""
    states = loop("midpoint", nearest, NOISE, 7)
    first = nearest(6 / 7, states[-2])
    last = nearest(13 / 14, (states[-2] + first) / 2)
    assert (first != last).all()
    np.testing.assert_allclose(ours(nearest, NOISE, solver="midpoint", steps=7), 2 * last - first, atol=1e-4)


# --- budgets ---


@pytest.mark.slow
@pytest.mark.parametrize("solver", FIXED)
def test_a_budget_is_spent_to_the_last_evaluation_by_one_program(solver: str) -> None:
    """Evaluations that run, counted one by one, plus the final one; and tracings, over a sweep of budgets."""
    calls: Counter[str] = Counter()

    def target(t: jax.Array, x: jax.Array) -> jax.Array:
        calls["traced"] += 1
        jax.debug.callback(lambda t: calls.update(ran=1), t)
        return smooth(t, x)

    @jax.jit
    def run(steps: jax.Array, end: jax.Array) -> jax.Array:
        return solve_fixed(target, jnp.asarray(NOISE, jnp.float32), solver=FIXED[solver], steps=steps, end=end)

    stages, traced = FIXED[solver].stages, None
    for end in (1.0, 63 / 64):
        for steps in (0, 1, 2, 3, 5, 6, 7, 10, 13, 14, 21, 49, 63, 100, 127):
            calls["ran"] = 0
            run(jnp.int32(steps), jnp.float32(end)).block_until_ready()
            jax.effects_barrier()
            assert calls["ran"] + 1 == 1 + stages * steps
            traced = calls["traced"] if traced is None else traced
    assert calls["traced"] == traced
    assert run._cache_size() == 1


@pytest.mark.parametrize("solver", FIXED)
def test_sequences_with_grids_of_their_own_end_where_each_does_alone(solver: str) -> None:
    """Numbers of steps and ends differ; a sequence that has ended stays, also where its velocity is not 0 there."""
    noise = np.stack([NOISE[0]] * 5)
    steps, ends = [5, 2, 0, 3, 5], [1.0, 0.5, 0.5, 0.9, 0.125]
    run = jax.jit(partial(solve_fixed, each_row, solver=FIXED[solver]))
    found = run(jnp.asarray(noise, jnp.float32), steps=jnp.int32(steps), end=jnp.float32(ends))
    for row, (count, end) in enumerate(zip(steps, ends, strict=True)):
        wanted = loop(solver, smooth, noise[row], count, end)[-1]
        np.testing.assert_allclose(found[row], wanted, rtol=1e-4, atol=3e-5 * np.abs(wanted).max())


def each_row(t: jax.Array, x: jax.Array) -> jax.Array:
    """`smooth` at one t for each sequence."""
    return smooth(t.reshape(-1, 1, 1), x)


# --- adaptive steps ---


def adaptive_loop(solver: str, target: Any, x: np.ndarray, *, tolerance: float, end: float) -> tuple[Any, list[float]]:
    """The final state and the ends of all accepted steps, controlled as in the release, the last of them shortened."""
    tableau, order = ADAPTIVE[solver].method.tableau, 3 if solver == "bosh3" else 2

    def velocity(t: float, x: np.ndarray) -> np.ndarray:
        return (target(t, x) - x) / (1 - t) if t < 1 - 1e-6 else np.zeros_like(x)

    t, step, slope, times = 0.0, 0.05, velocity(0.0, x), []
    while t < end:
        h = min(step, end - t)
        slopes = [slope]
        for node, row in zip(tableau.c, tableau.a_lower, strict=True):
            slopes.append(velocity(t + node * h, x + h * sum(a * k for a, k in zip(row, slopes, strict=True))))
        new = x + h * sum(b * k for b, k in zip(tableau.b_sol, slopes, strict=True))
        error = h * sum(b * k for b, k in zip(tableau.b_error, slopes, strict=True))
        ratio = np.sqrt(np.mean((error / (tolerance + tolerance * np.maximum(np.abs(x), np.abs(new)))) ** 2))
        step = h * min(10.0, max(0.9 / ratio ** (1 / order), 0.2 if ratio > 1 else 1.0)) if ratio else 10 * h
        if ratio <= 1:
            x, t, slope = new, t + h, slopes[-1]
            times.append(t)
    return x, times


def adapt(target: Any, noise: np.ndarray, *, solver: str, **settings: Any) -> Any:
    return jax.jit(partial(solve_adaptive, target, solver=ADAPTIVE[solver], **settings))(
        jnp.asarray(noise, jnp.float32)
    )


@pytest.mark.slow
@pytest.mark.parametrize("solver", ADAPTIVE)
def test_every_adaptive_step_equals_the_loops(solver: str) -> None:
    end = 63 / 64
    wanted, times = adaptive_loop(solver, smooth, NOISE, tolerance=1e-3, end=end)
    found = adapt(smooth, NOISE, solver=solver, tolerance=1e-3, max_steps=1000, end=end)
    assert len(times) > 3
    assert (found.accepted, found.t) == (len(times), np.float32(end))
    np.testing.assert_allclose(found.x, wanted, rtol=1e-3, atol=2e-4 * np.abs(wanted).max())
    kept = partial(adaptive_states, smooth, solver=ADAPTIVE[solver], tolerance=1e-3, end=end, max_steps=500)
    ends, states, rejected = jax.jit(kept)(jnp.asarray(NOISE, jnp.float32))
    np.testing.assert_allclose(ends[: len(times)], times, rtol=1e-3)
    assert np.isinf(ends[len(times) :]).all()
    assert rejected == found.rejected
    np.testing.assert_allclose(states[len(times) - 1], found.x, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ADAPTIVE)
def test_a_finer_tolerance_is_nearer_to_the_exact_end(solver: str) -> None:
    exact = loop("rk4", smooth, NOISE, 4000, 63 / 64)[-1]
    errors = [
        np.abs(adapt(smooth, NOISE, solver=solver, tolerance=tolerance, max_steps=10**6, end=63 / 64).x - exact).max()
        for tolerance in (1e-2, 1e-3, 1e-4)
    ]
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("solver", ADAPTIVE)
def test_adaptive_evaluations_are_counted_and_capped_by_one_program(solver: str) -> None:
    calls: Counter[str] = Counter()

    def target(t: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda t: calls.update(ran=1), t)
        return smooth(t, x)

    @jax.jit
    def run(most: jax.Array) -> Any:
        noise = jnp.asarray(NOISE, jnp.float32)
        return solve_adaptive(target, noise, solver=ADAPTIVE[solver], tolerance=1e-4, max_steps=most, end=63 / 64)

    for most in (0, 1, 4, 10**6):
        calls.clear()
        found = jax.block_until_ready(run(jnp.int32(most)))
        jax.effects_barrier()
        steps = int(found.accepted + found.rejected)
        assert steps == most if most < 10 else steps > 10
        assert calls["ran"] == 1 + ADAPTIVE[solver].stages * steps
        assert (found.t == np.float32(63 / 64)) == (most > 10)
    assert run._cache_size() == 1
    np.testing.assert_array_equal(run(jnp.int32(0)).x, NOISE.astype(np.float32))


def test_under_vmap_each_row_has_steps_of_its_own() -> None:
    rows = np.stack([NOISE[0], NOISE[0] / 100, NOISE[1]]).astype(np.float32)
    settings: Any = {"solver": ADAPTIVE["fehlberg2"], "tolerance": 1e-3, "max_steps": 1000, "end": 63 / 64}
    run = jax.jit(jax.vmap(partial(solve_adaptive, smooth, **settings)))
    together = run(jnp.asarray(rows))
    alone = [run(jnp.asarray(rows[i : i + 1])) for i in range(3)]
    np.testing.assert_allclose(together.x, np.concatenate([found.x for found in alone]), rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(together.accepted, np.concatenate([found.accepted for found in alone]))
    assert len(set(np.asarray(together.accepted).tolist())) > 1


@pytest.mark.parametrize("solver", [*EACH_KIND, *slow(*(name for name in SOLVERS if name not in EACH_KIND))])
def test_no_program_calls_the_host(solver: str) -> None:
    """It would wait there in every token, and JAX would compile it anew at every start."""

    def solve(noise: jax.Array, steps: jax.Array) -> Any:
        if solver in FIXED:
            return solve_fixed(lambda _, x: jnp.tanh(x), noise, solver=FIXED[solver], steps=steps)
        options = {"tolerance": 1e-3, "max_steps": steps, "end": 0.9}
        return solve_adaptive(lambda _, x: jnp.tanh(x), noise, solver=ADAPTIVE[solver], **options)

    assert "callback" not in jax.jit(solve).lower(jnp.ones((2, 3)), jnp.int32(3)).as_text()
