"""The schedule at its corners, AdamW by hand, and what is decayed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import OptimConfig
from l2d_jax.training.optimizer import RATES, decayed, on_host, optimizer, schedule
from tests.support import tiny


def test_the_schedule_rises_and_falls_linearly() -> None:
    config = OptimConfig(peak_rate=1e-3, final_rate=1e-5, warmup_steps=100)
    rate = schedule(config, 1100)
    for step, wanted in [
        (0, 1e-5),  # not zero
        (49, 0.5e-3),
        (99, 1e-3),
        (100, 1e-3),
        (600, (1e-3 + 1e-5) / 2),
        (1099, 1e-5 + (1e-3 - 1e-5) / 1000),
        (1100, 1e-5),
        (5000, 1e-5),
    ]:
        np.testing.assert_allclose(rate(step), wanted, rtol=1e-4, err_msg=str(step))


def test_the_release_rises_with_the_logarithm() -> None:
    """Numbers by hand from DeepSpeed's `WarmupDecayLR`, whose step n has the rate of its iteration n - 1."""
    config = OptimConfig(peak_rate=1e-4, final_rate=1e-6, warmup_steps=100, warmup="logarithmic")
    rate = schedule(config, 1100)
    for step, wanted in [
        (0, 1e-6),  # the final rate
        (1, 1e-6),  # log(1) = 0
        (2, 1e-6 + 99e-6 * 0.1505149978),  # log(2) / log(100)
        (10, 1e-6 + 99e-6 * 0.5),
        (100, 1e-4),
        (101, 1e-4),
        (601, 1e-6 + 99e-6 * 0.5),
        (1099, 1e-6 + 99e-6 * 0.002),  # not the final rate
    ]:
        np.testing.assert_allclose(rate(step), wanted, rtol=1e-5, err_msg=str(step))
        np.testing.assert_allclose(jax.jit(rate)(jnp.int32(step)), wanted, rtol=1e-5, err_msg=str(step))


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (100, 10), (100, 3), (1, 2), (100, 1)])
def test_short_runs_have_the_releases_rates_too(warmup: int, steps: int) -> None:
    config = OptimConfig(peak_rate=1e-3, final_rate=1e-5, warmup_steps=warmup, warmup="logarithmic")
    rates = jax.vmap(schedule(config, steps))(jnp.arange(steps))
    assert np.isfinite(rates).all()
    assert float(rates.min()) > 1e-5 - 1e-9
    np.testing.assert_allclose(rates.max(), 1e-3 if steps > 2 else 1e-5, rtol=1e-6)


@pytest.mark.parametrize(("warmup", "steps"), [(0, 10), (100, 10), (100, 1), (1, 2), (10, 11)])
def test_short_runs_have_rates_too(warmup: int, steps: int) -> None:
    rates = jax.vmap(schedule(OptimConfig(peak_rate=1e-3, final_rate=1e-5, warmup_steps=warmup), steps))(
        jnp.arange(steps)
    )
    assert np.isfinite(rates).all()
    assert float(rates.min()) > 1e-5 - 1e-9
    np.testing.assert_allclose(rates.max(), 1e-3, rtol=1e-6)
    assert (np.diff(rates)[min(warmup, steps - 1) :] < 0).all()


def test_weight_decay_leaves_out_the_biases_and_nothing_else() -> None:
    path = tiny.path("qwen", layers="dense", classes=3)
    mask = {
        jax.tree_util.keystr(where, simple=True, separator="."): value
        for where, value in jax.tree_util.tree_leaves_with_path(decayed(path))
    }
    assert {name for name, value in mask.items() if not value} == {
        "vocabulary.bias",
        *(f"{name}.{place}.bias" for name in ("translation", "time", "merge") for place in ("first", "last")),
        *(f"layers.modulation.{place}.bias" for place in ("first", "last")),
        "layers.q_bias",
    }
    assert mask["classes"]
    assert mask["layers.modulation.last.weight"]
    assert all(jax.tree.leaves(decayed(tiny.path().layers.q)))


def test_adamw_by_hand() -> None:
    """Clipping of the global norm, moments with bias correction, decay apart from the gradient."""
    config = OptimConfig(weight_decay=0.1, clip_norm=1.0)
    rng, rate = np.random.default_rng(0), 0.05
    weights = {"weight": rng.normal(size=(3, 4)), "bias": rng.normal(size=4)}
    params = {name: jnp.asarray(value, jnp.float32) for name, value in weights.items()}
    adam = optimizer(config, rate)
    state = adam.init(params)
    m = {name: np.zeros_like(value) for name, value in weights.items()}
    v = {name: np.zeros_like(value) for name, value in weights.items()}
    for step, size in [(1, 0.05), (2, 5.0), (3, 1.0)]:  # the first is too small to be clipped
        gradient = {name: size * rng.normal(size=value.shape) for name, value in weights.items()}
        updates, state = adam.update({name: jnp.asarray(g, jnp.float32) for name, g in gradient.items()}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        norm = np.sqrt(sum((g**2).sum() for g in gradient.values()))
        for name, weight in weights.items():
            g = gradient[name] * min(1.0, 1.0 / norm)
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.95 * v[name] + 0.05 * g**2
            move = m[name] / (1 - 0.9**step) / (np.sqrt(v[name] / (1 - 0.95**step)) + 1e-8)
            weights[name] = weight - rate * (move + (0.1 * weight if name == "weight" else 0.0))
            np.testing.assert_allclose(params[name], weights[name], rtol=1e-4, atol=1e-6)


def test_rates_are_read_from_host_memory_however_many_there_are():
    steps = 10**9
    rate = schedule(OptimConfig(peak_rate=1e-3, final_rate=1e-5, warmup_steps=100), steps)
    read = on_host(rate, start=RATES - 2)
    for step in (0, 99, RATES - 1, RATES, steps // 2, steps - 1):
        assert read(step) == pytest.approx(float(rate(jnp.int32(step))), rel=1e-5)
