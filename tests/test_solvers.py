"""diffrax against loops of a few lines; what a budget buys; and that one program serves them all."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax import solvers
from l2d_jax.errors import InputError
from l2d_jax.solvers import SOLVERS, intervals, solve, trajectory

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


RULES = {"euler": euler, "midpoint": midpoint, "heun": heun, "heun3": heun3, "rk4": rk4}


def loop(solver: str, target: Any, x: np.ndarray, steps: int, end: float = 1.0) -> list[np.ndarray]:
    """The states on the grid."""

    def velocity(t: float, x: np.ndarray) -> np.ndarray:
        return (target(t, x) - x) / (1 - t) if t < 1 - 1e-6 else np.zeros_like(x)

    states = [np.asarray(x, np.float64)]
    for i in range(steps):
        states.append(RULES[solver](velocity, i * end / steps, states[-1], end / steps))
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


def ours(target: Any, noise: np.ndarray, **settings: Any) -> np.ndarray:
    return np.asarray(jax.jit(partial(solve, target, **settings))(jnp.asarray(noise, jnp.float32)))


# --- diffrax equals the loops ---


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("end", [1.0, 63 / 64])
def test_each_solver_equals_its_loop(solver: str, end: float) -> None:
    run = jax.jit(partial(solve, smooth, solver=solver))
    for steps in (1, 2, 5, 14):
        wanted = loop(solver, smooth, NOISE, steps, end)[-1]
        found = run(jnp.asarray(NOISE, jnp.float32), steps=steps, end=end)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_trajectory_has_every_point_of_the_grid(solver: str) -> None:
    states = jax.jit(partial(trajectory, smooth, solver=solver, steps=4))(jnp.asarray(NOISE, jnp.float32))
    np.testing.assert_allclose(states, np.stack(loop(solver, smooth, NOISE, 4)), rtol=1e-4, atol=1e-4)


def test_no_interval_leaves_the_noise_as_it_is() -> None:
    noise = NOISE.astype(np.float32)
    for solver in SOLVERS:
        np.testing.assert_array_equal(ours(smooth, noise, solver=solver, steps=0), noise)


def test_the_scaled_state_loses_nothing_of_the_noise() -> None:
    """x_0 is 64 times larger than what remains of x at the end, where float32 must still resolve it."""
    wanted = loop("midpoint", smooth, NOISE, 60)[-1]
    np.testing.assert_allclose(ours(smooth, NOISE, solver="midpoint", steps=60), wanted, rtol=2e-5, atol=2e-5)


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


@pytest.mark.parametrize("solver", SOLVERS)
def test_a_budget_is_spent_to_the_last_evaluation_by_one_program(solver: str) -> None:
    """Evaluations that run, counted one by one, plus the final one; and tracings, over a sweep of budgets."""
    calls: Counter[str] = Counter()

    def target(t: jax.Array, x: jax.Array) -> jax.Array:
        calls["traced"] += 1
        jax.debug.callback(lambda t: calls.update(ran=1), t)
        return smooth(t, x)

    @jax.jit
    def run(steps: jax.Array, end: jax.Array) -> jax.Array:
        return solve(target, jnp.asarray(NOISE, jnp.float32), solver=solver, steps=steps, end=end)

    stages, traced = SOLVERS[solver][1], None
    for end in (1.0, 63 / 64):
        for steps in (0, 1, 2, 3, 5, 6, 7, 10, 13, 14, 21, 49, 63, 100, 127):
            calls["ran"] = 0
            run(jnp.int32(steps), jnp.float32(end)).block_until_ready()
            jax.effects_barrier()
            assert calls["ran"] + 1 == 1 + stages * steps
            traced = calls["traced"] if traced is None else traced
    assert calls["traced"] == traced
    assert run._cache_size() == 1


def test_intervals_of_a_budget() -> None:
    budgets = {
        ("euler", 1): 0,
        ("euler", 15): 14,
        ("midpoint", 1): 0,
        ("midpoint", 3): 1,
        ("midpoint", 7): 3,
        ("midpoint", 15): 7,
        ("midpoint", 31): 15,
        ("midpoint", 127): 63,
        ("heun", 15): 7,
        ("heun3", 16): 5,
        ("rk4", 17): 4,
    }
    for (solver, budget), wanted in budgets.items():
        assert intervals(solver, budget) == wanted


@pytest.mark.parametrize(
    ("solver", "budget", "message"),
    [
        ("midpoint", 16, "16 evaluations is unreachable for midpoint, which takes 1 [+] 2 n: try 15 or 17"),
        ("midpoint", 2, "try 1 or 3"),
        ("heun3", 15, "1 [+] 3 n: try 13 or 16"),
        ("rk4", 15, "1 [+] 4 n: try 13 or 17"),
        ("rk4", 4, "try 1 or 5"),
        ("euler", 0, "try 1 or 2"),
        ("midpoint", -3, "try 1 or 3"),
        ("newton", 3, "unknown solver 'newton': choose from euler, midpoint, heun, heun3, rk4"),
    ],
)
def test_budgets_that_cannot_be_spent(solver: str, budget: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        intervals(solver, budget)


def test_lookahead_reaches_the_end_at_the_last_draw() -> None:
    """The last stage that is not at t = 1 itself: one interval before the end, or half of one for midpoint."""
    for solver, last_stage in [("euler", -1.0), ("midpoint", -0.5), ("heun", -1.0)]:
        assert last_stage + solvers.lookahead(solver) == 0.0
