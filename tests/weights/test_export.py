"""Every format, read back: by this project, by `torch`, by `transformers` and by PEFT."""

import json
import warnings
from functools import partial

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert, train
from l2d_jax.config.schema import PROJECTIONS
from l2d_jax.loading import load
from l2d_jax.weights import export, mapping, release
from tests.support import tiny
from tests.support.exports import files, logits, transformers_logits
from tests.support.peft_adapters import write_adapter
from tests.support.programs import (
    FIXTURES,
    STATE_DICTS,
    call,
    options,
    same_bits,
    write_base,
    write_model,
    write_release,
)

KINDS = [
    ("llama", {}),
    ("llama-scaled", {"classes": 2}),
    ("llama-wide-heads", {"layers": "dense"}),
    ("qwen", {}),
    ("qwen-tied", {"layers": "dense", "classes": 3}),
    ("qwen-tied", {}),
]


def run(*arguments):
    outcome = call(convert.main, *arguments)
    assert (outcome.status, outcome.err) == (0, ""), outcome


def import_release(folder, out):
    files = ["--l2d", folder / "l2d.safetensors", "--hyperparameters", folder / "l2d.json"]
    run("import", "--base", folder / "base", *files, "--out", out)
    return out


def export_to(model, out, kind, *arguments):
    run("export", "--model", model, "--format", kind, "--out", out, *arguments)
    return out


# --- the release's state dict ---


@pytest.mark.parametrize(("kind", "changes"), KINDS)
def test_a_state_dict_comes_back_bit_by_bit(tmp_path, kind, changes):
    state = write_release(tmp_path / "release", kind, **changes)
    model = import_release(tmp_path / "release", tmp_path / "model")
    out = export_to(model, tmp_path / "out", "l2d")
    assert files(out) == ["l2d.json", "l2d.safetensors"]
    again = load_file(out / "l2d.safetensors")
    assert again.keys() == state.keys()
    assert all(same_bits(again[name], tensor) for name, tensor in state.items())
    options = [json.loads((folder / "l2d.json").read_text())["l2d_kwargs"] for folder in (tmp_path / "release", out)]
    assert options[0] == options[1]
    (out / "base").symlink_to(tmp_path / "release" / "base")
    second = import_release(out, tmp_path / "second")
    for file in ("config.json", "model.safetensors", "path.safetensors"):
        assert (second / file).read_bytes() == (model / file).read_bytes()


@pytest.mark.parametrize("name", ["llama_lora", "llama_guid", "qwen_lora", "qwen_full"])
def test_the_releases_own_files_come_back_byte_by_byte(tmp_path, name):
    if not FIXTURES.is_dir():
        pytest.skip(f"no recordings of the release at {FIXTURES}")
    model = import_release(FIXTURES / name, tmp_path / "model")
    out = export_to(model, tmp_path / "out", "l2d")
    assert (out / "l2d.safetensors").read_bytes() == (FIXTURES / name / "l2d.safetensors").read_bytes()
    given, written = (json.loads((folder / "l2d.json").read_text()) for folder in (FIXTURES / name, out))
    assert written["family"] == given["family"]
    assert written["l2d_kwargs"].keys() - {"velocity_schedule"} == given["l2d_kwargs"].keys()
    changed = {k: v for k, v in written["l2d_kwargs"].items() if given["l2d_kwargs"].get(k, v) != v}
    assert changed.keys() <= {"flow_lora_alpha"}  # of the full path, which has none


SIZES = {"width": 12, "translation_width": 20, "frequency_width": 16, "condition_width": 24}


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """Three steps of training, of a model with the sizes of `STATE_DICTS` but for the vocabulary."""
    folder = tmp_path_factory.mktemp("trained")
    base = write_base(folder / "base", intermediate_size=56)
    sizes = {f"path__{name}": value for name, value in {**SIZES, "lora_rank": 4, "lora_alpha": 6.0}.items()}
    changes = {**sizes, "model__name": base, "model__architecture": None, "train__steps": 3}
    outcome = call(train.main, *options(**changes), "--workdir", folder / "run")
    assert outcome.status == 0, outcome
    return folder / "run"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "variant"), [("l2d", "llama_tied_lora"), ("l2d-full", "llama_tied_full")])
