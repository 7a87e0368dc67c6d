import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial

import datasets
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import generate, train
from l2d_jax.config.schema import Config
from l2d_jax.data.examples import Examples
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.distributed import processes
from l2d_jax.distributed.memory import parameters
from l2d_jax.distributed.sharding import abstract
from l2d_jax.files import read_json
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.storage.disk import Disk
from l2d_jax.training import checkpoint, manifest
from l2d_jax.training import run as loop
from l2d_jax.training.metrics import read_metrics
from l2d_jax.weights import base_model, model_folder
from l2d_jax.weights.safetensors_file import SafetensorsFolder
from tests.support.programs import (
    ROOT,
    base_tensors,
    call,
    config,
    open_base,
    options,
    remove_template,
    remove_tokenizer,
    same_bits,
    without_times,
    write_base,
)

STEPS = 6  # of configs/tiny.py, with a checkpoint after 3


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that nothing has cut off."""
    workdir = tmp_path_factory.mktemp("run") / "nested" / "workdir"
    outcome = call(train.main, *options(), "--workdir", workdir)
    assert (outcome.status, outcome.err) == (0, "")
    return workdir


def newest_path(workdir, mesh, **changes):
    """The path in the newest checkpoint."""
    options = config(**changes)
    declared = DiffusionPath.declare(options.path, Architecture.from_hf(options.model.architecture))
    checkpoints = checkpoint.Checkpoints(workdir / "checkpoints")
    return checkpoints.restore(checkpoints.latest(), {"path": abstract(declared, mesh)})["path"]


@pytest.mark.slow
def test_what_a_run_leaves(run):
    assert sorted(path.name for path in run.iterdir()) == [
        ".lock",
        "checkpoints",
        "config.json",
        "export",
        "metrics.jsonl",
        "plan.json",
        "tensorboard",
    ]
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["3", "6"]
    assert Config.from_dict(read_json(run / "config.json")) == config()
    assert sorted(path.name for path in (run / "export").iterdir()) == ["path.json", "path.safetensors"]
    assert list((run / "tensorboard").iterdir())


@pytest.mark.slow
def test_every_step_is_logged_once(run):
    records = read_metrics(run)
    assert [r["step"] for r in records if "loss" in r] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in records if "validation/loss" in r] == [0, 6]
    for record in records:
        if "loss" in record:
            spent = {f"seconds/{part}" for part in ("step", "data", "save", "validation")}
            assert record.keys() == {"step", "loss", "gradient_norm", "learning_rate", "tokens_per_second"} | spent
            assert all(record[part] >= 0 for part in spent)
            assert np.isfinite(record["loss"])
    final = records[-1]
    assert {"validation/greedy@1", "validation/greedy@3", "validation/perplexity"} <= final.keys()
    assert len(final["validation/loss_by_t"]) == 2


@pytest.mark.slow
def test_the_export_is_the_last_checkpoint(run, mesh):
    path = newest_path(run, mesh)
    exported = model_folder.load_path(run / "export", Architecture.from_hf(config().model.architecture), mesh)
    assert same_bits(exported, path)


@pytest.mark.slow
def test_the_path_has_learnt(run, mesh):
    llm = open_base(config().model, mesh).llm
    start = model_folder.new_path(config().path, llm, mesh, seed=0)
    path = newest_path(run, mesh)
    assert not same_bits(path.merge.last, start.merge.last)


@pytest.mark.slow
def test_checkpoints_hold_the_path_and_its_moments_alone(run):
    trained = 4 * parameters(DiffusionPath.declare(config().path, Architecture.from_hf(config().model.architecture)))
    step = run / "checkpoints" / "6"
    assert {path.name for path in step.iterdir() if path.is_dir()} == {"path", "optimizer"}
    sizes = {
        name: sum(4 * int(np.prod(leaf["shape"])) for leaf in tree.values())
        for name, tree in manifest.read_manifest(Disk(step.parent), 6)[0].items()
    }
    assert sizes["path"] == trained
    assert 2 * trained <= sizes["optimizer"] <= 2 * trained + 16  # and the counts of steps


@pytest.mark.slow
@pytest.mark.parametrize("when", ["during a save", "after a step", "before a validation"])
def test_a_run_that_is_cut_off_goes_on_bit_for_bit(run, tmp_path, mesh, monkeypatch, when):
    """Stopped after step 3 and started again by the same command, as a run in one piece."""
    arguments = [*options(), "--workdir", tmp_path]

    class Killed(BaseException):
        """Not an error that a program could handle."""

    def kill(name, module, *, at):
        original, calls = getattr(module, name), []

        def killing(*args, **kwargs):
            calls.append(name)
            if len(calls) == at:
                raise Killed
            return original(*args, **kwargs)

        monkeypatch.setattr(module, name, killing)

    if when == "during a save":
        kill("save", checkpoint.Checkpoints, at=2)
    elif when == "after a step":
        kill("micro_batches", loop, at=5)
    else:
        kill("validate", loop, at=2)
    with pytest.raises(Killed):
        call(train.main, *arguments)
    monkeypatch.undo()
    wait_for_checkpoint(tmp_path)
    outcome = call(train.main, *arguments)
    assert (outcome.status, outcome.err) == (0, "")
    assert f"resuming after step {3 if when != 'before a validation' else 6}" in outcome.out
    assert without_times(tmp_path) == without_times(run)
    assert same_bits(newest_path(tmp_path, mesh), newest_path(run, mesh))


def wait_for_checkpoint(workdir):
    """A killed process has no thread that still writes; this one may."""
    while any(not (step / manifest.NAME).exists() for step in (workdir / "checkpoints").iterdir()):
        time.sleep(0.05)


@pytest.mark.slow
def test_a_finished_run_is_left_as_it_is(run, tmp_path):
    before = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    outcome = call(train.main, *options(), "--workdir", run)
    assert outcome.status == 0
    after = {path: path.read_bytes() for path in sorted(run.rglob("*")) if path.is_file()}
    assert {p: b for p, b in after.items() if "tensorboard" not in p.parts} == {
        p: b for p, b in before.items() if "tensorboard" not in p.parts
    }


@pytest.mark.slow
def test_another_config_is_refused(run):
    before = (run / "config.json").read_text()
    outcome = call(train.main, *options(optim__peak_rate=0.5), "--workdir", run)
    assert "belongs to another config: config.optim.peak_rate was 0.001, is 0.5: choose another" in outcome.error
    assert (run / "config.json").read_text() == before


@pytest.mark.slow
def test_another_mesh_is_not_another_config(run):
    """Of one device here; eight_devices.py restores onto others."""
    outcome = call(train.main, *options(mesh__data=-1, mesh__fsdp=1), "--workdir", run)
    assert (outcome.status, outcome.err) == (0, "")
    assert "resuming after step 6" in outcome.out


def test_a_process_with_another_config_is_refused(tmp_path, monkeypatch):
    def decide_otherwise(function):
        value = function()
        return value | {"config": value["config"] | {"optim": {"peak_rate": 0.5}}} if "config" in value else value

    monkeypatch.setattr(processes, "decide", decide_otherwise)
    error = call(train.main, *options(), "--workdir", tmp_path).error
    assert "process 0 runs another config: config.optim.peak_rate was 0.5, is 0.001; " in error
    assert error.endswith("start the same command everywhere")


@pytest.mark.slow
def test_a_checkpoint_of_another_shape_is_refused(run, tmp_path):
    """Though its config.json was made to agree."""
    (tmp_path / "checkpoints").symlink_to(run / "checkpoints")
    raw = json.loads((run / "config.json").read_text())
    raw["path"]["width"] = 12
    (tmp_path / "config.json").write_text(json.dumps(raw))
    outcome = call(train.main, *options(path__width=12), "--workdir", tmp_path)
    assert "checkpoint 6 does not fit this config" in outcome.error
    assert "translation.first.weight is float32[8, 8], expected float32[12, 8]" in outcome.error


@pytest.mark.slow
def test_the_language_model_does_not_change(tmp_path, mesh, monkeypatch):
    """Its arrays before and after training, and the files that they came from."""
    base = write_base(tmp_path / "base")
    before = (base / "model.safetensors").read_bytes()
    seen = []
    original = base_model.BaseFiles.load

    def load(self, **arguments):
        llm = original(self, **arguments)
        seen.append((llm, jax.tree.map(np.array, llm)))
        return llm

    monkeypatch.setattr(base_model.BaseFiles, "load", load)
    arguments = options(model__name=base, train__steps=2, validation__budgets=(1,))
    assert call(train.main, *arguments, "--workdir", tmp_path / "workdir").status == 0
    [(llm, copy)] = seen
    assert same_bits(llm, copy)
    source = SafetensorsFolder.open(base)
    assert np.asarray(llm.embed).tobytes() == source.read("model.embed_tokens.weight").tobytes()
    assert (base / "model.safetensors").read_bytes() == before


@pytest.mark.slow
def test_accumulation_is_the_same_training(run, tmp_path, mesh):
    """Two micro-batches of one example: other noise, but the same examples and sizes."""
    arguments = options(train__accumulation=2, train__steps=1, validation__budgets=(1,))
    assert call(train.main, *arguments, "--workdir", tmp_path).status == 0
    assert [r["step"] for r in read_metrics(tmp_path) if "loss" in r] == [1]


@pytest.mark.slow
def test_packed_rows_and_several_draws(tmp_path):
    """An epoch is as many rows as the examples need together."""
    changes = {"data__packing": True, "data__max_length": 512, "data__answer_length": 256, "train__steps": None}
    arguments = options(**changes, train__draws_per_context=2, validation__budgets=(1,))
    outcome = call(train.main, *arguments, "--workdir", tmp_path)
    assert outcome.status == 0, outcome
    [rows, full, alone] = map(
        int, re.search(r"into (\d+) rows, (\d+) % padding instead of (\d+) %;", outcome.out).groups()
    )
    assert rows < 16
    assert full < alone
    assert [r["step"] for r in read_metrics(tmp_path) if "loss" in r] == list(range(1, (rows + 1) // 2 + 1))


@pytest.fixture
def poison(monkeypatch):
    """Makes the loss of these steps of the next run NaN."""
    place = loop.micro_batches

    def choose(*steps):
        numbers = itertools.count(1)

        def poisoned(batch, *arguments):
            bad = batch._replace(weights=batch.weights * np.nan) if next(numbers) in steps else batch
            return place(bad, *arguments)

        monkeypatch.setattr(loop, "micro_batches", poisoned)

    return choose


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_skipped(run, tmp_path, mesh, poison):
    """And counted; the checkpoint that is due waits for a step that is not, and a run that resumes is the same."""
    poison(3)
    workdirs = tmp_path / "whole", tmp_path / "resumed"
    assert call(train.main, *options(), "--workdir", workdirs[0]).status == 0
    assert sorted(path.name for path in (workdirs[0] / "checkpoints").iterdir()) == ["4", "6"]
    records, whole = without_times(workdirs[0]), without_times(run)
    assert records[:3] == whole[:3]
    assert records[3] == {"step": 3, "skipped": 1}
    assert [record["learning_rate"] for record in records[4:7]] == [record["learning_rate"] for record in whole[3:6]]
    shutil.copytree(workdirs[0], workdirs[1])
    shutil.rmtree(workdirs[1] / "checkpoints" / "6")
    poison()
    outcome = call(train.main, *options(), "--workdir", workdirs[1])
    assert "resuming after step 4" in outcome.out
    assert without_times(workdirs[1]) == records
    assert same_bits(newest_path(workdirs[1], mesh), newest_path(workdirs[0], mesh))


@pytest.mark.slow
def test_a_run_whose_last_update_is_skipped_ends_with_one(tmp_path, poison):
    """It keeps the checkpoint of before, exports nothing, and the same command again says the same."""
    for batch in (6, 3):  # the run that goes on after step 3 reads its third
        poison(batch)
        outcome = call(train.main, *options(), "--workdir", tmp_path)
        assert (outcome.status, "error: the last 1 updates were skipped" in outcome.err) == (1, True), outcome.err
        assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]
        assert not (tmp_path / "export").exists()


@pytest.mark.slow
def test_losses_that_stay_not_finite_stop_the_run(tmp_path, poison):
    """The rows of the last of them are named, and nothing is saved after the last good step."""
    poison(3, 4)
    changes = {"train__max_skipped": 2, "train__checkpoint_every": 1}
    outcome = call(train.main, *options(**changes), "--workdir", tmp_path)
    assert outcome.status == 1
    settings = config(**changes)
    examples = Examples.load(settings.data, byte_tokenizer(), split="train")
    rows = ", ".join(map(str, examples.ids(settings.train.batch_size, 4)))
    assert outcome.err.startswith("error: 2 updates in a row were skipped, the last at step 4 (loss nan, gradient norm")
    assert f"which read the rows {rows} of the training data: lower config.optim.peak_rate" in outcome.err
    assert outcome.err.count("\n") == 1
    wait_for_checkpoint(tmp_path)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["1", "2"]
    poison(1, 2)  # the same steps of a run that goes on after step 2
    assert call(train.main, *options(**changes), "--workdir", tmp_path).err == outcome.err


def spoil_json(base):
    (base / "config.json").write_text("{")


def truncate(base):
    file = base / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def change_tensors(base):
    tensors = base_tensors()
    del tensors["model.layers.1.mlp.up_proj.weight"]
    tensors["model.layers.0.self_attn.q_proj.bias"] = np.zeros(32, np.float32)
    tensors["model.norm.weight"] = np.ones(31, np.float32)
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})


def change_architecture(base):
    raw = read_json(base / "config.json") | {"architectures": ["Qwen4ForCausalLM"]}
    (base / "config.json").write_text(json.dumps(raw))


def widen(base):
    raw = read_json(base / "config.json") | {"rope_theta": 5.0}
    (base / "config.json").write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("spoil", "messages"),
    [
        (shutil.rmtree, ["neither a folder"]),
        (spoil_json, ["config.json: malformed JSON"]),
        (truncate, ["model.safetensors has", "truncated?"]),
        (
            change_tensors,
            [
                "missing: model.layers.1.mlp.up_proj.weight",
                "not part of this architecture: model.layers.0.self_attn.q_proj.bias",
                "misshaped: model.norm.weight has shape [31], expected [32]",
            ],
        ),
        (change_architecture, ["unsupported architecture Qwen4ForCausalLM", "LlamaForCausalLM, Qwen2ForCausalLM"]),
        (remove_tokenizer, ["has no tokenizer"]),
        (remove_template, ["has no chat template"]),
        (widen, ["config.model.architecture differs", "rope_theta 10000.0 here, 5.0 there"]),
    ],
)
def test_a_bad_model_is_one_line(tmp_path, monkeypatch, spoil, messages):
    base = write_base(tmp_path / "base")
    spoil(base)
    monkeypatch.setattr(base_model.BaseFiles, "load", None)  # nothing is loaded before all is checked
    error = call(train.main, *options(model__name=base), "--workdir", tmp_path / "workdir").error
    for message in messages:
        assert message in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data__source": "FOLDER", "data__train_split": "empty"}, "empty.jsonl is empty"),
        ({"data__source": "FOLDER", "data__train_split": "silent"}, "has no message of the assistant"),
        ({"data__source": "FOLDER", "data__train_split": "absent"}, "no split 'absent'"),
        ({"data__source": "FOLDER", "data__train_split": "broken"}, "broken.jsonl cannot be read"),
        ({"data__source": "FOLDER", "data__train_split": "other"}, "rows need messages, conversations"),
        ({"data__max_length": 16, "data__answer_length": 16}, "none of the 16 examples of problems/train fits"),
        ({"validation__budgets": (1, 4)}, "a budget of 4 evaluations is unreachable for midpoint"),
        ({"model__name": "no/such/folder"}, "neither a folder"),
        ({"train__batch_size": 3, "train__accumulation": 2}, "batch_size 3 is not a multiple of"),
        ({"mesh__data": 2, "mesh__fsdp": 1}, "needs 2 devices, found 1"),
        ({"optim__learning_rate": 1}, "unknown option config.optim.learning_rate"),
    ],
)
def test_a_bad_config_is_one_line(tmp_path, monkeypatch, changes, message):
    rows = tmp_path / "rows"
    rows.mkdir()
    silent = {"messages": [{"role": "user", "content": "?"}]}
    texts = {"empty": "", "silent": json.dumps(silent), "broken": '{"messages": ', "other": '{"text": "a"}'}
    for split, text in texts.items():
        (rows / f"{split}.jsonl").write_text(text)
    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    changes = {name: str(rows) if value == "FOLDER" else value for name, value in changes.items()}
    assert message in call(train.main, *options(**changes), "--workdir", tmp_path / "workdir").error


@pytest.mark.slow
def test_a_mistake_can_be_mended(tmp_path):
    """An attempt that trained nothing does not claim the workdir."""
    arguments = options(model__name=tmp_path / "base", train__steps=1, validation__budgets=(1,))
    assert "neither a folder" in call(train.main, *arguments, "--workdir", tmp_path / "workdir").error
    arguments = options(train__steps=1, validation__budgets=(1,))
    assert call(train.main, *arguments, "--workdir", tmp_path / "workdir").status == 0


@pytest.mark.parametrize("workdir", ["file", "file/below", "/proc/none", "/proc/self"])
def test_an_unwritable_workdir_is_one_line(tmp_path, monkeypatch, workdir):
    (tmp_path / "file").write_text("here first")
    monkeypatch.setattr(base_model, "find_base", None)
    assert "cannot write to workdir" in call(train.main, *options(), "--workdir", tmp_path / workdir).error
    assert (tmp_path / "file").read_text() == "here first"


def test_a_workdir_is_required(tmp_path):
    assert "--workdir is missing" in call(train.main, *options()).error
    assert "required: --config" in call(train.main, "--workdir", tmp_path).error


def test_a_malformed_config_in_the_workdir_is_one_line(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text('{"path":')
    assert "config.json: malformed JSON" in call(train.main, *options(), "--workdir", tmp_path).error


@pytest.mark.slow
def test_a_path_that_begins_as_the_language_model(tmp_path):
    """And reads the context: it is trained, goes on bit for bit after a stop, is exported and answers."""
    base = write_base(tmp_path / "base")
    beyond = {"path__start": "anchored", "path__reader": "path", "model__name": base, "model__architecture": None}
    beyond |= {"train__own_estimates": 0.5, "train__validate_every": 3}
    asked = options(**beyond, validation__exact_examples=2, validation__budgets=(1, 3), decode__max_new_tokens=8)
    assert call(train.main, *asked, "--workdir", tmp_path / "whole").status == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "stopped")
    shutil.rmtree(tmp_path / "stopped/checkpoints" / str(STEPS))
    shutil.rmtree(tmp_path / "stopped/export")
    assert call(train.main, *asked, "--workdir", tmp_path / "stopped").status == 0
    exports = [load_file(tmp_path / name / "export/path.safetensors") for name in ("whole", "stopped")]
    assert same_bits(*exports)
    assert any("flow_k_proj" in name for name in exports[0])
    first, middle, last = [record for record in read_metrics(tmp_path / "whole") if "validation/loss" in record]
    assert "validation/exact@1" not in first  # it is that of a budget of 1 at any other step
    assert middle["validation/exact@1"] == last["validation/exact@1"]
    assert 0 <= last["validation/exact@3"] <= 1
    assert first["validation/loss"] == pytest.approx(first["validation/loss@1"], rel=1e-2)  # untrained, it is the LM
    words = ["--prompt", "Hi", "--max_new_tokens", 6, "--budget", 3]
    sources = ("--workdir", tmp_path / "whole"), ("--model", tmp_path / "whole/export")
    answers = [call(generate.main, *source, *words) for source in sources]
    assert answers[0].status == 0, answers[0].err
    assert answers[0].out == answers[1].out


@pytest.mark.slow
def test_eight_devices(tmp_path):
    """As the program is run: a batch that they do not divide, and the memory of one of them."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "l2d_jax.train", *options(train__batch_size=12)]
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    refused, counted = (run([*command, *more]) for more in (["--workdir", str(tmp_path)], ["--dry_run"]))
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr == (
        "error: a micro-batch of 12 examples (config.train.batch_size 12 / accumulation 1) does not divide over data x "
        "fsdp = 8 devices: use a multiple of 8\n"
    )
    assert not list(tmp_path.iterdir())
    assert counted.returncode == 0
    assert counted.stderr == ""
    assert "trainable parameters" in counted.stdout
