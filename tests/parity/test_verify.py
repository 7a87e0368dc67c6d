import dataclasses
import json

import jax
import jaxtyping
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import verify
from l2d_jax.loading import load
from l2d_jax.parity import adaptive_runs, against_release, fixed_step_runs
from l2d_jax.parity.recording import Check, Recording
from l2d_jax.programs.convert import import_model
from tests.support.programs import FIXTURES, RECORDINGS, Outcome, call

COMMITTED = ["llama_tied_lora", "qwen_untied_lora_classes"]
LARGER = ["llama_lora", "llama_guid", "qwen_lora", "qwen_full"]  # recordings that a clone lacks
QWEN = COMMITTED[1]

with_fixtures = pytest.mark.skipif(not FIXTURES.is_dir(), reason=f"no recordings of the release at {FIXTURES}")


def larger(*values):
    return pytest.param(*values, marks=with_fixtures)


def where(name):
    return (RECORDINGS if name in COMMITTED else FIXTURES) / name


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The model folders of all recordings."""
    root = tmp_path_factory.mktemp("models")
    for name in COMMITTED + (LARGER if FIXTURES.is_dir() else []):
        import_model(
            str(where(name) / "base"),
            root / name,
            l2d=(where(name) / "l2d.safetensors", where(name) / "l2d.json"),
        )
    return root


def recording(name):
    return Recording.open(where(name) / "reference.npz")


def faults(checks):
    """The checks that fail, which are all the more telling than one that asserts."""
    found = list(checks)
    assert found
    return [(check.name, check.difference()) for check in found if check.judged and not check.passed()]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*COMMITTED, larger("llama_lora")])
def test_a_whole_recording_passes(folders, name, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # shapes: the tests below check those of each part
    outcome = call(verify.main, "--model", folders / name, "--reference", where(name) / "reference.npz")
    assert outcome.status == 0, outcome.out
    assert outcome.err == ""
    *lines, last = outcome.out.splitlines()
    judged = [line for line in lines if not line.endswith("  (not judged)")]
    assert last == f"{len(judged)} of {len(judged)} arrays pass"
    assert all(line.endswith("  pass") for line in judged)
    a = recording(name)
    ours = {line.split()[0] for line in lines}
    # What no line compares: inputs, and whatever is named here.
    inputs = {"input_ids", "target_ids", "timesteps", "noise", "class_labels", "position_ids"}
    unread = {name for name in a if name not in ours and name.rsplit(".", 1)[-1] not in inputs}
    parts = (".x0", ".t_grid", ".samples", ".noise", ".labels", ".attention_mask", ".drop_uniform")
    assert sorted(name for name in unread if not name.endswith(parts)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [larger(name) for name in LARGER[1:]])
def test_the_network_its_loss_and_its_gradients(folders, name):
    model, a = load(folders / name, dtype="float32").model, recording(name)
    a.require_fit(model)
    groups = [
        against_release.forward,
        against_release.corrected,
        against_release.intermediate,
        against_release.training,
    ]
    with jax.default_matmul_precision("highest"):
        assert [fault for group in groups for fault in faults(group(model, a))] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        larger("llama_guid", ["midpoint8.seq.w1.5", "midpoint8.last.w0.0", "midpoint8.last.sampleT1"]),
        larger("qwen_lora", ["midpoint8.last.samplepoly", "midpoint8.last.pad"]),
        larger("qwen_full", ["euler15.seq.avgT1", "euler15.last.avgpoly"]),
    ],
)
def test_trajectories(folders, name, keys):
    model, a = load(folders / name, dtype="float32").model, recording(name)
    with jax.default_matmul_precision("highest"):
        for key in keys:
            assert faults(fixed_step_runs.trajectory(model, a, key, a.meta["odes"][key])) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "keys"),
    [
        larger("llama_guid", ["fehlberg2.last.f63.b2", "bosh3.seq.f63.b2.avgT1"]),
        larger("qwen_full", ["adaptive_heun.last.f63.b1r1.avgT1"]),
    ],
)
def test_adaptive_trajectories(folders, name, keys):
    model, a = load(folders / name, dtype="float32").model, recording(name)
    with jax.default_matmul_precision("highest"):
        for key in keys:
            checks = list(adaptive_runs.adaptive_trajectory(model, a, key, a.meta["odes"][key]))
            assert all(check.judged for check in checks)
            assert faults(checks) == []


@pytest.mark.slow
def test_a_run_beyond_the_end_without_a_guard_is_not_judged(folders):
    """The release's Qwen evaluates the path at t > 1."""
    model, a = load(folders / QWEN, dtype="float32").model, recording(QWEN)
    key = "fehlberg2.last.f1.b1"
    checks = list(adaptive_runs.adaptive_trajectory(model, a, key, a.meta["odes"][key]))
    assert not any(check.judged for check in checks)