def test_a_trained_model_in_the_releases_names(tmp_path, workdir, kind, variant):
    """Names and shapes are those of the release's own classes; values are the last checkpoint's."""
    state = load_file(export_to(workdir, tmp_path / "out", kind) / "l2d.safetensors")
    theirs = STATE_DICTS[variant]
    sizes = {theirs["base"]["vocab_size"]: 320}
    wanted = {name: tuple(sizes.get(n, n) for n in shape) for name, shape in theirs["tensors"].items()}
    assert {name: tensor.shape for name, tensor in state.items()} == wanted
    written = json.loads((tmp_path / "out" / "l2d.json").read_text())
    assert written["l2d_kwargs"] == theirs["l2d_kwargs"] | {"nstep_guidance_parameter": 1.0}
    model = load(workdir, dtype="float32").model
    trained = {name: make() for name, make in mapping.tensors(model.path, mapping.PATH_ROWS)}
    assert all(np.any(trained[name]) for name in trained if "modulation_head.mlp.2.weight" in name)  # zero at the start
    is_merged = [name for name in trained if name not in state]
    assert bool(is_merged) == (kind == "l2d-full")
    assert all(same_bits(state[name], tensor) for name, tensor in trained.items() if name not in is_merged)
    base = load_file(workdir.parent / "base" / "model.safetensors")
    assert all(same_bits(state[name], tensor) for name, tensor in base.items())
    for name in {name.rpartition(".")[0] for name in is_merged}:
        product = trained[f"{name}.A"].astype(np.float64) @ trained[f"{name}.B"]
        whole = base[f"{name.replace('.flow_', '.')}.weight"] + 1.5 * product.T
        np.testing.assert_allclose(state[f"{name}.weight"], whole, atol=1e-6)


def test_types_are_kept(tmp_path):
    state = write_release(tmp_path / "release", "llama")
    halved = {n: t if "flow_" in n and "wrapped" not in n else t.astype(ml_dtypes.bfloat16) for n, t in state.items()}
    save_file(halved, tmp_path / "release" / "l2d.safetensors")
    model = import_release(tmp_path / "release", tmp_path / "model")
    again = load_file(export_to(model, tmp_path / "out", "l2d") / "l2d.safetensors")
    assert all(same_bits(again[name], tensor) for name, tensor in halved.items())


@pytest.mark.parametrize("kind", ["qwen-tied", "llama"])
def test_a_torch_file(tmp_path, kind):
    torch = pytest.importorskip("torch")
    state = write_release(tmp_path / "release", kind)
    state["model.norm.weight"] = state["model.norm.weight"].astype(ml_dtypes.bfloat16)
    save_file(state, tmp_path / "release" / "l2d.safetensors")
    model = import_release(tmp_path / "release", tmp_path / "model")
    out = export_to(model, tmp_path / "out", "l2d", "--torch")
    assert files(out) == ["l2d.json", "pytorch_model.bin"]
    found = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert found.keys() == state.keys()
    assert found["model.norm.weight"].dtype == torch.bfloat16
    read_back = release.open_checkpoint(out / "pytorch_model.bin")
    assert all(same_bits(read_back.read(name), tensor) for name, tensor in state.items())
    alias = "model.layers.1.mlp.flow_up_proj.wrapped_layer.weight"
    assert found[alias].data_ptr() == found["model.layers.1.mlp.up_proj.weight"].data_ptr()


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "changes"), [("llama-scaled", {}), ("qwen", {"classes": 2})])
def test_full_weights_compute_what_lora_does(tmp_path, kind, changes):
    write_release(tmp_path / "release", kind, **changes)
    model = import_release(tmp_path / "release", tmp_path / "model")
    out = export_to(model, tmp_path / "out", "l2d-full")
    state = load_file(out / "l2d.safetensors")
    dense = write_release(tmp_path / "dense", kind, layers="dense", **changes)
    assert {n: (t.shape, t.dtype) for n, t in state.items()} == {n: (t.shape, t.dtype) for n, t in dense.items()}
    (out / "base").symlink_to(tmp_path / "release" / "base")
    whole = import_release(out, tmp_path / "whole")
    assert load(whole, dtype="float32").model.path.config.layers == "dense"
    for ours, theirs in zip(logits(whole), logits(model), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-5)


