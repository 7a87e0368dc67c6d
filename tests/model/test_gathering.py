"""Weights as int8, and where a layer uses them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from l2d_jax.model.axes import MATRICES
from l2d_jax.model.gathering import gather_layer
from l2d_jax.model.llm import LLM
from l2d_jax.model.quantization import QuantizedWeight, quantize_layers
from l2d_jax.weights import base_model
from tests.support import tiny
from tests.support.marks import slow


def declared(dtype: str = "float32") -> LLM:
    return LLM.declare(tiny.architecture("qwen"), dtype=dtype)


def test_a_value_is_off_by_half_a_step_at_most() -> None:
    layers = tiny.llm("qwen").layers
    small = quantize_layers(layers)
    for name, (axes, _) in MATRICES.items():
        weight, quantized = getattr(layers, name), getattr(small, name)
        contracted = tuple(i for i, axis in enumerate(getattr(declared().layers, name).axes) if axis in axes)
        assert quantized.scale.shape == tuple(1 if i in contracted else n for i, n in enumerate(weight.shape))
        np.testing.assert_allclose(np.abs(quantized.values).max(axis=contracted), 127)
        difference = np.abs(quantized.restore(jnp.float32) - weight)
        assert np.all(difference <= 0.501 * np.asarray(quantized.scale))
        assert difference.max() > 0
    assert small.q_bias is layers.q_bias
    assert small.attention_norm is layers.attention_norm


def test_a_channel_of_zeros_stays_zero() -> None:
    layers = tiny.llm("qwen").layers
    empty = dataclasses.replace(layers, gate=layers.gate.at[0, :, 3].set(0.0))
    restored = quantize_layers(empty).gate.restore(jnp.float32)
    np.testing.assert_array_equal(restored[0, :, 3], 0.0)
    assert np.isfinite(restored).all()


def test_the_declaration_is_that_of_the_values(mesh: Mesh) -> None:
    found = base_model.BaseFiles(tiny.architecture("qwen"), None, (), None).load(dtype="int8", mesh=mesh)
    wanted = declared("int8")
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for value, weight in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert (value.shape, value.dtype) == (weight.shape, weight.dtype)
    assert found.layers.q.values.dtype == jnp.int8
    assert found.embed.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind", [*slow("llama", "qwen"), "gemma3"])
def test_an_int8_model_is_the_one_with_its_restored_weights(kind: str) -> None:
    """Layer by layer, what is computed is what the rounded weights give."""
    llm = tiny.llm(kind)
    small = dataclasses.replace(llm, layers=quantize_layers(llm.layers))
    restored = jax.tree.map(
        lambda x: x.restore(jnp.float32) if isinstance(x, QuantizedWeight) else x,
        small,
        is_leaf=lambda x: isinstance(x, QuantizedWeight),
    )
    tokens = tiny.tokens(2, 7)
    positions = jnp.broadcast_to(jnp.arange(7, dtype=jnp.int32), (2, 7))
    np.testing.assert_array_equal(small(tokens, positions)[0], restored(tokens, positions)[0])
    assert not np.allclose(small(tokens, positions)[0], llm(tokens, positions)[0], rtol=1e-4)


def test_one_device_gathers_nothing() -> None:
    llm = tiny.llm("qwen")
    first = jax.tree.map(lambda x: x[0], llm.layers)
    gathered = gather_layer(first, dtype=jnp.float32, products=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, gathered, first)
