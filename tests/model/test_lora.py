"""Low-rank updates of the language model: their shapes and initial values, and that adding them up changes nothing."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import PROJECTIONS, LoraConfig
from l2d_jax.distributed.sharding import initialize
from l2d_jax.model.lora import LLMAdapter, merge_adapter
from tests.support import tiny
from tests.support.programs import same_bits


def declare(kind, **changes):
    return LLMAdapter.declare(LoraConfig(**changes), tiny.architecture(kind))


def logits(llm):
    tokens = tiny.tokens(2, 9)
    return llm.logits(llm(tokens, tiny.positions(tokens))[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-wide-heads", "qwen"])
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
