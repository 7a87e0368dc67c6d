"""Low-rank updates of the language model: their shapes and initial values, and that adding them up changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import PROJECTIONS, LoraConfig
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.distributed.sharding import initialize
from l2d_jax.model import l2d
from l2d_jax.model.axes import ADAPTED
from l2d_jax.model.l2d import Model
from l2d_jax.model.lora import LLMAdapter, merge_adapter
from l2d_jax.model.quantization import quantize_layers
from l2d_jax.training import objective
from tests.support import tiny
from tests.support.marks import slow
from tests.support.programs import same_bits


def declare(kind, **changes):
    return LLMAdapter.declare(LoraConfig(**changes), tiny.architecture(kind))


def logits(llm):
    tokens = tiny.tokens(2, 9)
    return llm.logits(llm(tokens, tiny.positions(tokens))[0])


def corrected(model):
    """The corrected hidden states of a batch, and what the frozen pass found."""
    batch = tiny.batch()
    corruption = objective.sample_corruption(jax.random.key(0), batch, model.path)
    context = objective.path_context(model.path, model.llm, batch)
    return objective.correct(model.path, model.llm, context, batch, corruption), context


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-wide-heads", "qwen", "gemma3"])
@pytest.mark.parametrize("modules", [("q_proj", "v_proj"), PROJECTIONS])
def test_a_model_with_an_adapter_is_the_sum_of_both(kind, modules):
    llm, adapter = tiny.llm(kind), tiny.adapter(kind, modules=modules)
    beside = logits(dataclasses.replace(llm, adapter=adapter))
    added = dataclasses.replace(llm, layers=merge_adapter(llm.layers, adapter))
    np.testing.assert_allclose(beside, logits(added), atol=2e-4)
    assert np.abs(beside - logits(llm)).max() > 0.1
    untouched = {"attention_norm", *(set("qkvo") | {"gate", "up", "down"}) - {m.removesuffix("_proj") for m in modules}}
    for name in untouched:
        assert same_bits(getattr(added.layers, name), getattr(llm.layers, name))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-wide-heads", "qwen-tied"])
@pytest.mark.parametrize("changes", [{}, {"start": "anchored", "reader": "path"}])
def test_a_merged_model_corrects_as_the_model_does(kind, changes):
    model = tiny.model(kind, **changes)
    merged = model.merged()
    assert merged.path is not None
    assert merged.path.adapter is None
    assert same_bits(model.path.layers.modulation.last.weight, merged.path.layers.modulation.last.weight)
    (hidden, context), (found, beside) = corrected(model), corrected(merged)
    np.testing.assert_allclose(found, hidden, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(beside.cache.k, context.cache.k, rtol=1e-4, atol=2e-3)
    assert np.abs(hidden - context.hidden).max() > 0.1


def test_a_merged_language_model_has_no_adapter_left():
    model = Model.build(dataclasses.replace(tiny.llm(), adapter=tiny.adapter(modules=PROJECTIONS)), None)
    merged = model.merged().llm
    assert merged.adapter is None
    np.testing.assert_allclose(logits(merged), logits(model.llm), atol=2e-4)


def test_merged_matrices_in_bfloat16_are_rounded_once():
    llm, path = tiny.llm(dtype="bfloat16"), tiny.path()
    merged = Model.build(llm, path).merged()
    np.testing.assert_array_equal(logits(merged.llm), logits(llm))
    assert path.adapter is not None
    sums = merge_adapter(llm.layers, path.adapter)
    for name in ADAPTED:  # a scan over layers copies no integers
        bits = getattr(merged.path.layers, name)
        assert bits.dtype == getattr(merged.llm.layers, name).dtype == jnp.uint16
        np.testing.assert_array_equal(bits, jax.lax.bitcast_convert_type(getattr(sums, name), jnp.uint16))


@pytest.mark.parametrize("dtype", [*slow("float32"), "bfloat16"])
def test_on_a_gpu_each_layer_has_its_own_matrices_where_there_is_room(monkeypatch, dtype):
    """And the stacks give the same numbers, up to 1e-6 of the largest."""
    monkeypatch.setattr(l2d, "can_read", lambda _: False)  # the C kernel is for CPUs
    model = Model.build(tiny.llm(dtype=dtype), tiny.path())
    stacked, size = model.merged(), tree_bytes(model)
    monkeypatch.setattr(l2d, "platform", lambda: "gpu")
    assert isinstance(model.merged(memory=4 * size).llm.layers.up, jax.Array)
    apart = model.merged(memory=4 * size + 1)
    for of_stack, of_apart in ((stacked.llm, apart.llm), (stacked.path, apart.path)):
        assert isinstance(of_apart.layers.up, list)
        assert [matrix.shape for matrix in of_apart.layers.up] == [of_stack.layers.up.shape[1:]] * 2
    for name in ADAPTED:
        updates, of_stack = getattr(apart.updating.layers, name), getattr(stacked.updating.layers, name)
        joined = jax.tree.map(lambda *layers: jnp.stack(layers), *updates)
        np.testing.assert_array_equal(joined.a, of_stack.a)
        np.testing.assert_array_equal(joined.b, of_stack.b)
    (hidden, context), (found, beside) = corrected(stacked), corrected(apart)
    for one, wanted in ((found, hidden), (beside.cache.k, context.cache.k)):
        np.testing.assert_allclose(one, wanted, atol=1e-6 * float(jnp.abs(wanted).max()))


def test_a_model_is_merged_where_there_is_room():
    model = Model.build(tiny.llm(), tiny.path())
    size = tree_bytes(model)
    assert model.can_merge(None)
    assert model.can_merge(3 * size + 1)
    assert not model.can_merge(3 * size)
    quantized = dataclasses.replace(model.llm, layers=quantize_layers(model.llm.layers))
    quantized_model = Model.build(quantized, model.path)
    assert quantized_model.merged() is quantized_model


def test_a_new_adapter_changes_nothing_and_starts_as_pefts(mesh):
    """A uniform within 1 / sqrt(inputs), as torch's `kaiming_uniform_(a=sqrt(5))`; B zero."""
    llm = tiny.llm()
    adapter = initialize(declare("llama", rank=64, modules=PROJECTIONS), jax.random.key(0), mesh)
    for name, inputs in {"q": 32, "o": 32, "down": 48}.items():
        lora = getattr(adapter, name)
        bound = inputs**-0.5
        assert 0.98 * bound < np.abs(lora.a).max() <= bound
        np.testing.assert_allclose(np.std(lora.a), bound / 3**0.5, rtol=0.05)
        assert not np.any(lora.b)
    np.testing.assert_array_equal(logits(dataclasses.replace(llm, adapter=adapter)), logits(llm))


def test_adding_up_rounds_once():
    llm = tiny.llm(dtype=jnp.bfloat16)
    adapter = tiny.adapter()
    exact = np.asarray(llm.layers.q, np.float32) + 2 * np.einsum("ldr,lrnh->ldnh", adapter.q.a, adapter.q.b)
    found = merge_adapter(llm.layers, adapter).q
    assert found.dtype == jnp.bfloat16
    assert np.mean(np.asarray(found) == exact.astype(jnp.bfloat16)) > 0.999  # but for ties that sums may decide


def test_layers_without_an_update_have_no_leaf():
    adapter = declare("llama", modules=("v_proj",))
    assert [leaf.axes for leaf in jax.tree.leaves(adapter)] == [
        ("layers", "attention_embed", "rank"),
        ("layers", "rank", "kv_heads", "head_dim"),
    ]
    assert adapter.updates().keys() == {"v"}
