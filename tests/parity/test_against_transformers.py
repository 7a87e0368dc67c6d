"""`verify --against transformers`: every kind of model passes, and what is wrong is found and said in one line."""

import json
import sys
from functools import partial

import numpy as np
import pytest

from l2d_jax import verify
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.model.rope_scaling import Llama3Scaling, YarnScaling
from l2d_jax.parity import against_transformers
from l2d_jax.weights import base_model, model_folder
from l2d_jax.weights.safetensors_file import SafetensorsFolder
from tests.support import bugs, programs, tiny
from tests.support.programs import call, write_base, write_release
from tests.support.tiny_gguf import write_gguf

LENGTH = 64

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder of each kind, without tokenizer, as transformers reads it."""
    pytest.importorskip("torch", reason="transformers computes its logits with torch")
    root = tmp_path_factory.mktemp("folders")
    for kind in tiny.CONFIGS:
        write_release(root / kind, kind)
    return {kind: root / kind / "base" for kind in tiny.CONFIGS}


def run(model, *arguments):
    return call(verify.main, "--model", model, "--against", "transformers", *arguments)


def short(model):
    return run(model, "--tokens", LENGTH)


def names(outcome):
    """Of the rows that pass, which are all."""
    assert outcome.status == 0, outcome
    assert outcome.err == ""
    *lines, last = outcome.out.splitlines()
    assert last == f"{len(lines)} of {len(lines)} rows pass"
    assert all(line.endswith("  pass") for line in lines)
    return [line[:10].strip() for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_every_kind_of_model_passes(folders, kind):
    outcome = run(folders[kind])
    assert names(outcome) == ["random 1", "random 2"]
    for line in outcome.out.splitlines()[:-1]:
        difference, bound, mean, largest = (float(word) for word in line.split() if "e-" in word)
        assert 0 < difference < 1e-4 <= bound < 4e-4
        assert 0 < mean < largest < 1e-8


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_coarser_type_is_judged_by_its_divergence(folders, dtype):
    outcome = run(folders["qwen"], "--dtype", dtype)
    assert names(outcome) == ["random 1", "random 2"]
    for line in outcome.out.splitlines()[:-1]:
        mean = float(line.split("KL")[1].split()[0])
        agreement = float(line.split("same arg max at")[1].split()[0])
        assert 1e-6 < mean < 0.05
        assert 50 < agreement <= 100


def test_the_rows(folders):
    architecture, tokenizer = tiny.architecture("llama"), byte_tokenizer()
    rows = against_transformers.choose_rows(architecture, None, length=None)
    assert {name: row.shape for name, row in rows.items()} == {"random 1": (512,), "random 2": (512,)}
    assert len(set(rows["random 1"])) == len(set(rows["random 2"])) == architecture.vocab_size
    assert np.any(rows["random 1"] != rows["random 2"])
    large = tiny.Architecture.from_hf({**tiny.CONFIGS["llama"], "vocab_size": 300})
    for length in (1, 512, 1024):
        rows = against_transformers.choose_rows(large, tokenizer, length=length)
        assert {row.shape for row in rows.values()} == {(length,)}
    assert " has " in tokenizer.decode(rows["text"])
    few = tiny.Architecture.from_hf({**tiny.CONFIGS["llama"], "max_position_embeddings": 40})
    assert {row.shape for row in against_transformers.choose_rows(few, None, length=None).values()} == {(40,)}


def test_text_where_there_is_a_tokenizer(folders, tmp_path):
    assert names(short(write_base(tmp_path / "base"))) == ["random 1", "random 2", "text"]


def test_a_gguf_file(folders, tmp_path, monkeypatch):
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "model.gguf")
    assert names(short(tmp_path / "model.gguf")) == ["random 1", "random 2", "text"]


@pytest.mark.slow
def test_the_base_of_a_path(folders, tmp_path):
    """A path beside its base, a path alone, and a workdir."""
    beside, alone, workdir = (tmp_path / name for name in ("beside", "alone", "workdir"))
    write_base(beside, text=False)
    alone.mkdir()
    for folder in (beside, alone):
        model_folder.save_path(folder, tiny.path(), base=str(folders["qwen"]))
    (workdir / "checkpoints").mkdir(parents=True)
    config = programs.config(model__name=str(folders["qwen"]), model__architecture=None)
    (workdir / "config.json").write_text(json.dumps(config.to_dict()))
    outcomes = [short(folder) for folder in (beside, alone, workdir, folders["qwen"])]
    assert {tuple(names(outcome)) for outcome in outcomes} == {("random 1", "random 2")}
    assert outcomes[0].out != outcomes[1].out == outcomes[2].out == outcomes[3].out


# --- rows beyond the first bound ---


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-scaled", "qwen"])
def test_a_doubtful_row_is_judged_by_their_own_rounding(folders, monkeypatch, kind):
    plain = list(against_transformers.compare(str(folders[kind]), length=LENGTH))
    monkeypatch.setattr(against_transformers, "TOLERANCE", 1e-9)
    rows = list(against_transformers.compare(str(folders[kind]), length=LENGTH))
    assert [row.name for row in rows] == [row.name for row in plain]
    for row, before in zip(rows, plain, strict=True):
        assert (row.difference, before.rounding) == (before.difference, 0)
        assert 1e-7 < row.rounding < 1e-4
        assert row.bound == against_transformers.ROUNDINGS * row.rounding
        assert row.passed()
    outcome = short(folders[kind])
    assert outcome.out.count("(transformers from its own float64: ") == 2
    assert names(outcome) == ["random 1", "random 2"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_their_exact_logits_are_float64_throughout(folders, kind):
    """Against the same with norms and angles written out: transformers alone takes them in float32."""
    rows = against_transformers.choose_rows(tiny.architecture(kind), None, length=LENGTH)
    plain = against_transformers._their_logits(folders[kind], rows)
    with against_transformers.in_float64():
        exact = against_transformers._their_logits(folders[kind], rows, dtype="float64")
    for name, row in rows.items():
        wanted = float64_logits(folders[kind], kind, row)
        np.testing.assert_allclose(exact[name], wanted, atol=1e-11)
        assert np.abs(plain[name] - wanted).max() > 1e-7


def float64_frequencies(architecture, kind):
    theta = architecture.local_rope_theta if kind == "local" else architecture.rope_theta
    half = architecture.head_dim // 2
    frequencies = theta ** (-np.arange(half) / half)
    scaling = architecture.rope_scaling
    if kind == "local" or scaling is None:
        return frequencies
    kept = np.zeros(half)
    if isinstance(scaling, Llama3Scaling):
        turns = scaling.original_max_position_embeddings * frequencies / (2 * np.pi)
        kept = np.clip((turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor), 0, 1)
    if isinstance(scaling, YarnScaling):
        turns = np.array([scaling.beta_fast, scaling.beta_slow])
        bounds = half * np.log(scaling.original_max_position_embeddings / (2 * np.pi * turns)) / np.log(theta)
        low, high = max(np.floor(bounds[0]), 0), min(np.ceil(bounds[1]), 2 * half - 1)
        kept = 1 - np.clip((np.arange(half) - low) / (high - low), 0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def float64_logits(folder, kind, row):
    import torch
    from transformers import AutoModelForCausalLM

    architecture = tiny.architecture(kind)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float64").eval()

    def turn(x, position_ids, layer_type="full_attention"):
        local = layer_type == "sliding_attention" and architecture.local_rope_theta
        frequencies = float64_frequencies(architecture, "local" if local else "global")
        angles = torch.tensor(np.tile(np.arange(len(row))[:, None] * frequencies, 2)[None])
        scaling = architecture.rope_scaling
        factor = 1.0 if local or scaling is None else scaling.attention_factor
        return angles.cos() * factor, angles.sin() * factor

    def normalize(x, norm):
        epsilon = architecture.rms_norm_eps
        return (architecture.norm_offset + norm.weight) * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)

    model.model.rotary_emb.forward = turn
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(normalize, norm=module)
    with torch.no_grad():
        return model(torch.tensor(row[None])).logits[0].numpy()


# --- what is found ---


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["self_attn.k_proj.bias", "mlp.down_proj.weight", "input_layernorm.weight"])
def test_one_entry_of_one_tensor_is_noticed(folders, monkeypatch, changed):
    """In the folder as we read it; transformers reads it by itself.

    The entry of the bias is the one that turns fastest with the position: softmax takes no notice of a constant.
    """
    right = SafetensorsFolder.read

    def wrong(self, name, index=None):
        tensor = right(self, name, index)
        if name == f"model.layers.1.{changed}":
            tensor.flat[0] += 0.05
        return tensor

    monkeypatch.setattr(SafetensorsFolder, "read", wrong)
    outcome = short(folders["qwen"])
    assert outcome.status == 1
    *lines, last = outcome.out.splitlines()
    assert [line.split()[-1] for line in lines] == ["FAIL", "FAIL"]
    assert last == "0 of 2 rows pass"


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "kind"), bugs.BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_bugs_are_noticed(folders, monkeypatch, bug, kind):
    right = base_model.BaseFiles.load
    monkeypatch.setattr(base_model.BaseFiles, "load", lambda self, **options: bug(right(self, **options), monkeypatch))
    outcome = short(folders[kind])
    assert outcome.status == 1
    assert outcome.out.splitlines()[-1] == "0 of 2 rows pass"


def test_a_measure():
    theirs, ours = np.zeros((3, 2), np.float32), np.zeros((3, 2), np.float32)
    theirs[1, 0], theirs[2, 1], ours[2, 1] = np.log(3), -40, -40.003
    row = against_transformers.measure("row", ours, theirs)
    assert row.difference == pytest.approx(np.log(3))
    assert row.largest == 40
    assert row.bound == pytest.approx(4e-3)
    wanted = 0.75 * np.log(0.75 / 0.5) + 0.25 * np.log(0.25 / 0.5)
    np.testing.assert_allclose(row.divergence, [0, wanted, 0], atol=1e-9)
    assert not row.passed()
    assert against_transformers.measure("row", ours[2:], theirs[2:]).passed()
    assert row.agreement == pytest.approx(1)  # a tie is its first
    coarse = row._replace(is_coarse=True)  # whose mean divergence is 0.131 / 3
    assert coarse.passed()
    assert not coarse._replace(divergence=1.2 * row.divergence).passed()
    small = against_transformers.measure("row", ours[2:] * 0, theirs[2:] * 0 + 1.1e-4)
    assert not small.passed()  # small logits: 1e-4
    assert not small._replace(rounding=1.09e-5).passed()
    assert small._replace(rounding=1.11e-5).passed()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_fails(value):
    right, wrong = np.zeros((2, 2), np.float32), np.array([[0, 0], [0, value]], np.float32)
    for ours, theirs in ((right, wrong), (wrong, right), (wrong, wrong)):
        with np.errstate(invalid="ignore"):
            assert not against_transformers.measure("row", ours, theirs).passed()


# --- bad input ---


@pytest.mark.parametrize(
    ("length", "message"),
    [(0, "must be in [2, "), (-1, "must be in [2, "), (1025, "to the 1024 positions")],
)
def test_a_length_that_does_not_fit(folders, length, message):
    error = run(folders["llama"], "--tokens", length).error
    assert message in error
    assert f"got {length}" in error


def test_options_that_exclude_each_other(folders, tmp_path):
    model = folders["llama"]
    assert "one of the arguments --reference --against is required" in call(verify.main, "--model", model).error
    assert "not allowed with argument" in run(model, "--reference", tmp_path / "file.npz").error
    assert "invalid choice: 'jax'" in call(verify.main, "--model", model, "--against", "jax").error
    alone = call(verify.main, "--model", model, "--reference", tmp_path / "file.npz", "--tokens", 3)
    assert "--tokens goes with --against" in alone.error
    coarse = call(verify.main, "--model", model, "--reference", tmp_path / "file.npz", "--dtype", "int8")
    assert "--dtype int8 goes with --against" in coarse.error


def test_without_torch_it_says_so_before_it_reads_weights(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("read a weight"))
    base = write_base(tmp_path / "base", text=False)
    assert "need torch: pip install '.[torch]'" in run(base).error


def test_models_that_transformers_cannot_be_given(folders, tmp_path):
    adapted, workdir = write_base(tmp_path / "adapted", text=False), tmp_path / "workdir"
    (adapted / "adapter_config.json").write_text("{}")
    assert f"convert export --model {adapted} --format hf" in run(adapted).error
    (workdir / "checkpoints").mkdir(parents=True)
    (workdir / "config.json").write_text(json.dumps(programs.config().to_dict()))
    assert "is random weights" in run(workdir).error
    assert "neither a folder" in run(tmp_path / "missing").error


def test_a_tokenizer_of_another_model(folders, tmp_path):
    base = write_base(tmp_path / "base", vocab_size=100)
    assert "has the id 258, and the model a vocabulary of 100" in run(base).error


def test_a_config_that_transformers_refuses(folders, tmp_path):
    base = write_base(tmp_path / "base", text=False, attention_dropout="much")
    assert "transformers cannot open" in run(base).error