@with_fixtures
def test_guided_generations(folders):
    model, a = load(folders / "llama_guid", dtype="float32").model, recording("llama_guid")
    kept = {name: a.meta["decode"]["outputs"][name] for name in ("base", "euler15")}
    a.meta["decode"]["outputs"] = kept
    with jax.default_matmul_precision("highest"):
        assert faults(fixed_step_runs.generations(model, a)) == []


@pytest.fixture
def small(folders, monkeypatch):
    """`verify` with the fast groups alone."""
    for group in ("training", "optimization", "trajectories", "adaptive_trajectories", "generations"):
        monkeypatch.setattr(against_release, group, lambda *_: iter(()))
    monkeypatch.setattr(against_release, "intermediate", lambda *_: iter(()))
    return folders / QWEN


def run(model, file=None) -> Outcome:
    return call(verify.main, "--model", model, "--reference", file or where(QWEN) / "reference.npz")


def copy(model, folder):
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("model.safetensors", "model.layers.1.self_attn.k_proj.bias"),
        ("path.safetensors", "model.layers.1.mlp.flow_down_proj.B"),
    ],
)
def test_one_entry_of_one_tensor_is_noticed(small, tmp_path, file, tensor):
    model = copy(small, tmp_path / "model")
    tensors = load_file(model / file)
    tensors[tensor].flat[0] += 0.05  # of the bias, the entry that turns fastest with the position
    save_file(tensors, model / file)
    about = json.loads((model / "path.json").read_text())
    del about["base_fingerprint"], about["checksum"]  # or it would be refused before anything is computed
    (model / "path.json").write_text(json.dumps(about))
    outcome = run(model)
    assert outcome.status == 1
    lines = outcome.out.splitlines()
    failed = [line for line in lines if line.endswith("FAIL")]
    assert any(line.startswith("l2d_logits ") for line in failed)
    assert lines[-1] == f"{len(lines) - 1 - len(failed)} of {len(lines) - 1} arrays pass"


def test_bfloat16_is_as_near_as_its_eight_bits(small):
    outcome = call(verify.main, "--model", small, "--reference", where(QWEN) / "reference.npz", "--dtype", "bfloat16")
    assert outcome.status == 0, outcome.out
    *lines, last = outcome.out.splitlines()
    assert last == f"{len(lines)} of {len(lines)} arrays pass"
    differences = {line.split()[0]: float(line.split()[1]) for line in lines}
    assert all("relative" in line for line in lines)
    assert differences["l2d_logits"] > 1e-3
    assert differences["vocab_table"] < 1e-2


def test_a_near_tie_is_printed_and_not_judged(small, tmp_path, monkeypatch):
    """The same wrong trajectory, with and without the recording's word that it met a near tie."""
    outcomes = {}
    for robust in (True, False):
        tie = Check("ode.key.traj", np.ones(3), np.zeros(3), judged=robust)
        monkeypatch.setattr(against_release, "trajectories", lambda *_, tie=tie: iter([tie]))
        outcomes[robust] = run(small)
    assert outcomes[True].status == 1
    assert outcomes[False].status == 0
    [line] = [line for line in outcomes[False].out.splitlines() if line.startswith("ode.key.traj")]
    assert line.split()[1:] == ["1.00e+00", "absolute", "(not", "judged)"]
    assert "1 of 9" not in outcomes[False].out.splitlines()[-1]


def test_the_recordings_word_is_taken(folders):
    model, a = load(folders / QWEN, dtype="float32").model, recording(QWEN)
    run = a.meta["odes"]["euler15.last"]
    checks = fixed_step_runs.trajectory(model, a, "euler15.last", {**run, "robust": False})
    assert not any(check.judged for check in checks)
    checks = fixed_step_runs.trajectory(model, a, "euler15.last", {**run, "robust": True})
    assert all(check.judged for check in checks)


def test_a_model_without_a_path_is_compared_as_far_as_it_goes(folders, tmp_path):
    model = copy(folders / QWEN, tmp_path / "model")
    for file in model.glob("path.*"):
        file.unlink()
    outcome = run(model)
    assert outcome.status == 0
    assert [line.split()[0] for line in outcome.out.splitlines()] == ["base_logits", "lp.base_logits", "2"]


def rewrite(tmp_path, **changes):
    """The recording with other arrays; None leaves one out."""
    arrays = {**recording(QWEN), **changes}
    file = tmp_path / "reference.npz"
    np.savez(file, **{name: array for name, array in arrays.items() if array is not None})
    return file


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l2d_logits": None}, "has no array 'l2d_logits': record it again"),
        ({"input_ids": None}, "has no array 'input_ids'"),
        ({"input_ids": np.full((2, 12), 10**6)}, "input_ids must be rows of tokens below 97"),
        ({"input_ids": np.zeros(12, np.int64)}, "input_ids must be rows of tokens"),
        ({"input_ids": np.zeros((2, 12))}, "input_ids must be rows of tokens"),
        ({"noise": np.zeros((2, 12, 5), np.float32)}, "noise must have the shape [2, 12, 12]"),
    ],
)
def test_a_recording_of_something_else_is_one_line(small, tmp_path, changes, message):
    assert message in run(small, rewrite(tmp_path, **changes)).error


