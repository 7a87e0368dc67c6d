"""Weights that would be another model without a word: a head beside a tied embedding, NaN, and what is no file."""

import json

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert
from l2d_jax.config.schema import ModelConfig
from l2d_jax.errors import InputError
from l2d_jax.loading import load
from l2d_jax.weights import base_model
from l2d_jax.weights.finite import BLOCK, all_finite
from l2d_jax.weights.safetensors_file import SafetensorsFolder, write_safetensors
from tests.support import tiny
from tests.support.exports import logits, transformers_logits
from tests.support.fuzzed_models import MODEL_KINDS
from tests.support.odd_files import ODD, make_odd
from tests.support.peft_adapters import write_adapter
from tests.support.programs import call, write_base, write_model, write_release

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
TIED = {kind: {"tie_word_embeddings": True} for kind in ("llama", "qwen", "qwen3", "mistral", "smollm3", "gemma3")}


def write_tied(folder, kind, change):
    """A tied model whose file has a head, too: what `change` makes of the embedding."""
    base = write_base(folder, text=False, **(tiny.CONFIGS[kind] | TIED[kind]))
    tensors = load_file(base / "model.safetensors")
    save_file(tensors | {HEAD: change(tensors[EMBEDDING])}, base / "model.safetensors", metadata={"format": "pt"})
    return base


@pytest.mark.parametrize("kind", TIED)
def test_another_head_beside_a_tied_embedding_is_refused(tmp_path, kind):
    """transformers 5 uses it and transformers 4 does not; as an untied model it is what transformers 5 computes."""
    base = write_tied(tmp_path / "base", kind, lambda embedding: embedding[::-1].copy())
    with pytest.raises(InputError, match=f"{HEAD} differs from {EMBEDDING}.*set tie_word_embeddings to false"):
        base_model.find_base(ModelConfig(name=str(base)))
    outcome = call(convert.main, "import", "--base", base, "--out", tmp_path / "model")
    assert f"{HEAD} differs from {EMBEDDING}" in outcome.error
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    theirs = transformers_logits(transformers.AutoModelForCausalLM.from_pretrained(base, dtype="float32"))
    raw = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(raw | {"tie_word_embeddings": False}))
    np.testing.assert_allclose(logits(base)[0], theirs, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "is_equal"),
    [
        (np.copy, True),
        (lambda embedding: embedding.astype(np.float64), True),
        (lambda embedding: embedding.astype(np.float16), False),
        (lambda embedding: embedding[:, :-1].copy(), False),
        (lambda embedding: np.where(np.arange(embedding.size).reshape(embedding.shape) == 77, 1, embedding), False),
    ],
)
def test_an_equal_copy_of_the_embedding_is_accepted(tmp_path, change, is_equal):
    base = write_tied(tmp_path / "base", "llama", change)
    if not is_equal:
        with pytest.raises(InputError, match="differs from"):
            load(base, dtype="float32")
        return
    plain = write_base(tmp_path / "plain", text=False, **(tiny.CONFIGS["llama"] | TIED["llama"]))
    np.testing.assert_array_equal(logits(base)[0], logits(plain)[0])
    adapter = write_adapter(tmp_path / "adapter", "llama-tied")
    call(convert.main, "import", "--base", base, "--adapter", adapter, "--out", tmp_path / "model")
    np.testing.assert_array_equal(logits(tmp_path / "model")[0].shape, (2, 9, 96))  # its base is the one it records
    outcome = call(convert.main, "export", "--model", base, "--format", "hf", "--out", tmp_path / "out")
    assert outcome.status == 0, outcome
    assert HEAD not in load_file(tmp_path / "out" / "model.safetensors")


