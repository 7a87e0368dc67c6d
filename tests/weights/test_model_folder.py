import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax.config.schema import ModelConfig
from l2d_jax.data import tokenizer
from l2d_jax.errors import InputError
from l2d_jax.weights import base_model, mapping, model_folder
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors
from tests.support import tiny
from tests.support.marks import slow
from tests.support.programs import base_tensors, config, open_base, same_bits, write_base


def base_config(folder, **changes):
    return ModelConfig(**{"name": str(folder), "dtype": "float32", **changes})


def edit_json(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False}, {"architectures": ["Qwen2ForCausalLM"]}])
def test_every_weight_arrives(tmp_path, mesh, changes):
    base = open_base(base_config(write_base(tmp_path / "base", **changes)), mesh)
    found = {name: make() for name, make in mapping.tensors(base.llm, mapping.LLM_ROWS)}
    wanted = base_tensors(**changes)
    assert found.keys() == wanted.keys()
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)


def test_weights_are_brought_to_the_type_that_is_asked_for(tmp_path, mesh):
    llm = open_base(base_config(write_base(tmp_path / "base"), dtype="bfloat16"), mesh).llm
    assert {leaf.dtype for leaf in jax.tree.leaves(llm)} == {jnp.dtype(jnp.bfloat16)}
    assert np.array_equal(llm.norm, base_tensors()["model.norm.weight"].astype(jnp.bfloat16))


def test_shards_and_spare_tensors_of_old_exports(tmp_path, mesh):
    folder = write_base(tmp_path / "base")
    whole = open_base(base_config(folder), mesh).llm
    (folder / "model.safetensors").unlink()
    tensors = base_tensors()
    spare = {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    spare["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    write_safetensors(folder, (tensors | spare).items(), max_shard_bytes=30_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    assert same_bits(open_base(base_config(folder), mesh).llm, whole)


def test_a_shard_that_is_missing(tmp_path):
    folder = write_base(tmp_path / "base")
    (folder / "model.safetensors").unlink()
    write_safetensors(folder, base_tensors().items(), max_shard_bytes=30_000)
    sorted(folder.glob("model-*.safetensors"))[1].unlink()
    with pytest.raises(InputError, match=r"lists model-00002-of-.*, which is absent"):
        base_model.find_base(base_config(folder))


def test_an_untied_model_needs_its_head(tmp_path):
    folder = write_base(tmp_path / "base")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    with pytest.raises(InputError, match=r"missing: lm_head\.weight: take weights and config.json of one model"):
        base_model.find_base(base_config(folder))


def test_qwen_weights_under_a_llama_config(tmp_path):
    folder = write_base(tmp_path / "base", architectures=["Qwen2ForCausalLM"])
    edit_json(folder / "config.json", architectures=["LlamaForCausalLM"])
    with pytest.raises(InputError, match=r"not part of this architecture: .*k_proj.bias.* and 4 more"):
        base_model.find_base(base_config(folder))


def test_ends_are_all_that_could_end_an_answer(tmp_path):
    folder = write_base(tmp_path / "base", text=False)
    assert base_model.find_base(base_config(folder)).stop_ids == ()
    edit_json(folder / "config.json", eos_token_id=5)
    assert base_model.find_base(base_config(folder)).stop_ids == (5,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert base_model.find_base(base_config(folder)).stop_ids == (7, 9)
    tokenizer.byte_tokenizer().save_pretrained(folder)
    assert base_model.find_base(base_config(folder)).stop_ids == (7, 9, 258)
    (folder / "generation_config.json").write_text('{"eos_token_id": 258}')
    assert base_model.find_base(base_config(folder)).stop_ids == (258,)


def test_a_base_without_a_tokenizer(tmp_path):
    assert base_model.find_base(base_config(write_base(tmp_path / "base", text=False))).tokenizer is None


def test_random_weights_follow_the_seed(mesh):
    bases = [open_base(config().model, mesh, seed=seed) for seed in (0, 0, 1)]
    assert same_bits(bases[0].llm, bases[1].llm)
    assert not np.array_equal(bases[0].llm.embed, bases[2].llm.embed)
    assert bases[0].stop_ids == (258,)


@pytest.mark.parametrize("changes", [{}, {"classes": 2}, {"layers": "dense"}])
def test_a_path_comes_back_bit_for_bit(tmp_path, mesh, changes):
    path = tiny.path("qwen", **changes)
    model_folder.save_path(tmp_path, path, base="org/model")
    found = model_folder.load_path(tmp_path, tiny.architecture("qwen"), mesh)
    assert found.config == path.config
    assert same_bits(found, path)
    assert json.loads((tmp_path / "path.json").read_text())["base"] == "org/model"


def test_a_path_that_does_not_fit_is_named(tmp_path, mesh):
    model_folder.save_path(tmp_path, tiny.path(), base="org/model")
    file = tmp_path / "path.safetensors"
    tensors = load_file(file)
    del tensors["model.layers.0.mlp.flow_up_proj.A"]
    tensors["model.layers.0.mlp.flow_up_proj.C"] = np.ones(2, np.float32)
    tensors["model.timestep_embedder.mlp.0.bias"] = np.ones(2, np.float32)
    save_file(tensors, file)
    with pytest.raises(InputError) as caught:
        model_folder.load_path(tmp_path, tiny.architecture("llama"), mesh)
    for fault in (
        "missing: model.layers.0.mlp.flow_up_proj.A",
        "not part of this architecture: model.layers.0.mlp.flow_up_proj.C",
        "misshaped: model.timestep_embedder.mlp.0.bias has shape [2], expected [24]",
    ):
        assert fault in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"path": {"widht": 3}}', "path.widht: did you mean 'width'?"),
        ('{"path": 3}', "must be a section of options"),
        ('{"path": ', "malformed JSON"),
    ],
)
def test_a_bad_description_of_a_path_is_one_line(tmp_path, mesh, text, message):
    model_folder.save_path(tmp_path, tiny.path(), base="org/model")
    (tmp_path / "path.json").write_text(text)
    with pytest.raises(InputError) as caught:
        model_folder.load_path(tmp_path, tiny.architecture("llama"), mesh)
    assert message in str(caught.value)


