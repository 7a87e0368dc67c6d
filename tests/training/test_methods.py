"""The baselines as their users run them: training, resuming, exports, and a path on top of each."""

import dataclasses
import importlib
import json
import re
import shutil
from functools import partial

import datasets
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from l2d_jax import benchmark, convert, report, train
from l2d_jax.config.config_file import read_config
from l2d_jax.distributed.memory import parameters
from l2d_jax.distributed.sharding import abstract
from l2d_jax.files import read_json
from l2d_jax.loading import load
from l2d_jax.performance import timing, training_speed
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.methods import method_of
from l2d_jax.training.metrics import read_metrics
from l2d_jax.weights import base_model, model_folder
from l2d_jax.weights.base_model import read_architecture
from l2d_jax.weights.locate import find_base_and_adapters
from l2d_jax.weights.peft import Adapter
from tests.support.exports import files, logits, transformers_logits
from tests.support.programs import ROOT, TIMES, base_tensors, call, config, options, same_bits, write_base

generate = importlib.import_module("l2d_jax.generate")  # the package's own attribute is the function
BASELINES = {
    "lora": {"train__method": "lora", "lora__rank": 4, "optim__peak_rate": 3e-2},
    "full": {"train__method": "full", "optim__peak_rate": 1e-3},
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base", model_type="llama", torch_dtype="bfloat16")


def run(program, *arguments):
    outcome = call(program.main, *arguments)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    return outcome


@pytest.fixture(scope="module")
def trained(tmp_path_factory, base):
    """A workdir of each baseline, after six steps."""
    folder = tmp_path_factory.mktemp("runs")
    for method, changes in BASELINES.items():
        run(train, *options(model__name=base, **changes), "--workdir", folder / method)
    return folder


def newest(workdir, mesh):
    """What was trained, from the newest checkpoint."""
    given = read_json(workdir / "config.json")
    options = config(model__name=given["model"]["name"], **BASELINES[given["train"]["method"]])
    method, checkpoints = method_of(options), Checkpoints(workdir / "checkpoints")
    like = abstract(method.declare(read_architecture(options.model)), mesh)
    return checkpoints.restore(checkpoints.latest(), {method.part: like})[method.part]


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_what_a_run_measures(trained, method):
    records = read_metrics(trained / method)
    losses = [record["loss"] for record in records if "loss" in record]
    first, last = (record for record in records if "validation/loss" in record)
    assert len(losses) == 6
    assert np.mean(losses[3:]) < np.mean(losses[:3])
    assert last["validation/loss"] < first["validation/loss"] - 0.05
    wanted = {"step", "validation/loss", "validation/perplexity"}
    for name in ("loss", "expected", "greedy"):
        wanted |= {f"validation/{name}@1{end}" for end in ("", "_interval", "_gain")}
        low, high = last[f"validation/{name}@1_interval"]
        assert low <= last[f"validation/{name}@1"] <= high
    assert last.keys() == wanted
    out = run(report, "--workdir", trained / method).out
    assert f"{last['validation/loss']:.3f}" in out


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_a_run_that_is_cut_off_goes_on_bit_for_bit(trained, base, tmp_path, mesh, method):
    shutil.copytree(trained / method, tmp_path / "again")
    shutil.rmtree(tmp_path / "again" / "checkpoints" / "6")
    shutil.rmtree(tmp_path / "again" / "export")
    arguments = options(model__name=base, **BASELINES[method])
    assert "resuming after step 3" in run(train, *arguments, "--workdir", tmp_path / "again").out
    again, whole = (
        [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_metrics(folder)]
        for folder in (tmp_path / "again", trained / method)
    )
    assert again == whole
    assert same_bits(newest(tmp_path / "again", mesh), newest(trained / method, mesh))
    for name in files(trained / method / "export"):
        assert (tmp_path / "again/export" / name).read_bytes() == (trained / method / "export" / name).read_bytes()


@pytest.mark.slow
def test_the_base_is_left_as_it_is(trained, base):
    assert same_bits(load_file(base / "model.safetensors"), base_tensors())
    assert files(trained / "lora" / "export") == [
        "adapter_config.json",
        "adapter_model.safetensors",
        "fingerprint.json",
    ]
    assert read_json(trained / "lora/export/adapter_config.json")["base_model_name_or_path"] == str(base)
    step = trained / "lora" / "checkpoints" / "6"
    assert {path.name for path in step.iterdir() if path.is_dir()} == {"adapter", "optimizer"}


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_a_workdir_and_its_export_are_one_model(trained, base, method):
    opened, exported = load(trained / method), load(trained / method / "export", dtype="float32")
    assert opened.model.path is None
    assert (opened.defaults.budget, opened.defaults.solver, opened.step) == (1, "euler", 6)
    assert opened.stop_ids == exported.stop_ids == load(base).stop_ids
    assert opened.tokenizer.get_vocab() == exported.tokenizer.get_vocab()
    for ours, other in zip(logits(trained / method), logits(trained / method / "export"), strict=True):
        np.testing.assert_allclose(ours, other, atol=1e-5) if ours is not None else None
    assert np.abs(logits(trained / method)[0] - logits(base)[0]).max() > 0.01
    said = [run(generate, "--workdir", trained / method, "--prompt", "2 + 2?", "--max_new_tokens", 3).out]
    said.append(run(generate, "--model", trained / method / "export", "--prompt", "2 + 2?", "--max_new_tokens", 3).out)
    assert said[0] == said[1]
    refused = call(generate.main, "--workdir", trained / method, "--prompt", "?", "--budget", 3)
    assert "budget" in refused.error


@pytest.mark.torch
@pytest.mark.slow
def test_peft_loads_the_adapter(trained, base):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    model = peft.PeftModel.from_pretrained(plain, trained / "lora" / "export")
    np.testing.assert_allclose(transformers_logits(model), logits(trained / "lora")[0], atol=1e-4)


@pytest.mark.torch
@pytest.mark.slow
def test_transformers_loads_the_language_model(trained):
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = trained / "full" / "export"
    model = AutoModelForCausalLM.from_pretrained(folder)  # in the type that its config names
    assert str(model.dtype) == "torch.float32"
    np.testing.assert_allclose(transformers_logits(model), logits(trained / "full")[0], atol=1e-4)
    assert AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [97, 32, 98]


@pytest.fixture(scope="module")
def on_top(trained, tmp_path_factory):
    """A workdir of a path on the LoRA-finetuned model."""
    workdir = tmp_path_factory.mktemp("top") / "l2d"
    arguments = options(model__name=trained / "lora" / "export", train__steps=3, optim__peak_rate=1e-1)
    run(train, *arguments, "--workdir", workdir)
    return workdir


@pytest.mark.slow
def test_a_path_on_a_finetuned_model_keeps_the_whole_chain(trained, on_top, base, tmp_path):
    """Base, adapter and path are three folders, and one model; at t = 0 it is the finetuned one."""
    exported = on_top / "export"
    assert files(exported) == ["path.json", "path.safetensors"]
    assert read_json(exported / "path.json")["base"] == str(trained / "lora" / "export")
    ours, finetuned = logits(on_top), logits(trained / "lora")
    np.testing.assert_allclose(ours[0], finetuned[0], atol=1e-5)
    assert np.abs(ours[1] - ours[0]).max() > 1e-3
    for one, other in zip(ours, logits(exported), strict=True):
        np.testing.assert_array_equal(one, other)
    asked = ["--prompt", "2 + 2?", "--max_new_tokens", 3, "--budget", 1]
    whole = run(generate, "--model", exported, *asked).out
    alone = run(generate, "--workdir", trained / "lora", *asked).out
    assert whole.splitlines()[-1] == alone.splitlines()[-1]

    for kind in ("peft", "hf", "l2d"):
        run(convert, "export", "--model", on_top, "--format", kind, "--out", tmp_path / kind)
    assert files(tmp_path / "peft") == ["adapter_config.json", "adapter_model.safetensors", "fingerprint.json"]
    assert read_json(tmp_path / "peft" / "adapter_config.json")["base_model_name_or_path"] == str(base)
    assert (tmp_path / "peft/adapter_model.safetensors").read_bytes() == (
        trained / "lora/export/adapter_model.safetensors"
    ).read_bytes()
    assert "adapter_config.json" not in files(tmp_path / "hf")
    np.testing.assert_allclose(logits(tmp_path / "hf")[0], finetuned[0], atol=1e-5)
    release = ["--l2d", tmp_path / "l2d/l2d.safetensors", "--hyperparameters", tmp_path / "l2d/l2d.json"]
    run(convert, "import", "--base", base, *release, "--out", tmp_path / "model")
    for one, other in zip(logits(tmp_path / "model"), ours, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.slow
def test_updates_upon_updates(trained, tmp_path):
    """A chain of two adapters is followed; PEFT, which adds one, is not given it."""
    upper = trained / "lora" / "export"
    run(train, *options(model__name=upper, **BASELINES["lora"], train__steps=1), "--workdir", tmp_path / "two")
    language_model = find_base_and_adapters(str(tmp_path / "two" / "export"))
    assert language_model.adapters == (upper, tmp_path / "two" / "export")
    np.testing.assert_allclose(logits(tmp_path / "two")[0], logits(tmp_path / "two" / "export")[0], atol=1e-5)
    outcome = call(convert.main, "export", "--model", tmp_path / "two", "--format", "peft", "--out", tmp_path / "out")
    assert "has 2 stacked LoRA adapters: export it with another format" in outcome.error
    outcome = call(convert.main, "import", "--base", tmp_path / "two/export", "--out", tmp_path / "out")
    assert "a model folder has one adapter" in outcome.error


@pytest.mark.slow
def test_an_adapter_becomes_a_model_folder(trained, tmp_path):
    run(convert, "import", "--base", trained / "lora" / "export", "--out", tmp_path / "model")
    assert {"adapter_config.json", "config.json", "model.safetensors"} <= set(files(tmp_path / "model"))
    np.testing.assert_allclose(logits(tmp_path / "model")[0], logits(trained / "lora" / "export")[0], atol=1e-6)


@pytest.mark.slow
def test_weights_are_exported_in_the_type_of_the_products(tmp_path, base):
    """Trained in float32, multiplied and written in bfloat16: the export computes what training did."""
    changes = BASELINES["full"] | {"model__dtype": "bfloat16", "train__steps": 2}
    run(train, *options(model__name=base, **changes), "--workdir", tmp_path / "w")
    tensors = load_file(tmp_path / "w" / "export" / "model.safetensors")
    assert {str(tensor.dtype) for tensor in tensors.values()} == {"bfloat16"}
    assert read_json(tmp_path / "w" / "export" / "config.json")["torch_dtype"] == "bfloat16"
    opened, exported = load(tmp_path / "w").model.llm, load(tmp_path / "w" / "export").model.llm
    assert same_bits(opened, exported)
    assert opened.embed.dtype == jnp.bfloat16


@pytest.mark.slow
def test_random_weights_can_be_finetuned_too(tmp_path):
    """In full they become a model folder; an adapter of them is of use to its workdir alone."""
    for method in BASELINES:
        arguments = options(train__steps=1, **BASELINES[method])
        run(train, *arguments, "--workdir", tmp_path / method)
        run(generate, "--workdir", tmp_path / method, "--prompt", "?", "--max_new_tokens", 2)
    assert load(tmp_path / "full" / "export").tokenizer is not None
    assert read_json(tmp_path / "full" / "export" / "config.json")["model_type"] == "llama"
    with pytest.raises(model_folder.InputError, match="random weights, which only a workdir can make again"):
        load(tmp_path / "lora" / "export")


# --- what it costs ---

ADAPTERS = {"llama1b": 3_407_872, "qwen1p5b": 4_358_144, "llama8b": 13_631_488, "qwen7b": 10_092_544}


@pytest.mark.parametrize("name", ADAPTERS)
def test_trainable_parameters_of_the_paper(name):
    """The paper says 3M, 3M, 13M and 10M; for Qwen 1.5B, rank 32 on q and v is more."""
    given = read_config(str(ROOT / "configs" / f"{name}.py"), {"train.method": "lora"})
    a = read_architecture(given.model)
    widths = a.num_attention_heads * a.head_dim, a.num_key_value_heads * a.head_dim
    assert parameters(method_of(given).declare(a)) == ADAPTERS[name]
    assert ADAPTERS[name] == a.num_hidden_layers * sum(32 * (a.hidden_size + width) for width in widths)


@pytest.mark.parametrize("method", BASELINES)
def test_a_dry_run_counts_what_is_trained(method):
    file = ROOT / "configs" / "llama1b.py"
    outcome = run(train, "--config", file, f"--config.train.method={method}", "--dry_run")
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in outcome.out.splitlines())
    whole, own = 1_235_814_400, {"lora": 3_407_872, "full": 1_235_814_400}[method]
    assert rows["trainable parameters"].strip() == f"{own:,}"
    assert rows["frozen parameters"].strip() == ("0" if method == "full" else f"{whole:,}")
    assert rows["memory per device: its gradient and Adam moments"].strip() == f"{12 * own / 2**30:.2f} GiB"
    products = whole - 128256 * 2048 - (2 * 16 + 1) * 2048
    forward = 2 * (products + (own if method == "lora" else 0))
    assert rows["FLOPs per token: forward"].strip() == f"{forward:.3e}"
    backward = 4 * products if method == "full" else 2 * products + 4 * own
    assert rows["FLOPs per token: backward"].strip() == f"{backward:.3e}"
    head = {"full": 6, "lora": 4}[method] * 128256 * 2048
    assert rows["FLOPs per token: output head"].strip() == f"{head:.3e}"


@pytest.mark.slow
@pytest.mark.parametrize("method", BASELINES)
def test_the_benchmark_of_training(monkeypatch, method):
    monkeypatch.setattr(training_speed, "matrix_products", partial(timing.matrix_products, 256))
    found = json.loads(run(benchmark, "train", *options(**BASELINES[method]), "--json").out)
    assert found["tokens per second"] > 0
    assert found["parts"].keys() == {"all else"}
    refused = call(benchmark.main, "decode", *options(**BASELINES[method]))
    assert f"config.train.method '{method}' trains none" in refused.error


# --- bad input ---


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train__method": "lroa"}, "config.train.method must be one of 'l2d', 'lora', 'full', got 'lroa'"),
        ({"train__method": "full", "model__dtype": "int8"}, "which config.model.dtype 'int8' freezes"),
        ({"train__method": "lora", "lora__modules": "('q_prj',)"}, "has 'q_prj', which is no layer of the LM: did you"),
        ({"train__method": "lora", "train__draws_per_context": 2}, "draws_per_context 2 and time_density"),
    ],
)
def test_what_cannot_be_trained(tmp_path, monkeypatch, changes, message):
    monkeypatch.setattr(base_model, "find_base", None)
    assert message in call(train.main, *options(**changes), "--workdir", tmp_path / "w").error
    assert not (tmp_path / "w").exists()


