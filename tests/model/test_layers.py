"""Building blocks against slow and obvious versions of themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model import layers, products
from l2d_jax.model.layers import Linear, Lora, Mlp
from tests.support import tiny

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_rms_norm() -> None:
    x, weight = normal(2, 3, 8), normal(8)
    wanted = np.array(x)
    for row in wanted.reshape(-1, 8):
        row /= np.sqrt((row**2).mean() + 0.1)
    np.testing.assert_allclose(layers.rms_norm(x, weight, 0.1), wanted * np.array(weight), rtol=1e-6)


def test_rms_norm_takes_a_weight_per_position_and_computes_in_float32() -> None:
    x, weight = normal(2, 3, 8), normal(2, 3, 8)
    each = [[layers.rms_norm(x[b, t], weight[b, t], 1e-6) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(layers.rms_norm(x, weight, 1e-6), jnp.array(each), rtol=1e-6)
    large = jnp.full((256,), 300.0, jnp.bfloat16)  # the sum of its squares, in bfloat16, would stop growing on the way
    normed = layers.rms_norm(large, jnp.ones(256, jnp.bfloat16), 1e-6)
    assert normed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(normed, jnp.ones(256, jnp.bfloat16))


def test_rope_turns_pairs_in_the_complex_plane() -> None:
    x, positions, frequencies = normal(1, 3, 2, 8), jnp.array([[5, 0, 700]], jnp.int32), normal(4)
    z = np.array(x[..., :4]) + 1j * np.array(x[..., 4:])
    z = z * np.exp(1j * np.array(positions)[..., None, None] * np.array(frequencies, np.float64))
    wanted = np.concatenate([z.real, z.imag], axis=-1)
    np.testing.assert_allclose(
        layers.rope(x, positions, frequencies), wanted, atol=2e-3
    )  # of angles near 700, in float32
    np.testing.assert_allclose(layers.rope(x, positions, frequencies)[:, :2], wanted[:, :2], atol=1e-5)


def test_rope_frequencies_with_the_scaling_of_llama_3() -> None:
    architecture = tiny.architecture("llama-scaled")  # stretches by 8 from 64 tokens
    plain = [10000.0 ** (-2 * i / 8) for i in range(4)]
    turns = [64 * frequency / (2 * np.pi) for frequency in plain]  # 10.2, 1.02, 0.1, 0.01
    kept = (turns[1] - 1) / (4 - 1)
    wanted = [plain[0], plain[1] * (kept + (1 - kept) / 8), plain[2] / 8, plain[3] / 8]
    np.testing.assert_allclose(layers.rope_frequencies(architecture), wanted, rtol=1e-6)
    np.testing.assert_allclose(layers.rope_frequencies(tiny.architecture("llama")), plain, rtol=1e-6)


@pytest.mark.parametrize("dims", [1, 2])
def test_a_projection_with_lora_is_one_with_the_sum_of_the_matrices(dims: int) -> None:
    inward, outward = {1: ((6,), (4, 5)), 2: ((3, 2), (7,))}[dims]
    x, weight = normal(2, *inward), normal(*inward, *outward)
    update = Lora(a=normal(*inward, 3), b=normal(3, *outward))
    whole = weight + 1.5 * jnp.tensordot(update.a, update.b, 1)
    wanted = x.reshape(2, 6) @ whole.reshape(6, -1)
    out = layers.project(x, weight, update, scale=1.5, dims=dims)
    np.testing.assert_allclose(out, wanted.reshape(2, *outward), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        layers.project(x, weight, dims=dims).reshape(2, -1), x.reshape(2, 6) @ weight.reshape(6, -1)
    )


@pytest.mark.parametrize("dims", [1, 2])
def test_a_projection_has_the_same_gradients_on_every_platform(monkeypatch: pytest.MonkeyPatch, dims: int) -> None:
    inward, outward = ((6,), (2, 4)) if dims == 1 else ((2, 3), (5,))
    x, weight, direction = normal(2, 4, *inward), normal(*inward, *outward), normal(2, 4, *outward)
    update = Lora(a=normal(*inward, 3), b=normal(3, *outward))

    def run(x: jax.Array, update: Lora) -> jax.Array:
        return jnp.sum(direction * layers.project(x, weight, update, scale=1.5, dims=dims))

    found = []
    for platform in ("cpu", "tpu"):
        monkeypatch.setattr(products, "platform", lambda platform=platform: platform)
        found.append(jax.grad(run, argnums=(0, 1))(x, update))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4), *found)


def test_affine_maps_keep_the_type_of_their_input() -> None:
    linear = Linear(weight=normal(4, 3), bias=normal(3))
    x = normal(2, 4)
    wanted = np.array(x) @ np.array(linear.weight) + np.array(linear.bias)
    np.testing.assert_allclose(linear(x), wanted, rtol=1e-5, atol=1e-6)
    assert linear(x.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    mlp = Mlp(first=linear, last=Linear(weight=normal(3, 2), bias=normal(2)))
    hidden = wanted / (1 + np.exp(-wanted))
    np.testing.assert_allclose(
        mlp(x), hidden @ np.array(mlp.last.weight) + np.array(mlp.last.bias), rtol=1e-5, atol=1e-6
    )