# --- transformers and PEFT ---


def quietly(function):
    """Call it; any warning, printed or raised, is an error."""
    from transformers.utils import logging

    messages = []
    logger = logging.get_logger("transformers")
    handler = type("Handler", (__import__("logging").Handler,), {"emit": lambda _, record: messages.append(record)})()
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.simplefilter("ignore", FutureWarning)  # PEFT's use of transformers, not ours of either
            made = function()
    finally:
        logger.removeHandler(handler)
    assert [record.getMessage() for record in messages if record.levelno >= 30] == []
    return made


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.CONFIGS)
@pytest.mark.parametrize("shard", [5_000_000_000, 20_000])
def test_transformers_loads_the_language_model(tmp_path, monkeypatch, kind, shard):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    write_release(tmp_path / "release", kind)
    model = import_release(tmp_path / "release", tmp_path / "model")
    monkeypatch.setattr(export, "write_safetensors", partial(export.write_safetensors, max_shard_bytes=shard))
    out = export_to(model, tmp_path / "out", "hf")
    assert ("model.safetensors.index.json" in files(out)) == (shard < 10**6)
    assert not [name for name in files(out) if name.startswith("path")]
    found = quietly(partial(AutoModelForCausalLM.from_pretrained, out, dtype="float32"))
    np.testing.assert_allclose(transformers_logits(found), logits(model)[0], atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "modules", "options"),
    [
        ("qwen", ("q_proj", "v_proj"), {}),
        ("llama-scaled", PROJECTIONS, {"use_rslora": True}),
        ("llama-wide-heads", ("o_proj", "k_proj", "down_proj"), {"bias": "none", "modules_to_save": None}),
    ],
)
def test_peft_and_transformers_load_a_lora_finetune(tmp_path, kind, modules, options):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    write_release(tmp_path / "release", kind)
    base = tmp_path / "release" / "base"
    given = write_adapter(tmp_path / "adapter", kind, modules=modules, **options)
    run("import", "--base", base, "--adapter", given, "--out", tmp_path / "model")
    assert same_bits(load_file(tmp_path / "model" / "model.safetensors"), load_file(base / "model.safetensors"))
    ours = logits(tmp_path / "model")[0]
    assert np.abs(ours - logits(base)[0]).max() > 0.1

    out = export_to(tmp_path / "model", tmp_path / "peft", "peft")
    assert files(out) == ["adapter_config.json", "adapter_model.safetensors", "fingerprint.json"]
    assert same_bits(load_file(out / "adapter_model.safetensors"), load_file(given / "adapter_model.safetensors"))
    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    found = quietly(partial(peft.PeftModel.from_pretrained, plain, out))
    assert sum("lora_" in name for name, _ in found.named_parameters()) == len(modules) * 2 * 2
    np.testing.assert_allclose(transformers_logits(found), ours, atol=1e-4)

    merged = export_to(tmp_path / "model", tmp_path / "hf", "hf")
    assert "adapter_config.json" not in files(merged)
    np.testing.assert_allclose(
        transformers_logits(AutoModelForCausalLM.from_pretrained(merged, dtype="float32")), ours, atol=1e-4
    )
    run("import", "--base", tmp_path / "model", "--out", tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "model")
    np.testing.assert_array_equal(logits(tmp_path / "again")[0], ours)