@pytest.mark.slow
def test_a_workdir_of_another_method_is_refused(trained, base):
    outcome = call(train.main, *options(model__name=base), "--workdir", trained / "lora")
    assert "config.train.method was 'lora', is 'l2d'" in outcome.error


def copy_adapter(trained, folder, **changes):
    shutil.copytree(trained / "lora" / "export", folder)
    raw = read_json(folder / "adapter_config.json") | changes
    (folder / "adapter_config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("gone", "the base of {}: 'gone' is neither a folder"),
        ("", "names no base: give it as base_model_name_or_path"),
        (None, "names no base: give it as base_model_name_or_path"),
        ("SELF", "is its own base: fix base_model_name_or_path"),
        ("WORKDIR", "is a workdir of training, not a language model: give its"),
        ("NARROW", "the tensors do not fit the architecture"),
    ],
)
def test_a_base_that_is_not_there(trained, tmp_path, named, message):
    names = {"SELF": tmp_path / "adapter", "WORKDIR": trained / "full", "NARROW": tmp_path / "narrow"}
    write_base(tmp_path / "narrow", num_key_value_heads=1)
    given = str(names[named]) if named in names else named
    folder = copy_adapter(trained, tmp_path / "adapter", base_model_name_or_path=given)
    outcome = call(generate.main, "--model", folder, "--prompt", "?")
    assert message.format(folder) in outcome.error


@pytest.mark.slow
def test_a_relative_base_is_relative_to_the_working_directory(trained, base, tmp_path, monkeypatch):
    monkeypatch.chdir(base.parent)
    folder = copy_adapter(trained, tmp_path / "adapter", base_model_name_or_path=base.name)
    found = find_base_and_adapters(str(folder))
    assert (found.folder, found.adapters) == (type(base)(base.name), (folder,))
    np.testing.assert_array_equal(logits(folder)[0], logits(trained / "lora" / "export")[0])


@pytest.mark.slow
def test_the_tokenizer_beside_an_adapter_goes_first(trained, base, tmp_path):
    folder = copy_adapter(trained, tmp_path / "adapter")
    assert find_base_and_adapters(str(folder)).tokenizer_folder == base
    shutil.copyfile(base / "tokenizer.json", folder / "tokenizer.json")
    assert find_base_and_adapters(str(folder)).tokenizer_folder == folder


@pytest.mark.slow
def test_the_scale_of_an_adapter_is_kept(trained):
    adapter = Adapter.open(trained / "lora" / "export", read_architecture(config().model))
    assert adapter.config.scale == 16.0
    assert dataclasses.asdict(adapter.config)["modules"] == ("q_proj", "v_proj")