def test_a_recording_that_cannot_be_read_is_one_line(small, tmp_path):
    file = tmp_path / "reference.npz"
    assert "cannot read" in run(small, file).error
    for content in (b"", b"text", (where(QWEN) / "reference.npz").read_bytes()[:5000]):
        file.write_bytes(content)
        assert "give an .npz of plain arrays" in run(small, file).error
    with file.open("wb") as stream:
        np.save(stream, np.zeros(3))
    assert "give an .npz of plain arrays" in run(small, file).error
    np.savez(file, input_ids=np.array([{"a": 1}], dtype=object))
    assert "give an .npz of plain arrays" in run(small, file).error


def test_a_run_that_is_not_described_is_one_line(folders, tmp_path, monkeypatch):
    for group in ("corrected", "intermediate", "training", "optimization"):
        monkeypatch.setattr(against_release, group, lambda *_: iter(()))
    assert "has a run 'adaptive_heun.last.f1.b1'" in run(folders / QWEN, rewrite(tmp_path)).error
    (tmp_path / "meta.json").write_text("{")
    assert "meta.json: malformed JSON" in run(folders / QWEN, rewrite(tmp_path)).error


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check("a", np.ones(2), np.ones(2)), True),
        (Check("a", np.ones(2), np.ones(2) + 2e-4), False),
        (Check("a", np.full(2, 1e3), np.full(2, 1e3 + 0.5), 1e-3, relative=True), True),
        (Check("a", np.ones(2), np.ones(3)), False),
        (Check("a", np.full(2, np.nan), np.ones(2)), False),
        (Check("a", np.ones(2), np.full(2, np.nan)), False),
        (Check("a", np.zeros(0), np.zeros(0)), True),
    ],
)
def test_what_passes(check, passed):
    assert check.passed() == passed


def test_a_layer_that_is_cut_off_does_nothing(folders):
    model = load(folders / COMMITTED[0], dtype="float32").model
    llm, _ = against_release._cut(model.llm, model.path, 1)
    shorter = jax.tree.map(lambda leaf: leaf[:1], (model.llm.layers, model.path.layers))
    whole = dataclasses.replace(model.llm, layers=shorter[0])
    a = recording(COMMITTED[0])
    hidden = [against_release.read(m, a["input_ids"]).hidden for m in (llm, whole)]
    assert np.array_equal(*hidden)


# --- an optimizer that divides by what is almost zero ---


def steps(model, a):
    return {check.name: check for check in against_release.optimization(model, a)}


@pytest.fixture(scope="module")
def doubtful(folders):
    """A model whose gradients have float errors: it is compared with its own steps, gradients moved by such errors."""
    model, a = load(folders / COMMITTED[0], dtype="float32").model, recording(COMMITTED[0])
    right, rng = against_release._gradient, np.random.default_rng(0)

    def wrong(*arguments):
        value, gradient = right(*arguments)
        return value, jax.tree.map(lambda g: g + 2e-6 * abs(g).max() * rng.choice([-1, 1], g.shape), gradient)

    with jax.default_matmul_precision("highest"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(against_release, "_gradient", wrong)
        moved = steps(model, a)
    return model, a, {name: np.asarray(check.ours) for name, check in moved.items()}


@pytest.mark.slow
def test_float_errors_of_gradients_are_no_fault(doubtful):
    """They move entries by more than the tolerance, and no further than the bound."""
    model, a, moved = doubtful
    with jax.default_matmul_precision("highest"):
        checks = steps(model, Recording(a.file, {**a, **moved}, a.meta))
    assert [name for name, check in checks.items() if not check._replace(noise=0.0).passed()] != []
    assert [name for name, check in checks.items() if not check.passed()] == []


@pytest.mark.slow
def test_few_entries_are_in_doubt(doubtful):
    model, a, _ = doubtful
    with jax.default_matmul_precision("highest"):
        checks = steps(model, a)
    noise = np.concatenate([np.ravel(check.noise) for name, check in checks.items() if name.startswith("opt.final")])
    assert np.mean(noise > 1e-4) < 0.02
    assert noise.max() <= 2 * 5 * 1.1e-3  # both ways, at the learning rate a step


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"beta1": 0.85}, {"beta2": 0.9}, {"epsilon": 1e-5}, {"weight_decay": 0.2}])
def test_another_optimizer_fails(doubtful, monkeypatch, changes):
    model, a, _ = doubtful
    right = against_release.OptimConfig
    monkeypatch.setattr(against_release, "OptimConfig", lambda: dataclasses.replace(right(), **changes))
    with jax.default_matmul_precision("highest"):
        assert [name for name, check in steps(model, a).items() if not check.passed()] != []
