"""A run on a base in a relative folder: it opens from any folder, and after a move."""

import json
import shutil

import pytest

import l2d_jax.generate as generate
from l2d_jax import convert, evaluate, train
from l2d_jax.config.schema import Config
from l2d_jax.errors import InputError, shown
from l2d_jax.files import read_json
from l2d_jax.training.workdir import claim
from tests.support.programs import call, of_evaluation, options, write_base, write_tasks

STEPS = {"train__steps": 1, "validation__budgets": (1,), "decode__max_new_tokens": 4}
PROMPT = ["--prompt", "2 + 2?"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with `models/base` and a run on it, `runs/run`, whose command named the base by its relative path."""
    folder = tmp_path_factory.mktemp("project")
    write_base(folder / "models" / "base")
    arguments = options(model__name="models/base", model__architecture=None, **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        outcome = call(train.main, *arguments, "--workdir", "runs/run")
        assert outcome.status == 0, outcome.err
        text = call(generate.main, "--workdir", "runs/run", *PROMPT).out
    return folder, arguments, text


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    """Each test runs in another folder than the training; the hub has nothing to say."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))


@pytest.mark.slow
def test_a_run_opens_from_another_folder(trained, tmp_path):
    folder, arguments, text = trained
    workdir = folder / "runs" / "run"
    assert read_json(workdir / "config.json")["model"]["name"] == "models/base"  # as it was given
    for option in (["--workdir", workdir], ["--model", workdir / "export"]):
        assert call(generate.main, *option, *PROMPT, "--max_new_tokens", 4).out == text
    tasks = ["--tasks", "gsm8k", "--data_dir", write_tasks(tmp_path / "data"), "--shots", 1, "--limit", 1]
    outcome = call(evaluate.main, "--workdir", workdir, *tasks, "--out", "eval", *of_evaluation(arguments))
    assert outcome.status == 0, outcome.err
    outcome = call(convert.main, "export", "--model", workdir, "--format", "l2d", "--out", "l2d")
    assert outcome.status == 0, outcome.err
    outcome = call(train.main, *arguments, "--workdir", workdir)
    assert (outcome.status, "resuming after step 1" in outcome.out) == (0, True), outcome.err


@pytest.mark.slow
def test_a_run_opens_after_a_move(trained, tmp_path):
    """With its base, beside its base, and without it: then one line says what is missing."""
    folder, _, text = trained
    shutil.copytree(folder, tmp_path / "both")
    (folder / "models").rename(folder / "kept")
    try:
        for option in (["--workdir", "both/runs/run"], ["--model", "both/runs/run/export"]):
            assert call(generate.main, *option, *PROMPT, "--max_new_tokens", 4).out == text
        shutil.copytree(tmp_path / "both" / "runs", tmp_path / "alone")
        for option, from_there in (
            (["--workdir", "alone/run"], "../../"),
            (["--model", "alone/run/export"], "../../../"),
        ):
            error = call(generate.main, *option, *PROMPT).error
            assert f"is neither at {shown(str(folder / 'models' / 'base'))} nor at" in error
            assert f"{from_there}models/base' from there" in error
        assert (
            "is neither at"
            in call(convert.main, "export", "--model", "alone/run", "--format", "hf", "--out", "x").error
        )
    finally:
        (folder / "kept").rename(folder / "models")
    assert call(generate.main, "--workdir", "alone/run", *PROMPT).out == text


@pytest.mark.slow
def test_a_run_of_a_former_version_reads_its_base_from_the_working_directory(trained, tmp_path, monkeypatch):
    folder, _, text = trained
    workdir = shutil.copytree(folder / "runs" / "run", tmp_path / "old")
    (workdir / "base.json").unlink()
    record = read_json(workdir / "export" / "path.json")
    assert record.pop("base_from_here") == "../../../models/base"
    assert record["base"] == str(folder / "models" / "base")
    (workdir / "export" / "path.json").write_text(json.dumps(record | {"base": "models/base"}))
    monkeypatch.chdir(folder)
    for option in (["--workdir", workdir], ["--model", workdir / "export"]):
        assert call(generate.main, *option, *PROMPT, "--max_new_tokens", 4).out == text


@pytest.mark.slow
def test_a_run_of_a_former_version_opens_with_an_option_that_is_no_more(trained, tmp_path, monkeypatch):
    """A run on stratified times is read, and not continued on others."""
    folder, _, _ = trained
    workdir = shutil.copytree(folder / "runs" / "run", tmp_path / "old")
    ours = read_json(workdir / "config.json")
    former = ours | {"train": ours["train"] | {"stratified_times": True}}
    (workdir / "config.json").write_text(json.dumps(former))
    monkeypatch.chdir(folder)
    assert call(generate.main, "--workdir", workdir, *PROMPT, "--max_new_tokens", 4).status == 0
    with pytest.raises(InputError, match="stratified_times was True, an option that is no more: choose another"):
        claim(workdir, Config.from_dict(ours))