@pytest.mark.parametrize("kind", [*slow("llama"), "qwen"])
def test_full_copies_start_as_the_language_models_layers(mesh, kind):
    llm = tiny.llm(kind)
    path = model_folder.new_path(tiny.path_config(layers="dense"), llm, mesh, seed=0)
    for name in ("q", "o", "gate", "up", "down", *(["q_bias"] if kind == "qwen" else [])):
        assert np.array_equal(getattr(path.layers, name), getattr(llm.layers, name)), name
    scratch = model_folder.new_path(tiny.path_config(layers="dense", dense_init="scratch"), llm, mesh, seed=0)
    assert not np.array_equal(scratch.layers.q, llm.layers.q)


def test_the_checks_read_no_tensor(tmp_path, monkeypatch):
    folder = write_base(tmp_path / "base")
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("read a tensor"))
    assert base_model.find_base(base_config(folder)).architecture.hidden_size == 32


@pytest.mark.parametrize("eos", ["abc", 1e9, 10**9, -1, [[2]], [2, "x"], float("nan"), True, {}, 320])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_ends_must_be_ids_of_the_vocabulary(tmp_path, name, eos):
    folder = write_base(tmp_path / "base", text=False)
    (folder / "generation_config.json").write_text("{}")
    edit_json(folder / name, eos_token_id=eos)
    with pytest.raises(InputError, match=rf"{name}: eos_token_id must be one or a list of the ids 0 to 319, got"):
        base_model.find_base(base_config(folder))


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    folder = write_base(tmp_path / "base", text=False, vocab_size=256)
    tokenizer.byte_tokenizer().save_pretrained(folder)
    with pytest.raises(InputError, match=r"has the id 258, and the model a vocabulary of 256: take both"):
        base_model.find_base(base_config(folder))


def retype(file, old, new):
    """Name another type in the header of a file, of the same number of bytes."""
    data = file.read_bytes()
    assert data.count(b'"dtype":"%s"' % old) > 1
    file.write_bytes(data.replace(b'"dtype":"%s"' % old, b'"dtype":"%s"' % new, 1))


def test_integers_are_no_weights(tmp_path):
    folder = write_base(tmp_path / "base")
    retype(folder / "model.safetensors", b"F32", b"I32")
    with pytest.raises(InputError, match=r"do not fit the architecture: of integers: model.embed_tokens.weight: take"):
        base_model.find_base(base_config(folder))


def test_integers_are_no_path(tmp_path):
    model_folder.save_path(tmp_path, tiny.path(), base="org/model")
    retype(tmp_path / "path.safetensors", b"F32", b"U32")
    with pytest.raises(InputError, match=r"of integers: model\."):
        model_folder.find_path(tmp_path, tiny.architecture("llama"))


def test_two_types_of_one_size_are_not_mixed(tmp_path):
    folder = write_base(tmp_path / "base")
    halves = {name: tensor.astype(np.float16) for name, tensor in base_tensors().items()}
    (folder / "model.safetensors").unlink()
    write_safetensors(folder, halves.items())
    base_model.find_base(base_config(folder))
    data = (folder / "model.safetensors").read_bytes()
    size = 8 + int.from_bytes(data[:8], "little")
    header = data[8:size].replace(b'"F16"', b'"BF16"', 1)
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data[size:])
    with pytest.raises(InputError, match=r"float16 and bfloat16: model\."):
        base_model.find_base(base_config(folder))