def test_a_sharded_load_adds_the_adapter_once(tmp_path):
    """Slices of adapted weights, as a mesh reads them."""
    write_release(tmp_path / "release", "qwen")
    given = write_adapter(tmp_path / "adapter", "qwen", modules=PROJECTIONS)
    run("import", "--base", tmp_path / "release" / "base", "--adapter", given, "--out", tmp_path / "model")
    source = export.Parts.open(str(tmp_path / "model")).llm
    for name in source.records:
        whole = source.read(name)
        cut = tuple(slice(1, size, 1) for size in whole.shape)
        np.testing.assert_allclose(source.read(name, cut), whole[cut], rtol=1e-6, atol=1e-7)


# --- bad input ---


@pytest.mark.parametrize(
    ("model", "arguments", "message"),
    [
        ("base", ["--format", "l2d"], "has no diffusion path: export it with --format hf"),
        ("base", ["--format", "l2d-full"], "has no diffusion path"),
        ("dense", ["--format", "l2d-full"], "has full weights already: export it with --format l2d"),
        ("dense", ["--format", "peft"], "has no LoRA adapter"),
        ("dense", ["--format", "hf", "--torch"], "--torch is about the release's state dict"),
        ("dense", ["--format", "gguf"], "invalid choice: 'gguf'"),
        ("none", ["--format", "hf"], "neither a folder"),
        ("random", ["--format", "l2d"], "is random weights, which only a workdir can make again"),
        ("workdir", ["--format", "l2d"], "has no export yet: finish the training"),
    ],
)
def test_what_cannot_be_exported(tmp_path, model, arguments, message):
    write_release(tmp_path / "release", "llama", layers="dense")
    import_release(tmp_path / "release", tmp_path / "dense")
    (tmp_path / "release" / "base").rename(tmp_path / "base")
    (tmp_path / "random").mkdir()
    (tmp_path / "random" / "path.json").write_text('{"base": "random"}')
    (tmp_path / "workdir" / "checkpoints").mkdir(parents=True)
    outcome = call(convert.main, "export", "--model", tmp_path / model, "--out", tmp_path / "out", *arguments)
    assert message in outcome.error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "value"), [("start", "anchored"), ("reader", "path"), ("time_scale", 100.0)])
def test_what_the_release_does_not_know_is_not_exported_to_it(tmp_path, mesh, name, value):
    model = write_model(tmp_path / "model", write_base(tmp_path / "base"), mesh, **{name: value})
    unknown = f"has {name} {value!r}, which the release does not know: train one with config.path.{name}"
    for format in ("l2d", "l2d-full"):
        outcome = call(convert.main, "export", "--model", model, "--format", format, "--out", tmp_path / "out")
        assert unknown in outcome.error
        assert not (tmp_path / "out").exists()


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    write_release(tmp_path / "release", "llama")
    model = import_release(tmp_path / "release", tmp_path / "model")

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(release, "options", fail)  # after the weights
    before = files(tmp_path)
    assert call(convert.main, "export", "--model", model, "--format", "l2d", "--out", tmp_path / "out").status == 130
    assert files(tmp_path) == before
    spoiled = model / "path.safetensors"
    spoiled.write_bytes(spoiled.read_bytes()[:-8])
    outcome = call(convert.main, "export", "--model", model, "--format", "l2d", "--out", tmp_path / "out")
    assert "path.safetensors" in outcome.error
    assert files(tmp_path) == before


def test_without_torch_no_torch_file_is_written(tmp_path, monkeypatch):
    write_release(tmp_path / "release", "llama")
    model = import_release(tmp_path / "release", tmp_path / "model")
    monkeypatch.setitem(__import__("sys").modules, "torch", None)
    arguments = ["--model", model, "--format", "l2d", "--torch", "--out", tmp_path / "out"]
    assert "needs torch: pip install '.[torch]'" in call(convert.main, "export", *arguments).error
    assert not (tmp_path / "out").exists()
