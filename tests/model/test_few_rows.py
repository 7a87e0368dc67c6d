"""The products of few rows that read weights in place, against XLA's."""

import dataclasses
import functools
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model import few_rows
from l2d_jax.model.few_rows import ROWS, StackedWeight, can_read
from l2d_jax.model.few_rows import few_rows_logits as logits_of
from l2d_jax.model.few_rows import few_rows_product as multiply
from l2d_jax.model.layer_scan import scan_layers
from tests.support import tiny

pytest.importorskip("ziglang", reason="the extra cpu is not installed")


@pytest.fixture(autouse=True)
def compiled():
    assert can_read(jnp.zeros(1))


@functools.cache
def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).normal(size=shape), jnp.float32)


@jax.jit
def product(x, stack, layer):
    return multiply(x, StackedWeight(stack, layer), 1)


logits = jax.jit(logits_of)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 8, 9, ROWS, ROWS + 1])
@pytest.mark.parametrize("sizes", [(32, 32), (32, 96), (1536, 576), (576, 1536)])  # of one piece, and of several
def test_products_are_those_of_xla(rows, sizes):
    x, stack, head = normal(rows, sizes[0]), normal(3, *sizes), normal(sizes[1], sizes[0])
    for layer in range(3):
        wanted = np.float64(x) @ np.float64(np.asarray(stack)[layer])
        np.testing.assert_allclose(product(x, stack, np.int32(layer)), wanted, atol=1e-5 * sizes[0])
    np.testing.assert_allclose(logits(x, head), np.float64(x) @ np.float64(head).T, atol=1e-5 * sizes[0])


@pytest.mark.parametrize("kind", ["product", "logits"])
def test_a_row_does_not_depend_on_those_beside_it(kind):
    x, stack, head = normal(ROWS, 576), normal(2, 576, 1536), normal(1536, 576)

    def one(x):
        return product(x, stack, np.int32(1)) if kind == "product" else logits(x, head)

    each, x = jax.jit(jax.vmap(one)), np.asarray(x)
    whole = np.asarray(one(x))
    for rows in (1, 2, 3, 5, 8, 13):
        for first in (0, ROWS - rows):
            assert np.array_equal(one(x[first : first + rows]), whole[first : first + rows])
    assert np.array_equal(np.asarray(each(x[:, None]))[:, 0], whole)
    assert np.array_equal(each(x.reshape(4, ROWS // 4, -1)), whole.reshape(4, ROWS // 4, -1))


def test_what_is_not_a_number_stays_in_its_row():
    x = normal(3, 64).at[1, 5].set(jnp.nan)
    y = multiply(x, StackedWeight(normal(1, 64, 32), jnp.int32(0)), 1)
    assert np.array_equal(np.isnan(y).all(1), [False, True, False])
    assert np.isfinite(y[::2]).all()


def test_heads_are_axes_of_their_own():
    x, q, o = normal(2, 1, 64), normal(2, 64, 4, 16), normal(2, 4, 16, 64)
    y = multiply(x, StackedWeight(q, jnp.int32(1)), 1)
    np.testing.assert_allclose(y, jnp.tensordot(x, q[1], 1), atol=1e-4)
    np.testing.assert_allclose(multiply(y, StackedWeight(o, jnp.int32(1)), 2), jnp.tensordot(y, o[1], 2), atol=1e-3)


def test_a_scan_leaves_alone_what_has_other_sizes():
    layers = tiny.llm().layers
    seen = []

    def block(carry, scanned):
        seen.append({name for name, weight in vars(scanned[0]).items() if isinstance(weight, StackedWeight)})
        return carry, scanned[0].up[0, 0] + scanned[1]

    _, found = scan_layers(block, 0.0, (layers, jnp.arange(len(layers.up))), in_place=True)
    assert seen[0] == {"q", "o"}  # keys and values of 16, an MLP of 48
    np.testing.assert_allclose(found, layers.up[:, 0, 0] + np.arange(len(layers.up)))


def test_only_float32_on_one_cpu_is_read_in_place():
    assert tiny.model().merged().llm.in_place
    assert not can_read(jnp.zeros(1, jnp.bfloat16))
    devices = jax.sharding.Mesh(jax.devices()[:2], "x")
    if len(jax.devices()) > 1:
        assert not can_read(jax.device_put(jnp.zeros(2), jax.NamedSharding(devices, jax.P("x"))))


def test_without_a_compiler_that_works_xla_goes_on(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, stderr="no such target")
    monkeypatch.setattr(few_rows, "_library", [])
    monkeypatch.setattr(few_rows.subprocess, "run", lambda *_, **__: failed)
    with pytest.warns(UserWarning, match=r"cannot compile few_rows.c: decoding goes on .* \(no such target\)"):
        assert not can_read(jnp.zeros(1))
    assert not tiny.model().merged().llm.in_place  # without another try


def test_a_model_says_the_same():
    llm = tiny.llm("llama-wide-heads")
    tokens = jnp.arange(8, dtype=jnp.int32).reshape(2, 4)
    positions = jnp.broadcast_to(jnp.arange(4, dtype=jnp.int32), (2, 4))
    hidden, cache = llm(tokens, positions)
    found, beside = dataclasses.replace(llm, in_place=True)(tokens, positions)
    np.testing.assert_allclose(found, hidden, atol=1e-4)
    np.testing.assert_allclose(beside.k, cache.k, atol=1e-4)
    np.testing.assert_allclose(dataclasses.replace(llm, in_place=True).logits(found), llm.logits(hidden), atol=1e-4)
