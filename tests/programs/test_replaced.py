"""What lies behind a name is replaced by something else: every program that would mix the two says so in one line."""

import json
import os
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import l2d_jax.generate as generate
from l2d_jax import convert, evaluate, study, train
from l2d_jax.files import read_json
from tests.support.programs import (
    SMALLER,
    TINY,
    base_tensors,
    call,
    options,
    write_base,
    write_model,
    write_tasks,
)

PROMPT = ["--prompt", "2 + 2?", "--max_new_tokens", 2]


def replace_weights(base):
    """By others of the same shapes, sizes and names."""
    save_file(base_tensors(seed=1), base / "model.safetensors", metadata={"format": "pt"})


def flip(file, place=-1):
    data = bytearray(file.read_bytes())
    data[place] ^= 1
    file.write_bytes(data)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, and a run on it that reads rows of a file."""
    folder = tmp_path_factory.mktemp("project")
    write_base(folder / "base")
    for split in ("train", "validation"):
        rows = [{"question": f"{i} + 1?", "answer": f"{i + 1}"} for i in range(8)]
        (folder / "rows").mkdir(exist_ok=True)
        (folder / "rows" / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    outcome = call(train.main, *settings(folder), "--workdir", folder / "run")
    assert outcome.status == 0, outcome.err
    return folder


def settings(folder, **changes):
    given = {"model__name": folder / "base", "model__architecture": None, "data__source": folder / "rows"}
    changes = {"train__steps": 1, "train__checkpoint_every": 1, "validation__budgets": (1,), **changes}
    return options(**given, **changes)


@pytest.fixture
def moved(folder, tmp_path):
    """A copy of the folder, for a test to change; the paths in it name the copy's base."""
    shutil.copytree(folder, tmp_path / "project")
    copy = tmp_path / "project"
    for file in (copy / "run" / "config.json", copy / "run" / "base.json", copy / "run" / "export" / "path.json"):
        file.write_text(file.read_text().replace(str(folder), str(copy)))
    return copy


@pytest.mark.slow
def test_weights_under_the_same_name(moved):
    opens = (["--workdir", moved / "run"], ["--model", moved / "run" / "export"])
    for option in opens:
        assert call(generate.main, *option, *PROMPT).status == 0
    replace_weights(moved / "base")
    for option, file in zip(opens, ("base.json", "path.json"), strict=True):
        error = call(generate.main, *option, *PROMPT).error
        assert "is not the one that it was trained on (weights " in error
        assert f"put that one back, or remove base_fingerprint from {file} to use this one" in error
    error = call(train.main, *settings(moved), "--workdir", moved / "run").error
    assert re.search(r"checkpoint 1 in .* was trained from something else \(weights \w+, now \w+\)", error)
    for file in (moved / "run" / "base.json", moved / "run" / "export" / "path.json"):
        record = read_json(file)
        del record["base_fingerprint"]
        file.write_text(json.dumps(record))
    for option in opens:
        assert call(generate.main, *option, *PROMPT).status == 0


@pytest.mark.slow
@pytest.mark.parametrize(("split", "part"), [("train", "training examples"), ("validation", "validation examples")])
def test_rows_under_the_same_name(moved, split, part):
    assert call(train.main, *settings(moved), "--workdir", moved / "run").status == 0
    file = moved / "rows" / f"{split}.jsonl"
    state = file.stat()
    file.write_text(file.read_text().replace("0 + 1", "0 - 1"))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))  # the date says nothing
    error = call(train.main, *settings(moved), "--workdir", moved / "run").error
    assert f"was trained from something else ({part} " in error


@pytest.mark.slow
def test_a_base_in_other_shards_is_the_same_base(moved):
    tensors = load_file(moved / "base" / "model.safetensors")
    (moved / "base" / "model.safetensors").unlink()
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        chosen = {name: tensors[name] for name in names if files[name] == file}
        save_file(chosen, moved / "base" / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": 1}, "weight_map": files}
    (moved / "base" / "model.safetensors.index.json").write_text(json.dumps(index))
    assert call(generate.main, "--workdir", moved / "run", *PROMPT).status == 0
    assert "resuming after step 1" in call(train.main, *settings(moved), "--workdir", moved / "run").out


@pytest.mark.slow
@pytest.mark.parametrize("change", ["bit", "option"])
def test_a_path_that_has_changed_since_its_export(moved, change, tmp_path):
    export = moved / "run" / "export"
    if change == "bit":
        flip(export / "path.safetensors")
    else:
        file = export / "path.json"
        file.write_text(file.read_text().replace('"sigma": 64.0', '"sigma": 65.0'))
    for outcome in (
        call(generate.main, "--model", export, *PROMPT),
        call(convert.main, "export", "--model", export, "--format", "l2d", "--out", tmp_path / "l2d"),
    ):
        assert "path.json has changed since they were written: export the path again" in outcome.error


@pytest.mark.slow
def test_an_adapter_that_has_changed_or_whose_base_has(moved):
    workdir = moved / "lora"
    outcome = call(train.main, *settings(moved, train__method="lora"), "--workdir", workdir)
    assert outcome.status == 0, outcome.err
    export = workdir / "export"
    assert call(generate.main, "--model", export, *PROMPT).status == 0
    flip(export / "adapter_model.safetensors")
    assert "adapter_model.safetensors has changed since" in call(generate.main, "--model", export, *PROMPT).error
    flip(export / "adapter_model.safetensors")
    replace_weights(moved / "base")
    error = call(generate.main, "--model", export, *PROMPT).error
    assert "not the one that the adapter was trained on (weights " in error


@pytest.fixture(scope="module")
def models(tmp_path_factory, mesh):
    """Two paths on the same base."""
    folder = tmp_path_factory.mktemp("models")
    base = write_base(folder / "base")
    write_model(folder / "one", base, mesh)
    write_model(folder / "two", base, mesh, sigma=8.0)
    return folder


@pytest.mark.slow
def test_another_model_or_other_questions_in_the_results_of_an_evaluation(models, tmp_path):
    data = write_tasks(tmp_path / "data")
    model = tmp_path / "model"

    def run():
        arguments = ["--tasks", "gsm8k", "--data_dir", data, "--shots", 1, "--limit", 2, "--max_new_tokens", 4]
        return call(evaluate.main, "--model", model, "--out", tmp_path / "out", "--budget", 1, *arguments)

    model.symlink_to(models / "one")
    assert run().status == 0
    assert run().status == 0
    model.unlink()
    model.symlink_to(models / "two")
    assert re.search(r"holds another evaluation \(trained weights \w+, now \w+\): give it another --name", run().error)
    model.unlink()
    model.symlink_to(models / "one")
    file = data / "gsm8k" / "test.jsonl"
    file.write_text(file.read_text().replace("0 + 0?", "0 - 0?"))
    assert re.search(r"holds another evaluation \(problems \w+, now \w+\)", run().error)


@pytest.mark.slow
def test_another_model_under_the_name_of_one_in_a_study(models, tmp_path):
    given = [f"--config.{name}={value}" for name, value in SMALLER.items()]

    def run():
        arguments = ["--config", TINY, "--out", tmp_path / "out", "--budgets", 1, "--models", f"a={tmp_path / 'a'}"]
        return call(study.main, *arguments, *given)

    shutil.copytree(models / "base", tmp_path / "a")
    assert run().status == 0
    replace_weights(tmp_path / "a")
    assert "a.json was measured with another weights " in run().error


def test_the_weights_of_the_two_models_differ():
    """Or the tests above would say nothing."""
    one, two = base_tensors(), base_tensors(seed=1)
    assert all(np.any(one[name] != two[name]) for name in one)
