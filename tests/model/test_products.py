"""Products of float32 states and bfloat16 weights: those of the rounded factors, with gradients alike."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model.products import logits_of, multiply
from tests.support import tiny

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def rounded(x):
    return np.asarray(x.astype(jnp.bfloat16), np.float64)


def gradients(product, *arrays):
    y, pull = jax.vjp(product, *arrays)
    g = normal(*y.shape)
    return g, pull(g)


@pytest.mark.parametrize(
    ("rows", "weight", "dims"), [((6,), (32, 48), 1), ((2, 3), (32, 4, 8), 1), ((5, 4, 8), (4, 8, 32), 2)]
)
def test_a_product_is_of_rounded_factors_with_exact_sums(rows, weight, dims):
    x, w = normal(*rows, *weight[:1]) if dims == 1 else normal(*rows), normal(*weight).astype(jnp.bfloat16)
    y = jax.jit(multiply, static_argnums=2)(x, w, dims)
    assert y.dtype == jnp.float32
    np.testing.assert_allclose(y, np.tensordot(rounded(x), rounded(w), dims), rtol=1e-5, atol=1e-4)
    g, (of_x, of_w) = gradients(lambda x, w: multiply(x, w, dims), x, w)
    assert (of_x.dtype, of_w.dtype) == (jnp.float32, jnp.bfloat16)
    outputs = w.ndim - dims
    wanted = np.tensordot(rounded(g), rounded(w), (range(g.ndim - outputs, g.ndim), range(dims, w.ndim)))
    np.testing.assert_allclose(of_x, wanted, rtol=1e-5, atol=1e-4)
    lead = range(x.ndim - dims)
    wanted = np.tensordot(np.float64(x), np.float64(g), (lead, lead))
    np.testing.assert_allclose(of_w.astype(jnp.float32), wanted, rtol=1e-2, atol=1e-2)


def test_logits_and_their_gradient():
    x, head = normal(5, 32), normal(64, 32).astype(jnp.bfloat16)
    np.testing.assert_allclose(logits_of(x, head), rounded(x) @ rounded(head).T, rtol=1e-5, atol=1e-4)
    g, (of_x, of_head) = gradients(logits_of, x, head)
    np.testing.assert_allclose(of_x, rounded(g) @ rounded(head), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(of_head.astype(jnp.float32), np.float64(g).T @ np.float64(x), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_gradient_of_a_low_rank_product(dtype):
    x, a, b = normal(2, 3, 32), normal(32, 4).astype(dtype), normal(4, 5, 6).astype(dtype)
    tolerance = {"rtol": 3e-2, "atol": 3e-1} if dtype == jnp.bfloat16 else {"rtol": 1e-5, "atol": 1e-4}

    def product(x, a, b):
        return multiply(multiply(x, a, 1), b, 1)

    g, found = gradients(product, x, a, b)
    exact = jax.vjp(lambda x, a, b: jnp.tensordot(x @ a, b, 1), x, a.astype(jnp.float32), b.astype(jnp.float32))
    np.testing.assert_allclose(product(x, a, b), exact[0], **tolerance)
    for one, wanted in zip(found, exact[1](g), strict=True):
        np.testing.assert_allclose(one.astype(jnp.float32), wanted, **tolerance)


def test_a_model_in_bfloat16_differs_from_its_float32_copy_by_the_rounding_of_factors_alone():
    half, tokens = tiny.llm(dtype=jnp.bfloat16), tiny.tokens(2, 9)
    whole = jax.tree.map(lambda w: w.astype(jnp.float32), half)
    found, wanted = (np.asarray(llm.logits(llm(tokens, tiny.positions(tokens))[0])) for llm in (half, whole))
    assert 1e-6 < np.abs(found - wanted).max() < 2e-2 * np.abs(wanted).max()


@pytest.mark.parametrize("dims", [1, 2])
def test_integers_of_a_frozen_weight_are_the_weight(dims: int) -> None:
    x, weight = jax.random.normal(jax.random.key(0), (3, 5, 8)), jax.random.normal(jax.random.key(1), (5, 8, 4))
    weight = (weight if dims == 2 else weight[0]).astype(jnp.bfloat16)
    bits = jax.lax.bitcast_convert_type(weight, jnp.uint16)
    found, wanted = (jax.value_and_grad(lambda x, w=w: jnp.sum(multiply(x, w, dims) ** 2))(x) for w in (bits, weight))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
