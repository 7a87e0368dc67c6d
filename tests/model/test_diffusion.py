"""The mathematics of L2D, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model import diffusion


def test_vocabulary_vectors_have_the_length_of_the_root_of_their_width() -> None:
    v = jnp.array([[3.0, 0.0, 4.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(diffusion.normalize(v)[0], [1.2, 0.0, 1.6, 0.0], rtol=1e-6)
    np.testing.assert_array_equal(diffusion.normalize(v)[1], 0.0)
    assert diffusion.normalize(v.astype(jnp.bfloat16)).dtype == jnp.float32


def test_interpolation() -> None:
    data, noise = jnp.array([[1.0, 2.0], [1.0, 2.0], [1.0, 2.0]]), jnp.array([[-8.0, 4.0]] * 3)
    x = diffusion.interpolate(data, noise, jnp.array([0.0, 0.25, 1.0]))
    np.testing.assert_allclose(x, [[-8.0, 4.0], [-5.75, 3.5], [1.0, 2.0]])


def test_inputs_have_unit_variance_at_every_time() -> None:
    data, noise = np.random.default_rng(0).normal(size=(2, 9, 4000)).astype(np.float32)
    t = np.array([0.0, 0.1, 0.5, 0.9, 0.98, 0.99, 0.999, 0.9999, 1.0], np.float32)
    scale = jax.jit(lambda data, noise, t: diffusion.scale_input(diffusion.interpolate(data, noise, t), t, 64.0))
    scaled = scale(data, 64 * noise, t)
    np.testing.assert_allclose(np.std(scaled, axis=1), 1.0, atol=0.05)
    by_hand = 5.0 / np.sqrt((0.25 * 64) ** 2 + 0.75**2)
    np.testing.assert_allclose(diffusion.scale_input(jnp.array([5.0]), jnp.array(0.75), 64.0), [by_hand], rtol=1e-6)


def test_time_features() -> None:
    wanted = [np.cos(0.7), np.cos(0.07), np.cos(0.007), np.cos(0.0007)]
    wanted += [np.sin(0.7), np.sin(0.07), np.sin(0.007), np.sin(0.0007)]
    np.testing.assert_allclose(diffusion.time_features(jnp.array([0.7]), 8)[0], wanted, rtol=1e-5)
    np.testing.assert_array_equal(diffusion.time_features(jnp.zeros(1), 8)[0], [1.0] * 4 + [0.0] * 4)


def test_guidance() -> None:
    conditional, null = jnp.array([[2.0, 0.0]]), jnp.array([[1.0, 4.0]])
    for strength, wanted in [(0.0, [1.0, 4.0]), (1.0, [2.0, 0.0]), (1.5, [2.5, -2.0])]:
        np.testing.assert_allclose(diffusion.guide(conditional, null, jnp.float32(strength))[0], wanted)


def test_annealing_falls_linearly_to_zero_and_stays_there() -> None:
    t = jnp.array([0.0, 0.25, 1.0, 1.5])
    np.testing.assert_allclose(diffusion.anneal(jnp.float32(2.0), t), [2.0, 1.5, 0.0, 0.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_samples_have_the_frequencies_of_the_softmax(temperature: float) -> None:
    logits = np.array([0.3, -1.0, 1.2, 0.0], np.float32)

    @jax.jit
    def draw(logits: jax.Array, temperature: jax.Array) -> jax.Array:
        keys = jax.random.split(jax.random.key(0), 20000)
        return jax.vmap(lambda key: diffusion.sample_token(key, logits, temperature))(keys)

    drawn = np.asarray(draw(logits, np.float32(temperature)))
    wanted = np.exp(logits / temperature)
    frequencies = np.bincount(drawn, minlength=4) / len(drawn)
    np.testing.assert_allclose(frequencies, wanted / wanted.sum(), atol=0.015)  # 4 standard deviations


def test_a_temperature_of_zero_takes_the_arg_max_row_by_row() -> None:
    logits = np.random.default_rng(0).normal(size=(500, 8)).astype(np.float32)
    temperature = np.where(np.arange(500) < 250, 0.0, 5.0).astype(np.float32)
    drawn = np.asarray(jax.jit(diffusion.sample_token)(jax.random.key(1), logits, temperature))
    best = np.argmax(logits, axis=-1)
    np.testing.assert_array_equal(drawn[:250], best[:250])
    assert np.mean(drawn[250:] == best[250:]) < 0.5


def test_a_vector_of_zeros_has_a_gradient():
    """Embedding tables have rows of zeros for unused tokens, and the map's bias is zero at first."""
    gradient = jax.jit(jax.grad(lambda v: jnp.sum(diffusion.normalize(v))))(np.zeros((2, 4), np.float32))
    np.testing.assert_array_equal(gradient, 2.0)  # of sqrt(4) v: neither infinite nor so large as to drown the others
    assert not np.any(diffusion.normalize(jnp.zeros((2, 4))))


@pytest.mark.parametrize("width", [7, 49, 256, 3 * 128])
def test_arg_max_is_that_of_numpy(width: int) -> None:
    """The first of equal entries, in any block."""
    logits = np.random.default_rng(0).integers(0, 5, (40, width)).astype(np.float32)
    logits[7], logits[8, -1] = -np.inf, 9.0
    np.testing.assert_array_equal(jax.jit(diffusion.arg_max)(logits), np.argmax(logits, axis=-1))


@pytest.mark.parametrize("devices", [2, 7])
def test_the_arg_max_of_devices_that_share_the_vocabulary(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of equal entries, of which the first counts, and of entries that are not numbers."""
    monkeypatch.setattr(diffusion, "platform", lambda: "tpu")
    monkeypatch.setattr(diffusion, "axis_size", {"tensor": devices, "stationary": 1}.__getitem__)
    logits = np.random.default_rng(0).integers(0, 9, (3, 40, 14)).astype(np.float32)
    logits[0, 1], logits[0, 2, 5], logits[0, 3, [4, 9]] = -np.inf, np.nan, np.nan
    np.testing.assert_array_equal(diffusion.arg_max(jnp.asarray(logits)), logits.argmax(axis=-1))
