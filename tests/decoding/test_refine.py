"""Refinement against a loop over the plain path, guidance, temperatures, and one program for all settings."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement import refine as refine_module
from l2d_jax.decoding.refinement.estimates import estimate
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import FIXED
from l2d_jax.errors import InputError
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model, check_labels
from tests.support import plain, tiny

run = jax.jit(lambda *read, **options: refine(*read, **options)[0])


@jax.jit
def _read(model: Model, tokens: jax.Array) -> Context:
    hidden, cache = model.llm(tokens, tiny.positions(tokens))
    return Context(hidden=hidden, cache=cache, positions=tiny.positions(tokens))


def context(model: Model, tokens: jax.Array, *, labels: Any = None, last: int = 6) -> Context:
    """The context of the last few positions."""
    read = _read(model, tokens)
    return Context(read.hidden[:, -last:], read.cache, read.positions[:, -last:], labels)


def keys(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.split(jax.random.key(seed), shape)


def noise(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (*shape, 16))


def settings(budget: int, **options: Any) -> Refinement:
    return Refinement.from_config(DecodeConfig(**options), budget=budget)


# --- the plain loop ---


def by_hand(model: Model, at: Context, x: np.ndarray, *, steps: int, kind: str, guidance: float) -> np.ndarray:
    """Midpoint for the first sequence and its only position."""
    llm, path = model.llm, model.path
    assert path is not None
    hidden, position = plain.f64(at.hidden)[0, 0], int(at.positions[0, 0])
    keys, values = np.array(at.cache.k[:, 0]), np.array(at.cache.v[:, 0])

    def corrected(t: float, x: np.ndarray, label: int | None) -> np.ndarray:
        f = plain.features(path, llm, x, t, label, position, keys, values)
        return hidden + plain.merge_weight(path, t, label) * f

    def read(t: float, x: np.ndarray, label: int | None) -> np.ndarray:
        logits = plain.logits(llm, corrected(t, x, label))
        if kind == "sample":
            return plain.f64(model.table)[np.argmax(logits)]
        return np.exp(logits) / np.exp(logits).sum() @ plain.f64(model.table)

    label = None if at.labels is None else int(at.labels[0, 0])

    def velocity(t: float, x: np.ndarray) -> np.ndarray:
        target = read(t, x, label)
        if label is not None:
            target = guidance * target + (1 - guidance) * read(t, x, None)
        return (target - x) / (1 - t)

    h = 1 / steps
    for i in range(steps):
        x = x + h * velocity((i + 0.5) * h, x + h / 2 * velocity(i * h, x))
    return corrected(1.0, x, label)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sample", "expectation"])
@pytest.mark.parametrize("guidance", [None, 1.5])
def test_refinement_by_hand(kind: Any, guidance: float | None) -> None:
    model = tiny.model("qwen", classes=0 if guidance is None else 3)
    labels = None if guidance is None else jnp.array([[1]])
    at, x = context(model, tiny.tokens(1, 6), labels=labels, last=1), noise(1, 1)
    temperature = 1.0 if kind == "expectation" else 0.0
    chosen = settings(9, guidance=guidance or 1.0, velocity=kind, velocity_temperature=temperature)
    found = run(model, at, x, settings=chosen, keys=keys(1, 1))
    wanted = by_hand(model, at, 64 * plain.f64(x)[0, 0], steps=4, kind=kind, guidance=guidance or 1.0)
    np.testing.assert_allclose(found[0, 0], wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.slow
@pytest.mark.parametrize("velocity", ["sample", "expectation"])
def test_each_position_has_adaptive_steps_of_its_own(velocity: Any) -> None:
    """Together as alone; and near the end of a fine uniform grid, where the velocity is smooth."""
    model = tiny.model(classes=3)
    at, x = context(model, tiny.tokens(2, 6), last=3, labels=jnp.array([[0, 1, 2], [2, 1, 0]])), noise(2, 3)
    chosen = settings(4000, solver="bosh3", velocity=velocity, velocity_temperature=1.0, tolerance=1e-3, guidance=1.5)
    adapt = jax.jit(refine_module.adapt)
    found = adapt(model, at, 64 * x, settings=chosen, keys=keys(2, 3))
    assert found.t.shape == (2, 3)
    if velocity == "sample":
        return
    np.testing.assert_array_equal(found.t, np.float32(63 / 64))
    assert len(np.unique(found.accepted)) > 1
    one = Context(at.hidden[1:, 2:], jax.tree.map(lambda a: a, at.cache), at.positions[1:, 2:], at.labels[1:, 2:])
    cut = dataclasses.replace(one.cache, k=at.cache.k[:, 1:], v=at.cache.v[:, 1:], positions=at.cache.positions[1:])
    alone = adapt(model, one._replace(cache=cut), 64 * x[1:, 2:], settings=chosen, keys=keys(2, 3)[1:, 2:])
    assert alone.accepted[0, 0] == found.accepted[1, 2]
    np.testing.assert_allclose(alone.x[0, 0], found.x[1, 2], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_each_sequence_may_have_its_own_strength() -> None:
    model = tiny.model(classes=3)
    at, x = context(model, tiny.tokens(2, 6), last=1, labels=jnp.array([[0], [2]])), noise(2, 1)
    for solver, budget in [("midpoint", 5), ("fehlberg2", 20)]:
        options = {"solver": solver, "velocity": "expectation", "velocity_temperature": 1.0}
        each = [settings(budget, guidance=strength, **options) for strength in (0.5, 2.0)]
        both = dataclasses.replace(each[0], guidance=jnp.float32([0.5, 2.0]))
        found, *alone = (run(model, at, x, settings=chosen, keys=keys(2, 1)) for chosen in (both, *each))
        for i in range(2):
            np.testing.assert_allclose(found[i], alone[i][i], rtol=1e-4, atol=1e-4)
        assert np.abs(alone[0][0] - alone[1][0]).max() > 1e-3


# --- budgets ---


@pytest.mark.slow
def test_a_budget_of_one_is_the_language_model_to_the_bit() -> None:
    model = tiny.model()
    at = context(model, tiny.tokens(2, 6))
    for solver in ("midpoint", "rk4", "fehlberg2"):
        found = run(model, at, noise(2, 6), settings=settings(1, solver=solver), keys=keys(2, 6))
        np.testing.assert_array_equal(found, at.hidden)
    alone = dataclasses.replace(model, path=None, table=None)
    np.testing.assert_array_equal(run(alone, at, noise(2, 6), settings=settings(1), keys=keys(2, 6)), at.hidden)


@pytest.mark.slow
def test_one_program_serves_all_budgets_temperatures_and_strengths() -> None:
    model = tiny.model(classes=3)
    at = context(model, tiny.tokens(1, 4), last=2, labels=jnp.array([[0, 2]]))
    fresh = jax.jit(lambda *read, **options: refine(*read, **options)[0])
    outputs = set()
    for budget, temperature, anneal, guidance in [(1, 0.0, False, 1.0), (3, 0.5, True, 0.0), (15, 1.0, False, 2.0)]:
        chosen = settings(budget, guidance=guidance, velocity_temperature=temperature, anneal=anneal)
        outputs.add(fresh(model, at, noise(1, 2), settings=chosen, keys=keys(1, 2)).tobytes())
    assert len(outputs) == 3
    assert fresh._cache_size() == 1


def test_a_budget_out_of_reach_is_refused() -> None:
    with pytest.raises(InputError, match="16 evaluations is unreachable for midpoint"):
        settings(16)


# --- sampled velocities ---


@pytest.mark.slow
def test_sampled_tokens_depend_on_the_key_of_their_position_alone() -> None:
    """The same key gives the same, whatever stands beside it, and another key gives something else."""
    model = tiny.model()
    at, x, each = context(model, tiny.tokens(3, 6)), noise(3, 6), keys(3, 6)
    chosen = settings(7, velocity_temperature=2.0)
    all_of_them = run(model, at, x, settings=chosen, keys=each)
    np.testing.assert_array_equal(run(model, at, x, settings=chosen, keys=each), all_of_them)
    pick = (slice(1, 2), slice(3, 5))
    alone = Context(
        at.hidden[pick], jax.tree.map(lambda a: a, _read(model, tiny.tokens(3, 6)[1:2]).cache), at.positions[pick]
    )
    np.testing.assert_allclose(
        run(model, alone, x[pick], settings=chosen, keys=each[pick]), all_of_them[pick], rtol=1e-4, atol=1e-3
    )
    others = run(model, at, x, settings=chosen, keys=keys(3, 6, seed=1))
    assert (np.abs(others - all_of_them).max(axis=-1) > 0.1).mean() > 0.5


def test_without_a_temperature_keys_do_not_matter() -> None:
    model = tiny.model()
    at, x = context(model, tiny.tokens(2, 6)), noise(2, 6)
    first, second = (run(model, at, x, settings=settings(7), keys=keys(2, 6, seed=seed)) for seed in (0, 1))
    np.testing.assert_array_equal(first, second)
    colder = run(model, at, x, settings=settings(7, velocity_temperature=1.0), keys=keys(2, 6))
    assert (np.abs(colder - first).max(axis=-1) > 0.1).any()


@pytest.mark.slow
@pytest.mark.parametrize("solver", FIXED)
def test_the_last_annealed_draw_is_the_arg_max(solver: str) -> None:
    """Read at the times at which the solver asks for a target, over many budgets."""
    times: list[float] = []

    def target(t: jax.Array, x: jax.Array) -> jax.Array:
        jax.debug.callback(lambda t: times.append(float(t)), t)
        return x

    solve = jax.jit(lambda steps: integrate.solve_fixed(target, jnp.ones(1), solver=FIXED[solver], steps=steps))
    for steps in (1, 2, 3, 7, 10, 15, 31, 63):
        chosen = settings(1 + steps * FIXED[solver].stages, solver=solver, velocity_temperature=0.8, anneal=True)
        times.clear()
        solve(chosen.steps).block_until_ready()
        jax.effects_barrier()
        drawn = [t for t in times if t < 1 - 1e-6]  # at t = 1 the velocity counts as zero
        temperatures = chosen.temperature(jnp.float32([drawn]), jnp.float32([[1 / steps]]))[0].tolist()
        assert temperatures[-1] < 1e-6
        ahead = FIXED[solver].lookahead / steps
        np.testing.assert_allclose(temperatures, [0.8 * max(0.0, 1 - t - ahead) for t in drawn], atol=1e-6)
    constant = settings(3, solver="midpoint", velocity_temperature=0.8)
    assert constant.temperature(jnp.float32([[0.9]]), jnp.float32([[1.0]])) == pytest.approx(0.8)


def test_estimates_of_a_drawn_token_and_of_the_mean() -> None:
    model, hidden = tiny.model(), 3 * jax.random.normal(jax.random.key(0), (1, 400, 32))
    hidden = jnp.broadcast_to(hidden[:, :1], hidden.shape)  # one distribution, many samples
    read = jax.jit(partial(estimate, model, hidden), static_argnames="kind")
    logits = plain.logits(model.llm, np.array(hidden[0, 0]))
    table = plain.f64(model.table)
    for temperature in (0.0, 0.7):
        probs = np.exp(logits / temperature) if temperature else (logits == logits.max()).astype(float)
        probs /= probs.sum()
        mean = read(temperature=jnp.float32([[temperature]]), keys=keys(1, 400), kind="expectation")
        np.testing.assert_allclose(mean[0, 0], probs @ table, rtol=1e-3, atol=1e-4)
        drawn = read(temperature=jnp.float32([[temperature]]), keys=keys(1, 400), kind="sample")[0]
        tokens = np.abs(np.array(drawn)[:, None] - table).max(axis=-1).argmin(axis=1)
        np.testing.assert_array_equal(drawn, model.table[tokens])
        np.testing.assert_allclose(np.bincount(tokens, minlength=96) / 400, probs, atol=0.08)


# --- guidance ---


@pytest.mark.slow
def test_guidance_goes_from_the_null_class_to_the_class_and_beyond() -> None:
    """A strength of 1 is the class alone; the final evaluation is the class's at any strength."""
    model = tiny.model(classes=3)
    labels = jnp.array([[2, 0]])
    at, x, each = context(model, tiny.tokens(1, 4), labels=labels, last=2), noise(1, 2), keys(1, 2)
    options = {"velocity": "expectation", "velocity_temperature": 1.0}
    targets = {}
    for strength in (0.0, 1.0, 2.0):
        chosen = settings(3, guidance=strength, **options)
        target = jax.jit(refine_module.make_target(model, at, settings=chosen, keys=each))
        targets[strength] = target(jnp.float32(0.6), 10 * x)
    for strength, labelled in [(0.0, jnp.full_like(labels, 3)), (1.0, labels)]:
        alone = refine_module.corrected_hidden(model, at._replace(labels=labelled), 10 * x, jnp.float32([[0.6]]))[0]
        wanted = estimate(model, alone, temperature=jnp.float32([[1.0]]), keys=each, kind="expectation")
        np.testing.assert_allclose(targets[strength], wanted, atol=1e-4)
    np.testing.assert_allclose(targets[2.0], 2 * targets[1.0] - targets[0.0], atol=1e-4)
    assert float(jnp.max(jnp.abs(targets[1.0] - targets[0.0]))) > 1e-2


def test_labels_that_the_path_does_not_know() -> None:
    with pytest.raises(InputError, match="class label 3 is unknown to this path: it knows 0 to 2"):
        check_labels(tiny.path_config(classes=3), [0, 3])
    with pytest.raises(InputError, match=r"class label 0 is unknown .* none: it was trained without classes"):
        check_labels(tiny.path_config(), [0])
    check_labels(tiny.path_config(classes=3), [0, 1, 2])


def test_the_table_is_computed_once_from_the_embedding() -> None:
    model = tiny.model()
    assert model.path is not None
    np.testing.assert_allclose(model.table, model.path.embed(model.llm.embed), rtol=1e-5, atol=1e-6)
    assert Model.build(model.llm, None).table is None
