"""Evaluations side by side give the sequential answer, token by token, in no more passes than evaluations."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.side_by_side import settle
from l2d_jax.decoding.refinement.solver import FIXED, Grid
from l2d_jax.decoding.refinement.stages import Stages
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.marks import slow

run = jax.jit(refine)


def settings(
    budgets: list[int], *, ends: list[float] | None = None, window: int = 16, is_parallel: bool, **options: Any
) -> Refinement:
    """The settings of each sequence, which have a budget and an end each."""
    base = Refinement.from_config(DecodeConfig(budget=budgets[0], **options))
    ends = [1.0] * len(budgets) if ends is None else ends
    each = jax.tree.map(lambda a: jnp.broadcast_to(a, len(budgets)), base)
    steps = jnp.array([base.solver.steps(budget) for budget in budgets], jnp.int32)
    stages = Stages.of(base.solver, [Grid(*one) for one in zip(budgets, ends, strict=True)]) if is_parallel else None
    return dataclasses.replace(each, steps=steps, end=jnp.float32(ends), stages=stages, window=window)


def context(model: Model, rows: int, *, last: int = 2, labels: Any = None) -> Context:
    tokens = tiny.tokens(rows, 6)
    positions = tiny.positions(tokens)
    hidden, cache = jax.jit(lambda m, t, p: m.llm(t, p))(model, tokens, positions)
    inputs = model.llm.lookup(tokens)[:, -last:]
    return Context(hidden[:, -last:], cache, positions[:, -last:], labels, inputs=inputs)


def draw(rows: int, last: int = 2, seed: int = 0) -> tuple[jax.Array, jax.Array]:
    """Noise, and keys."""
    noise = jax.random.normal(jax.random.key(seed), (rows, last, 16))
    return noise, jax.random.split(jax.random.key(seed + 1), (rows, last))


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("until", [*slow(1.0), 0.7])
def test_rows_are_what_the_solver_reaches(name: str, until: float) -> None:
    """x and t of every evaluation, where the estimates are any functions of x."""
    solver = FIXED[name]
    steps = 5
    budget = solver.stages * steps + 1
    noise = 64 * jax.random.normal(jax.random.key(0), (1, 1, 8))
    seen: list[tuple[np.ndarray, np.ndarray]] = []
    mix = jax.random.normal(jax.random.key(1), (8, 8))

    def target(t: Any, x: Any) -> Any:
        estimate = jnp.tanh(x @ mix / 64)
        jax.debug.callback(lambda *pair: seen.append(tuple(map(np.array, pair))), t, jnp.stack([x, estimate]))
        return estimate

    end = integrate.solve_fixed(target, noise, solver=solver, steps=jnp.int32([steps]), end=jnp.float32([until]))
    jax.effects_barrier()
    stages = Stages.of(solver, [Grid(budget, until)])
    assert stages is not None
    times, points = ([one[i] for one in seen] for i in range(2))
    kept = [i for i, t in enumerate(times) if np.float32(t[0]) < 1]  # at t = 1 the rate is 0, and nothing reads them
    estimates = jnp.zeros((1, 1, stages.size, 8))
    rows = jnp.arange(stages.size)[None, None]
    count = int(stages.count[0])
    assert len(kept) == count - 1
    for row, i in enumerate(kept):
        assert stages.times[0, row] == times[i][0]
        np.testing.assert_allclose(
            stages.x(rows, noise, estimates)[0, 0, row], points[i][0, 0, 0], rtol=1e-5, atol=1e-4
        )
        estimates = estimates.at[0, 0, row].set(points[i][1, 0, 0])
    np.testing.assert_allclose(stages.x(rows, noise, estimates)[0, 0, count - 1], end[0, 0], rtol=1e-5, atol=1e-5)
    assert stages.times[0, count - 1] == np.float32(until)
    assert until == 1 or count == budget, "before t = 1 each evaluation counts"


OPTIONS: dict[str, dict[str, Any]] = {
    "arg max": {},
    "sampled": {"velocity_temperature": 1.0},
    "annealed": {"velocity_temperature": 2.0, "anneal": True},
}


@pytest.mark.parametrize("name", ["midpoint", *slow("euler", "restart")])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("start", [*slow("released"), "anchored"])
@pytest.mark.parametrize("window", [7, *slow(1, 16)])
def test_the_sequential_answer(name: str, kind: str, start: Any, window: int) -> None:
    model = tiny.model(start=start)
    options = {"solver": name} | OPTIONS[kind]
    budgets, ends = [1, 3, 15, 9, 31], [0.5, 1.0, 1.0, 0.3, 0.9]
    at, (noise, keys) = context(model, 5), draw(5)
    plain = settings(budgets, ends=ends, is_parallel=False, **options)
    wanted, cost = run(model, at, noise, settings=plain, keys=keys)
    chosen = settings(budgets, ends=ends, is_parallel=True, window=window, **options)
    found, taken = run(model, at, noise, settings=chosen, keys=keys)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(taken.evaluations, cost.evaluations)
    assert (taken.passes <= np.maximum(np.array(budgets)[:, None], 0)).all()
    np.testing.assert_array_equal(taken.passes[0], 0)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["heun", "rk4"])
def test_guidance_masks_and_other_solvers(solver: str) -> None:
    model = tiny.model(classes=3)
    at, (noise, keys) = context(model, 2, labels=jnp.array([[0, 1], [2, 0]])), draw(2)
    allowed = jax.random.bernoulli(jax.random.key(5), 0.5, (2, model.llm.architecture.vocab_size))
    options: dict[str, Any] = {"solver": solver, "guidance": 2.0, "velocity_temperature": 1.0}
    chosen = [
        dataclasses.replace(settings([9, 5], ends=[1.0, 0.6], is_parallel=side, **options), allowed=allowed)
        for side in (False, True)
    ]
    wanted, found = (run(model, at, noise, settings=one, keys=keys)[0] for one in chosen)
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_right_guesses_take_one_pass_and_a_table_changes_nothing() -> None:
    """A path that corrects nothing finds the LM's token everywhere."""
    model = tiny.model()
    assert model.path is not None
    last = model.path.merge.last
    still = dataclasses.replace(last, weight=jnp.zeros_like(last.weight), bias=jnp.zeros_like(last.bias))
    path = dataclasses.replace(model.path, merge=dataclasses.replace(model.path.merge, last=still))
    model = Model.build(model.llm, path)
    at, (noise, keys) = context(model, 2), draw(2)
    chosen = settings([15, 15], is_parallel=True)
    found, cost = run(model, at, noise, settings=chosen, keys=keys)
    np.testing.assert_array_equal(cost.passes, 1)
    np.testing.assert_array_equal(found, at.hidden)
    model = tiny.model()
    tabled = dataclasses.replace(chosen, table=Refinement.tabulate(model, "midpoint", [Grid(15)]))
    pair = [run(model, at, noise, settings=one, keys=keys)[0] for one in (chosen, tabled)]
    np.testing.assert_allclose(*pair, rtol=1e-4, atol=1e-4)


