"""A run with a tokenizer and a chat template from elsewhere: all programs take them from the workdir."""

import json
import shutil

import datasets
import pytest

from l2d_jax import convert, evaluate, generate, prepare, train
from l2d_jax.data.tokenizer import CHATML, byte_tokenizer
from l2d_jax.files import read_json
from l2d_jax.loading import load
from l2d_jax.weights.tokenizer_files import read_chat_template
from tests.support.programs import call, of_evaluation, options, write_base, write_tasks

OTHER = CHATML.replace("|>assistant", "|>model").replace(
    "message['role']", "('model' if message.role != 'user' else 'user')"
)
PROMPT = ["--prompt", "2 + 2?", "--max_new_tokens", 4]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A base without a tokenizer, a tokenizer, a template, and the options that name all three from that folder."""
    folder = tmp_path_factory.mktemp("texts")
    write_base(folder / "base", text=False, model_type="llama")
    byte_tokenizer().save_pretrained(folder / "words")
    (folder / "mine.jinja").write_text(OTHER)
    named = {"model__name": "base", "model__architecture": None, "model__tokenizer": "words"}
    return folder, options(**named, model__chat_template="mine.jinja", train__steps=1, validation__budgets=(1,))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch, project):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.chdir(project[0])


@pytest.mark.slow
@pytest.mark.parametrize("method", ["l2d", "lora", "full"])
def test_they_go_along_with_what_was_trained(project, tmp_path, monkeypatch, method):
    folder, arguments = project
    arguments = [*arguments, f"--config.train.method={method}"]
    outcome = call(train.main, *arguments, "--workdir", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    (folder / "mine.jinja").rename(folder / "gone")
    monkeypatch.chdir(tmp_path)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    run = tmp_path / "moved"
    try:
        opened = {name: load(name, dtype="float32") for name in (run, run / "export")}
        for one in opened.values():
            assert one.tokenizer.chat_template == OTHER
            assert one.generate("2 + 2?", budget=1, max_new_tokens=4) == opened[run].generate(
                "2 + 2?", budget=1, max_new_tokens=4
            )
        assert call(generate.main, "--workdir", run, *PROMPT).status == 0
        tasks = ["--tasks", "gsm8k", "--data_dir", write_tasks(tmp_path / "data"), "--shots", 1, "--limit", 1]
        outcome = call(evaluate.main, "--workdir", run, *tasks, "--out", "eval", "--max_new_tokens", 2)
        assert outcome.status == 0, outcome.err
        outcome = call(convert.main, "export", "--model", run, "--format", "hf", "--out", tmp_path / "hf")
        assert outcome.status == 0, outcome.err
        assert read_chat_template(str(tmp_path / "hf")) == OTHER
    finally:
        (folder / "gone").rename(folder / "mine.jinja")


@pytest.mark.slow
def test_a_published_path_has_them(project, tmp_path):
    _, arguments = project
    assert call(train.main, *arguments, "--workdir", tmp_path / "run").status == 0
    publish = ["publish", "--workdir", tmp_path / "run", "--repo", "me/mine", "--dry_run", tmp_path / "out"]
    outcome = call(convert.main, *publish)
    assert outcome.status == 0, outcome.err
    assert load(tmp_path / "out", dtype="float32").tokenizer.chat_template == OTHER
    outcome = call(convert.main, "import", "--base", tmp_path / "out", "--out", tmp_path / "imported")
    assert outcome.status == 0, outcome.err
    assert load(tmp_path / "imported", dtype="float32").tokenizer.chat_template == OTHER
    assert read_json(tmp_path / "imported" / "config.json")["model_type"] == "llama"


@pytest.mark.slow
def test_a_run_or_prepared_data_with_others_is_refused(project, tmp_path):
    folder, arguments = project
    outcome = call(prepare.main, *arguments, "--out", tmp_path / "data")
    assert outcome.status == 0, outcome.err
    run = [*arguments, f"--config.data.prepared={tmp_path / 'data'}", "--workdir", tmp_path / "run"]
    assert call(train.main, *run).status == 0
    assert "resuming after step 1" in call(train.main, *run).out
    error = call(train.main, *run, "--config.model.chat_template=None").error
    assert "belongs to another config: config.model.chat_template was 'mine.jinja', is None" in error
    fresh = [*run[:-1], tmp_path / "fresh"]
    (folder / "words.jinja").write_text(CHATML)
    error = call(train.main, *fresh, "--config.model.chat_template=words.jinja").error
    assert "was prepared with tokenizer" in error
    before = (folder / "mine.jinja").read_text()
    try:
        (folder / "mine.jinja").write_text(before + " ")
        assert "tokenizer" in call(train.main, *run[:-3], *run[-2:]).error
    finally:
        (folder / "mine.jinja").write_text(before)


def test_a_command_line_names_them_where_there_is_no_config(project):
    folder, _ = project
    error = call(generate.main, "--model", folder / "base", *PROMPT).error
    assert error.startswith("the model folder has no tokenizer: ")
    texts = ["--tokenizer", folder / "words", "--chat_template", folder / "mine.jinja"]
    outcome = call(generate.main, "--model", folder / "base", *PROMPT, *texts)
    assert outcome.status == 0, outcome.err
    loaded = load(folder / "base", tokenizer=str(folder / "words"), chat_template=str(folder / "mine.jinja"))
    assert loaded.tokenizer.chat_template == OTHER
    assert json.dumps(loaded.generate("2 + 2?", max_new_tokens=4)) == json.dumps(outcome.out.strip("\n"))


@pytest.mark.slow
def test_an_evaluation_takes_them_from_its_config_or_refuses_others(project, tmp_path):
    _, arguments = project
    asked = of_evaluation(arguments)
    tasks = ["--tasks", "gsm8k", "--data_dir", write_tasks(tmp_path / "data"), "--shots", 1, "--limit", 1]
    tasks += ["--max_new_tokens", 2, "--out", tmp_path / "eval", "--budget", 1]
    outcome = call(evaluate.main, "--model", "base", *tasks, *asked)
    assert outcome.status == 0, outcome.err
    outcome = call(evaluate.main, "--model", "base", *tasks, *asked, "--chat_template", "words")
    assert "tokenizer" in outcome.error  # the results are of another chat template
    assert call(train.main, *arguments, "--workdir", tmp_path / "run").status == 0
    without = [one for one in asked if "chat_template" not in one]
    error = call(evaluate.main, "--workdir", tmp_path / "run", *tasks, *without).error
    assert "was trained with config.model.chat_template 'mine.jinja', and the config has None" in error
