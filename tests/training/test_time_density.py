"""Densities of t against their formulas, and a density that finds the fall of a loss."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import TrainConfig
from l2d_jax.training import objective, time_density
from l2d_jax.training.time_density import BINS, LossByTime
from tests.support import tiny

SIGMA = 64.0
DRAWS = jax.random.uniform(jax.random.key(0), (20, 1000), jnp.float32)
EDGES = time_density.time_of_share(jnp.linspace(0, 1, BINS + 1), SIGMA)  # of the bins


def drawn(seen: LossByTime | None = None, **options: Any) -> np.ndarray:
    """Of times of a config."""
    return np.asarray(jax.jit(time_density.time_sampler(TrainConfig(**options), seen, sigma=SIGMA))(DRAWS), np.float64)


def distance(sample: np.ndarray, cdf: Callable[[np.ndarray], np.ndarray]) -> float:
    """Of Kolmogorov and Smirnov, in units of which 1.95 is exceeded once in a thousand samples."""
    ordered = np.sort(sample.ravel())
    places = np.arange(len(ordered) + 1) / len(ordered)
    gaps = np.abs(cdf(ordered) - np.stack([places[:-1], places[1:]]))
    return float(gaps.max() * len(ordered) ** 0.5)


def integral(density: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """The CDF of a density that need not be normalised, by the trapezium rule in the logit of t."""
    t = 1 / (1 + np.exp(-np.linspace(-25, 25, 20001)))
    values = density(t)
    sums = np.concatenate([[0.0], np.cumsum(np.diff(t) * (values[1:] + values[:-1]) / 2)])
    return lambda x: np.interp(x, t, sums / sums[-1])


def logit_normal(t: np.ndarray, mean: float, deviation: float) -> np.ndarray:
    """As in section 3.1 of Esser et al., up to a factor."""
    return np.exp(-((np.log(t / (1 - t)) - mean) ** 2) / (2 * deviation**2)) / (t * (1 - t))


@pytest.mark.parametrize(
    ("options", "density"),
    [
        ({}, np.ones_like),
        ({"time_density": "cosmap"}, lambda t: 2 / (np.pi - 2 * np.pi * t + 2 * np.pi * t**2)),
        ({"time_density": "logit_normal"}, partial(logit_normal, mean=0.0, deviation=1.0)),
        (
            {"time_density": "logit_normal", "logit_normal_mean": 1.5, "logit_normal_deviation": 0.5},
            partial(logit_normal, mean=1.5, deviation=0.5),
        ),
    ],
    ids=["uniform", "cosmap", "logit_normal", "shifted"],
)
def test_times_have_their_density(options: Any, density: Any) -> None:
    sample = drawn(**options)
    assert distance(sample, integral(density)) < 1.95
    assert distance(sample, integral(lambda t: 1 + t)) > 10  # the measure sees a wrong one


def test_cosmap_is_that_of_the_release() -> None:
    u = np.linspace(0, 1, 1001)[:-1]
    wanted = 1 - 1 / (np.tan(np.pi / 2 * u) + 1)
    np.testing.assert_allclose(time_density.cosmap_times(jnp.asarray(u, jnp.float32)), wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["uniform", "cosmap", "logit_normal", "warped"])
def test_the_ends_of_the_uniform_draws_are_times(name: Any) -> None:
    config = TrainConfig(time_density=name)
    choose = time_density.time_sampler(config, time_density.initial_loss_by_time(config), sigma=SIGMA)
    ends = jax.jit(choose)(jnp.array([[0.0, 1 - 2.0**-23]]))
    assert ends.dtype == jnp.float32
    assert ends[0, 0] == 0.0
    assert 0.99 < ends[0, 1] <= 1.0


def test_the_times_of_the_defaults_are_the_bits_that_are_drawn() -> None:
    batch, path = tiny.batch(), tiny.path()
    plain = objective.sample_corruption(jax.random.key(3), batch, path)
    choose = time_density.time_sampler(TrainConfig(), None, sigma=SIGMA)
    _, found = objective.sample_corruptions(jax.random.key(3), batch, path, draws_per_context=1, times=choose)
    jax.tree.map(np.testing.assert_array_equal, found, plain)
    _, cosmap = objective.sample_corruptions(
        jax.random.key(3),
        batch,
        path,
        draws_per_context=1,
        times=time_density.time_sampler(TrainConfig(time_density="cosmap"), None, sigma=SIGMA),
    )
    np.testing.assert_array_equal(cosmap.noise, plain.noise)
    np.testing.assert_array_equal(cosmap.t, time_density.cosmap_times(plain.t))


# --- warped ---


def loss_curve(t: Any) -> Any:
    """Falls around a signal's share of 0.25: in nats, from 3 to 1."""
    return 1 + 2 / (1 + jnp.exp(20 * (time_density.signal_share(t, SIGMA) - 0.25)))