def test_a_state_that_is_no_number_ends_its_position_alone() -> None:
    model = tiny.model()
    at, (noise, keys) = context(model, 2), draw(2)
    at = at._replace(hidden=at.hidden.at[1, 0].set(jnp.nan))
    found, cost = run(model, at, noise, settings=settings([15, 15], is_parallel=True), keys=keys)
    assert np.isnan(found[1, 0]).all()
    assert np.isfinite(np.delete(np.asarray(found).reshape(4, -1), 2, axis=0)).all()
    assert (cost.passes <= 15).all()


def test_settling_keeps_what_came_true() -> None:
    guesses = jnp.full((1, 1, 1, 5), 7)
    step = partial(settle, first=jnp.int32([[0]]), count=jnp.int32([[5]]), most=jnp.int32([[9]]))
    settled, after = step(jnp.int32([[0]]), guesses, jnp.array([[[[7, 7, 3, 7, 4]]]]))
    assert settled.tolist() == [[3]]  # the wrong one is right now
    assert after[0, 0, 0].tolist() == [7, 7, 3, 7, 4]
    settled, after = step(jnp.int32([[3]]), after, jnp.array([[[[0, 0, 0, 7, 4]]]]))
    assert settled.tolist() == [[5]]
    assert after[0, 0, 0, :3].tolist() == [7, 7, 3]
    settled, after = step(jnp.int32([[1]]), guesses, jnp.array([[[[7, 5]]]]), first=jnp.int32([[1]]))
    assert settled.tolist() == [[3]]
    assert after[0, 0, 0].tolist() == [7, 7, 5, 5, 5]
    settled, _ = step(jnp.int32([[0]]), guesses, guesses, most=jnp.int32([[1]]))
    assert settled.tolist() == [[1]]  # all came true