TYPES = (np.float16, np.float32, np.float64, ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_is_found(dtype, value):
    array = np.linspace(-60_000, 60_000, 3 * BLOCK + 7).astype(dtype).reshape(1, -1)
    assert all_finite(array)
    assert all_finite(np.full(3, np.finfo(np.float16).max, dtype))
    assert all_finite(np.zeros((0, 3), dtype))
    for place in (0, BLOCK, -1):
        spoiled = array.copy()
        spoiled[0, place] = value
        assert not all_finite(spoiled)
        assert not all_finite(spoiled.T)


def test_integers_are_finite():
    assert all_finite(np.full(5, -1, np.int8))
    assert all_finite(np.full(5, True))


def spoil(file, value, name=None):
    """Put a value that is not finite into a tensor of a file; its name."""
    tensors = load_file(file)
    name = name or sorted(tensors)[0]
    tensors[name].reshape(-1)[1] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return name


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_base_that_is_not_finite_is_neither_used_nor_converted(tmp_path, value):
    base = write_base(tmp_path / "base", text=False)
    name = spoil(base / "model.safetensors", value, "model.layers.1.mlp.up_proj.weight")
    message = f"model.safetensors: tensor '{name}' has entries that are not finite"
    with pytest.raises(InputError, match=message):
        load(base)
    for command in (["import", "--base", base], ["export", "--model", base, "--format", "hf"]):
        assert message in call(convert.main, *command, "--out", tmp_path / "out").error
        assert not (tmp_path / "out").exists()


def test_a_path_that_is_not_finite_is_neither_used_nor_converted(tmp_path, mesh):
    model = write_model(tmp_path / "model", write_base(tmp_path / "base"), mesh)
    name = spoil(model / "path.safetensors", np.nan)
    record = json.loads((model / "path.json").read_text())
    record.pop("checksum")
    (model / "path.json").write_text(json.dumps(record))
    message = f"path.safetensors: tensor '{name}' has entries that are not finite"
    with pytest.raises(InputError, match=message):
        load(model)
    for format in ("l2d", "l2d-full"):
        arguments = ["export", "--model", model, "--format", format, "--out", tmp_path / "out"]
        assert message in call(convert.main, *arguments).error


def test_a_published_path_that_is_not_finite_is_not_imported(tmp_path):
    MODEL_KINDS["published config.json"].write(tmp_path)
    name = spoil(tmp_path / "model.safetensors", -np.inf)
    outcome = call(convert.main, "import", "--base", tmp_path, "--out", tmp_path / "out")
    assert f"model.safetensors: tensor '{name}' has entries that are not finite" in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_checkpoint_of_the_release_that_is_not_finite_is_refused(tmp_path, suffix):
    write_release(tmp_path / "release", "llama")
    file = tmp_path / "release" / "l2d.safetensors"
    name = spoil(file, np.nan, "model.layers.0.mlp.flow_up_proj.A")
    if suffix == "bin":
        torch = pytest.importorskip("torch")
        state = {name: torch.from_numpy(tensor) for name, tensor in load_file(file).items()}
        file = file.with_suffix(".bin")
        torch.save(state, file)
    arguments = ["--l2d", file, "--hyperparameters", tmp_path / "release" / "l2d.json", "--out", tmp_path / "out"]
    outcome = call(convert.main, "import", "--base", tmp_path / "release" / "base", *arguments)
    assert f"l2d.{suffix}: tensor '{name}' has entries that are not finite" in outcome.error


def test_nothing_that_is_not_finite_is_written(tmp_path):
    with pytest.raises(InputError, match="cannot be written: tensor 'b' has entries that are not finite"):
        write_safetensors(tmp_path, {"a": np.ones(2), "b": np.array([1, np.inf])}.items())


def test_only_what_is_read_is_looked_at(tmp_path):
    save_file({"a": np.array([[1, 2], [3, np.nan]])}, tmp_path / "model.safetensors")
    source = SafetensorsFolder.open(tmp_path)
    np.testing.assert_array_equal(source.read("a", (slice(0, 1),)), [[1, 2]])


FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", FILES)
def test_what_is_no_file_in_a_model_folder_is_refused_at_once(tmp_path, file, kind):
    base = write_base(tmp_path / "base")
    make_odd(base / file, kind)
    with pytest.raises(InputError, match=rf"{file}|has neither model.safetensors"):
        load(base)


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("file", ["path.json", "path.safetensors"])
def test_what_is_no_file_in_place_of_a_path_is_refused_at_once(tmp_path, mesh, file, kind):
    model = write_model(tmp_path / "model", write_base(tmp_path / "base", text=False), mesh)
    make_odd(model / file, kind)
    with pytest.raises(InputError, match=file):
        load(model)
