"""`verify --against torch`: a path passes wherever it lies, and what is wrong is found and said in one line."""

import json
import sys

import numpy as np
import pytest

from l2d_jax import verify
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.model.architecture import Architecture
from l2d_jax.parity import against_torch
from l2d_jax.parity.recording import Check
from l2d_jax.weights import model_folder, publish
from l2d_jax.weights.safetensors_file import SafetensorsFolder
from tests.support import programs, tiny
from tests.support.programs import call, write_base, write_model

SHORT = ("--tokens", 12)


def run(model, *arguments):
    return call(verify.main, "--model", model, "--against", "torch", *arguments)


@pytest.fixture
def model(tmp_path, mesh):
    """A model folder: a path beside its base."""
    return write_model(tmp_path / "model", write_base(tmp_path / "base", model_type="llama"), mesh, classes=2)


@pytest.mark.torch
@pytest.mark.slow
def test_a_path_passes_and_a_bug_in_the_class_does_not(model, tmp_path, mesh, monkeypatch):
    """Beside its base, alone, and published; then with a norm in the class whose weight the path does not change."""
    pytest.importorskip("torch")
    from l2d_jax.weights.pytorch import path_l2d

    alone, published = tmp_path / "alone", tmp_path / "published"
    for folder in (alone, published):
        folder.mkdir()
    for name in ("path.json", "path.safetensors"):
        (alone / name).write_bytes((model / name).read_bytes())
    raw = json.loads((model / "config.json").read_text())
    architecture = Architecture.from_hf(raw)
    path, names = model_folder.load_path(model, architecture, mesh), {"base": "../base", "base_revision": None}
    publish.write_torch_folder(published, path, architecture, base_config=raw, tokenizer=byte_tokenizer(), **names)
    outcomes = [run(folder, *SHORT) for folder in (model, alone, published)]
    for outcome in outcomes:
        assert outcome.status == 0, outcome.err
        assert outcome.err == ""
        *lines, last = outcome.out.splitlines()
        assert last == f"{len(lines)} of {len(lines)} arrays pass"
        assert [line.split("  ")[0] for line in lines] == NAMES
    assert outcomes[0].out == outcomes[1].out
    monkeypatch.setattr(path_l2d, "_modulated", lambda norm, x, scale: norm(x))
    outcome = run(model, *SHORT)
    assert outcome.status == 1
    lines = outcome.out.splitlines()
    assert lines[0].startswith("logits of the language model")
    assert lines[0].endswith("pass")
    failed = {line.split("  ")[0] for line in lines if line.endswith("FAIL")}
    assert failed >= set(NAMES[1:5])  # float64 does not excuse them


NAMES = [
    "logits of the language model",
    *(f"logits at t = {t}" for t in (0.1, 0.5, 0.9, 1.0)),
    *(
        f"{what} by {solver}"
        for solver in ("euler", "midpoint", "heun", "heun3", "rk4", "restart")
        for what in ("logits", "states")
    ),
    *(f"answers at budget {budget}, tokens that differ" for budget in (1, 3, 15)),
]


def test_a_token_that_differs_fails():
    rows = np.asarray(tiny.tokens(2, 6))
    ours = {"answers at budget 3": np.array([[1, 2], [3, 4]])}

    def theirs(*_):
        yield "answers at budget 3", np.array([[1, 2], [3, 5]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(against_torch, "their_arrays", theirs)
        [check] = against_torch.path_checks(ours, None, rows)
    assert (check.name, check.difference(), check.passed()) == ("answers at budget 3, tokens that differ", 1, False)


def test_a_doubtful_array_is_judged_by_rounding(monkeypatch):
    """Of PyTorch's own, from float64; what is further away, and a token, is not excused."""
    pytest.importorskip("torch")
    theirs = np.float32([[1.0, 2.0]])

    class Model:
        def double(self):
            return self

    def arrays(*_):
        for name in ("a", "b", "c"):
            yield name, theirs.astype(np.float64) + 1e-4

    monkeypatch.setattr(against_torch, "their_arrays", arrays)
    doubtful = {name: Check(name, theirs + far, theirs) for name, far in (("a", 9e-4), ("c", 2e-3))}
    judged = against_torch.judge_by_rounding(doubtful, Model(), np.zeros((1, 2), np.int64))
    assert [(check.name, check.passed()) for check in judged] == [("a", True), ("c", False)]
    assert against_torch.judge_by_rounding({}, None, np.zeros((1, 2), np.int64)) == []


def test_without_torch_it_says_so_before_it_reads_weights(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(SafetensorsFolder, "read", lambda *_: pytest.fail("read a weight"))
    assert "need torch: pip install '.[torch]'" in run(model).error


def test_models_that_have_no_path_to_compare(model, tmp_path):
    pytest.importorskip("torch")
    assert "has no diffusion path: compare its language model by --against transformers" in run(tmp_path / "base").error
    assert "compares in float32: leave --dtype out" in run(model, "--dtype", "bfloat16").error
    (model / "adapter_config.json").write_text("{}")
    assert "has a LoRA adapter" in run(model).error
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps(programs.config().to_dict()))
    assert "is random weights" in run(tmp_path / "run").error
