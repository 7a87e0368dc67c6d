"""The table of names: every leaf has a row, the bits survive both ways, and what does not fit is named at once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh

from l2d_jax.errors import InputError
from l2d_jax.model.llm import LLM
from l2d_jax.weights import base_model, mapping
from l2d_jax.weights.mapping import LLM_ROWS, PATH_ROWS
from tests.support import tiny
from tests.support.mappings import Tensors, declarations, theirs


@pytest.mark.parametrize("name", declarations())
def test_both_ways_keep_the_bits(name: str, mesh: Mesh) -> None:
    declared, rows = declarations()[name]
    tree = tiny.randomise(declared)
    source = theirs(tree, rows)
    assert {key: array.shape for key, array in source.items()} == mapping.tensor_shapes(declared, rows)
    mapping.check_tensors(source, mapping.tensor_shapes(declared, rows))
    loaded = mapping.load_tree(declared, source, mesh, rows=rows)
    assert source.elements == sum(array.size for array in source.values())  # each element is read once
    for ours, back in zip(jax.tree.leaves(tree), jax.tree.leaves(loaded), strict=True):
        assert (ours.dtype, ours.shape) == (back.dtype, back.shape)
        assert np.array(ours).tobytes() == np.array(back).tobytes()
    for key, array in theirs(loaded, rows).items():
        assert array.tobytes() == source[key].tobytes(), key


def test_every_row_is_used() -> None:
    used = {leaf.row for declared, rows in declarations().values() for leaf in mapping.leaves(declared, rows)}
    assert used == {*LLM_ROWS, *PATH_ROWS}


def test_where_the_entries_go() -> None:
    """Row and column by name: linear layers are [out, in] there, heads are joined with their width."""
    llm, path = tiny.llm("qwen"), tiny.path("qwen", classes=3)
    a, b = theirs(llm, LLM_ROWS), theirs(path, PATH_ROWS)
    layer, d, n, h = 1, 5, 3, 6
    assert a["model.layers.1.self_attn.q_proj.weight"][n * 8 + h, d] == llm.layers.q[layer, d, n, h]
    assert a["model.layers.1.self_attn.o_proj.weight"][d, n * 8 + h] == llm.layers.o[layer, n, h, d]
    assert a["model.layers.1.self_attn.k_proj.bias"][8 + h] == llm.layers.k_bias[layer, 1, h]
    assert a["model.layers.1.mlp.down_proj.weight"][d, 40] == llm.layers.down[layer, 40, d]
    assert a["model.embed_tokens.weight"][90, d] == llm.embed[90, d]
    assert (
        b["model.layers.1.modulation_head.mlp.2.weight"][4 * 32 + d, 7]
        == path.layers.modulation.last.weight[layer, 7, 4, d]
    )
    assert b["model.layers.1.modulation_head.mlp.2.bias"][4 * 32 + d] == path.layers.modulation.last.bias[layer, 4, d]
    assert b["model.layers.1.self_attn.flow_o_proj.A"][n * 8 + h, 2] == path.layers.o.a[layer, n, h, 2]
    assert b["model.layers.1.self_attn.flow_q_proj.B"][2, n * 8 + h] == path.layers.q.b[layer, 2, n, h]
    assert b["model.flow_token_embedder.embedder.layers_module.0.weight"][3, d] == path.vocabulary.weight[d, 3]
    assert b["model.data_label_embedder.weight"][3, 4] == path.classes[3, 4]


def test_everything_that_does_not_fit_is_named_in_one_error() -> None:
    architecture = tiny.architecture("qwen")
    good = theirs(tiny.llm("qwen"), LLM_ROWS)
    base_model.check_llm(good, architecture)
    bad = Tensors(good)
    del bad["model.norm.weight"]
    bad["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32))
    bad["surplus"] = np.zeros(1)
    bad["model.layers.0.mlp.up_proj.weight"] = np.zeros((32, 48))
    with pytest.raises(InputError) as error:
        base_model.check_llm(bad, architecture)
    assert str(error.value) == (
        "the tensors do not fit the architecture: missing: model.norm.weight; "
        "not part of this architecture: model.layers.2.mlp.up_proj.weight, surplus; "
        "misshaped: model.layers.0.mlp.up_proj.weight has shape [32, 48], expected [48, 32]: "
        "take weights and config.json of one model"
    )


def test_long_lists_of_faults_are_cut_short() -> None:
    source = Tensors({f"t{i}": np.zeros(1) for i in range(9)})
    with pytest.raises(InputError, match="architecture: t0, t1 and 7 more:"):
        mapping.check_tensors(source, {})


def test_weights_of_another_family_are_refused() -> None:
    with pytest.raises(InputError, match=r"not part of this architecture: model.layers.0.self_attn.k_proj.bias"):
        base_model.check_llm(theirs(tiny.llm("qwen"), LLM_ROWS), tiny.architecture("llama"))
    with pytest.raises(InputError, match=r"missing: model.layers.0.self_attn.k_proj.bias"):
        base_model.check_llm(theirs(tiny.llm("llama"), LLM_ROWS), tiny.architecture("qwen"))


def test_a_tied_head_and_rotary_buffers_are_passed_over() -> None:
    tied = theirs(tiny.llm("llama-tied"), LLM_ROWS)
    tied |= {"lm_head.weight": tied["model.embed_tokens.weight"].copy()}
    tied |= {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(4), "model.rotary_emb.inv_freq": np.zeros(4)}
    base_model.check_llm(tied, tiny.architecture("llama-tied"))
    untied = theirs(tiny.llm("llama"), LLM_ROWS)
    del untied["lm_head.weight"]
    with pytest.raises(InputError, match=r"missing: lm_head.weight"):
        base_model.check_llm(untied, tiny.architecture("llama"))


def test_types_are_those_of_the_declaration(mesh: Mesh) -> None:
    """A float32 file as bfloat16, rounded to nearest, and a bfloat16 file as float32, to the bit."""
    source = theirs(tiny.llm(), LLM_ROWS)
    rounded = mapping.load_tree(
        LLM.declare(tiny.architecture("llama"), dtype=jnp.bfloat16), source, mesh, rows=LLM_ROWS
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(rounded)} == {jnp.dtype(jnp.bfloat16)}
    np.testing.assert_array_equal(rounded.embed, source["model.embed_tokens.weight"].astype(ml_dtypes.bfloat16))
    narrow = theirs(rounded, LLM_ROWS)
    widened = mapping.load_tree(LLM.declare(tiny.architecture("llama"), dtype=jnp.float32), narrow, mesh, rows=LLM_ROWS)
    assert widened.embed.dtype == jnp.float32
    np.testing.assert_array_equal(widened.layers.o, rounded.layers.o.astype(jnp.float32))
