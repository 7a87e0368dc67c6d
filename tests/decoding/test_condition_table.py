"""The table of conditions changes nothing, and a time that it lacks is noticed."""

import dataclasses
from functools import partial
from itertools import cycle, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.condition_table import CAPACITY, ConditionTable
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import FIXED
from l2d_jax.errors import InputError
from l2d_jax.model.context import Context
from l2d_jax.model.diffusion_path import Conditions
from l2d_jax.model.l2d import Model
from tests.support import tiny

EXPECTED = {"velocity": "expectation", "velocity_temperature": 1.0}

run = jax.jit(lambda *read, **options: refine(*read, **options)[0])


@jax.jit
def read(model: Model, tokens: jax.Array) -> Context:
    """The last two positions."""
    hidden, cache = model.llm(tokens, tiny.positions(tokens))
    return Context(hidden[:, -2:], cache, tiny.positions(tokens)[:, -2:])


def keys() -> jax.Array:
    return jax.random.split(jax.random.key(0), (2, 2))


def noise() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (2, 2, 16))


@pytest.mark.slow
@pytest.mark.parametrize(("solver", "classes"), list(zip(FIXED, cycle([0, 3]), strict=False)))
def test_a_table_changes_nothing(solver: str, classes: int) -> None:
    model = tiny.model("qwen", classes=classes)
    at = read(model, tiny.tokens(2, 6))._replace(labels=jnp.array([[0, 2], [3, 1]]) if classes else None)
    for steps in (0, 1, 3, 7):
        budget = 1 + steps * FIXED[solver].stages
        end = 1.0 if steps == 3 else 0.4
        config = DecodeConfig(solver=solver, budget=budget, end=end, guidance=1.5 if classes else 1.0, **EXPECTED)
        chosen, tabulated = Refinement.from_config(config), Refinement.prepare(model, config)
        assert tabulated.table is not None
        assert np.isfinite(tabulated.table.times).sum() == len(set(FIXED[solver].times(steps, end=end).tolist()))
        found, wanted = (run(model, at, noise(), settings=s, keys=keys()) for s in (tabulated, chosen))
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
        assert steps or np.array_equal(found, at.hidden)


def entries(solver: str, steps: int, end: float = 1.0) -> ConditionTable:
    """A table whose merge weights are the numbers of the evaluations."""
    numbers = jnp.arange(CAPACITY, dtype=jnp.float32)[:, None, None]
    times = FIXED[solver].times(steps, end=end)
    times = jnp.asarray(np.pad(times, (0, CAPACITY - len(times)), constant_values=np.inf))
    return ConditionTable(times, Conditions(jnp.zeros((1, CAPACITY, 1, 6, 1)), numbers))


@pytest.mark.slow
@pytest.mark.parametrize("solver", FIXED)
def test_the_entry_is_that_of_the_time_asked(solver: str) -> None:
    """At every time at which the solver evaluates, over all grids that a table can have."""
    asked: list[tuple[float, float]] = []

    def target(table: ConditionTable, t: jax.Array, x: jax.Array) -> jax.Array:
        merge = table.at(t[None, None], None).merge[0, 0, 0]
        jax.debug.callback(lambda t, merge: asked.append((float(t), float(merge))), t, merge)
        return x

    @jax.jit
    def solve(table: ConditionTable, steps: jax.Array, end: jax.Array) -> jax.Array:
        asked = partial(target, table)
        return integrate.solve_fixed(asked, jnp.ones(1), solver=FIXED[solver], steps=steps, end=end)

    largest = (CAPACITY - 1) // FIXED[solver].stages
    for steps, end in product((1, 2, 3, 5, 7, largest // 2, largest - 1, largest), (1.0, 0.37, 1e-3)):
        asked.clear()
        table = entries(solver, steps, end)
        solve(table, jnp.int32(steps), jnp.float32(end)).block_until_ready()
        jax.effects_barrier()
        assert len(asked) == steps * FIXED[solver].stages
        times, entered = np.array(asked).T
        assert np.isfinite(entered).all()
        np.testing.assert_allclose(times, np.asarray(table.times)[entered.astype(int)], atol=1e-5 * end)


@pytest.mark.slow
def test_a_time_of_another_grid_has_no_entry() -> None:
    """Over all pairs of grids with up to 128 evaluations, but for the times that both grids have."""
    at = jax.jit(jax.vmap(lambda table, t: table.at(t[None, None], None).merge[0, 0, 0], (None, 0)))
    for solver, method in FIXED.items():
        largest = (CAPACITY - 1) // method.stages
        for steps in (2, 7, largest - 1, largest):
            for end in (1.0, 0.25):
                table = entries(solver, steps, end)
                for other in (steps - 1, steps + 1, largest // 2):
                    times = method.times(other, end=end)
                    is_known = np.abs(times[:, None] - table.times).min(axis=1) < 1e-6 * end
                    np.testing.assert_array_equal(np.isfinite(at(table, times)), is_known)


@pytest.mark.slow
@pytest.mark.parametrize("velocity", [{"velocity": "sample"}, EXPECTED])
def test_a_table_of_another_grid_is_noticed(velocity: dict[str, Any]) -> None:
    """Both grids have t = 0 and t = 1; between them nothing is made up."""
    model = tiny.model()
    at = read(model, tiny.tokens(2, 6))
    configs = [DecodeConfig(budget=budget, **velocity) for budget in (15, 17)]
    right, other = (Refinement.prepare(model, config) for config in configs)
    wrong = dataclasses.replace(right, table=other.table)
    assert np.isfinite(run(model, at, noise(), settings=right, keys=keys())).all()
    assert np.isnan(run(model, at, noise(), settings=wrong, keys=keys())).all()


def test_what_has_no_table() -> None:
    model = tiny.model()
    for budget, solver in [(15, "fehlberg2"), (129, "midpoint")]:
        assert Refinement.prepare(model, DecodeConfig(budget=budget, solver=solver)).table is None
    alone = dataclasses.replace(model, path=None, table=None)
    assert Refinement.prepare(alone, DecodeConfig(budget=1)).table is None
    with pytest.raises(InputError, match="a budget of 15 needs a diffusion path, and this model has none"):
        Refinement.prepare(alone, DecodeConfig(budget=15))