def learn(steps: int, *, noise: float, curve: Callable[[Any], Any] = loss_curve) -> tuple[LossByTime, jax.Array]:
    """After so many steps of 1000 losses, with the times of the last step."""
    config = TrainConfig(time_density="warped")
    seen = time_density.initial_loss_by_time(config)
    assert seen is not None

    def step(seen: LossByTime, key: jax.Array) -> tuple[LossByTime, jax.Array]:
        key_t, key_noise = jax.random.split(key)
        weights = jnp.full((4, 250), 1 / 1000)
        t = time_density.time_sampler(config, seen, sigma=SIGMA)(jax.random.uniform(key_t, (4, 250)))
        losses = curve(t) + noise * jax.random.normal(key_noise, t.shape)
        after = time_density.running_mean(seen, time_density.observe(t, losses, weights, sigma=SIGMA))
        assert after is not None
        return after, t

    seen, drawn_times = jax.jit(partial(jax.lax.scan, step))(seen, jax.random.split(jax.random.key(0), steps))
    return seen, drawn_times[-1]


def start() -> np.ndarray:
    """The density of a warp before its first step: nine tenths as a uniform t, the rest the same in all bins."""
    edges = np.linspace(0, 1, BINS + 1)
    return 0.1 / BINS + 0.9 * np.diff(SIGMA * edges / (1 + (SIGMA - 1) * edges))


def test_a_warped_density_starts_as_uniform() -> None:
    config = TrainConfig(time_density="warped")
    seen = time_density.initial_loss_by_time(config)
    assert seen is not None
    np.testing.assert_allclose(time_density.density(seen, sigma=SIGMA), start(), rtol=1e-4)
    found = np.histogram(drawn(seen, time_density="warped"), bins=np.asarray(EDGES))
    np.testing.assert_allclose(found[0] / DRAWS.size, start(), atol=4 * np.sqrt(start() / DRAWS.size).max())


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "tolerance"), [(0.0, 0.008), (1.0, 0.03)])
def test_a_warped_density_becomes_the_fall_of_the_loss(noise: float, tolerance: float) -> None:
    seen, t = learn(600, noise=noise)
    fall = -np.diff(loss_curve(EDGES))
    trust = 1 - time_density.DECAY**600
    wanted = (1 - trust) * start() + trust * (0.1 / BINS + 0.9 * fall / fall.sum())
    found = np.asarray(time_density.density(seen, sigma=SIGMA))
    np.testing.assert_allclose(found.sum(), 1.0, rtol=1e-5)
    np.testing.assert_allclose(found, wanted, atol=tolerance)
    counts = np.histogram(t, bins=np.asarray(EDGES))[0] / t.size
    np.testing.assert_allclose(counts, found, atol=0.05)
    assert np.abs(start() - wanted).max() > 10 * tolerance


@pytest.mark.parametrize(
    "curve",
    [lambda t: 0 * t + 2, lambda t: 2 + t, lambda t: 2 - 1e-4 * time_density.signal_share(t, SIGMA)],
    ids=["flat", "rising", "nearly flat"],
)
def test_a_loss_that_does_not_fall_leaves_the_density_as_it_starts(curve: Any) -> None:
    seen, _ = learn(50, noise=0.0, curve=curve)
    np.testing.assert_allclose(time_density.density(seen, sigma=SIGMA), start(), atol=2e-3)


def test_bins_that_nothing_has_fallen_into_lie_between_their_neighbours() -> None:
    weights = jnp.zeros(BINS).at[jnp.array([0, 8, 31])].set(jnp.array([0.5, 0.3, 0.2]))
    losses = weights * jnp.zeros(BINS).at[jnp.array([0, 8, 31])].set(jnp.array([3.0, 2.0, 1.0]))
    found = np.asarray(time_density._falling(LossByTime(losses, weights)))
    np.testing.assert_allclose(found[[0, 8, 31]], [3, 2, 1], atol=1e-4)
    assert (np.diff(found) <= 0).all()


def test_a_falling_fit_by_hand() -> None:
    """Against pooling of neighbours that rise, one pair at a time."""
    rng = np.random.default_rng(0)
    weights, values = rng.random(BINS) / BINS, 5 - np.arange(BINS) / 8 + rng.normal(size=BINS)
    pools: list[list[float]] = []
    for weight, value in zip(weights, values, strict=True):
        pools.append([weight, value, 1])
        while len(pools) > 1 and pools[-2][1] < pools[-1][1]:
            (w, v, n), (x, y, m) = pools.pop(), pools.pop()
            pools.append([w + x, (w * v + x * y) / (w + x), n + m])
    wanted = np.concatenate([[value] * int(n) for _, value, n in pools])
    assert 3 < len(pools) < BINS
    seen = LossByTime(jnp.asarray(weights * values, jnp.float32), jnp.asarray(weights, jnp.float32))
    np.testing.assert_allclose(time_density._falling(seen), wanted, rtol=1e-3)


def test_what_is_observed_by_hand() -> None:
    t = time_density.time_of_share(jnp.array([[0.01, 0.5, 0.52], [0.99, 1.0, 0.0]]), SIGMA)
    losses, weights = jnp.array([[1.0, 2.0, 4.0], [3.0, 5.0, 7.0]]), jnp.array([[0.5, 0.25, 0.25], [1.0, 1.0, 0.0]])
    found = time_density.observe(t, losses, weights, sigma=SIGMA)
    where = [0, BINS // 2, BINS - 1]
    np.testing.assert_allclose(found.losses[jnp.array(where)], [0.5, 1.5, 8.0])
    np.testing.assert_allclose(found.weights[jnp.array(where)], [0.5, 0.5, 2.0])
    assert (float(found.losses.sum()), float(found.weights.sum())) == (10.0, 3.0)
