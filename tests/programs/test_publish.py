"""A run that is published: the folder, its page, and the way back, with a fake of the hub's HTTP interface."""

import json
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert, generate, train
from l2d_jax.files import read_json
from l2d_jax.loading import load
from tests.support.fake_hub import fake_hub
from tests.support.programs import call, options, write_base

STEPS = {"train__steps": 2, "validation__budgets": (1, 3), "decode__max_new_tokens": 8, "decode__budget": 3}
REPO = ["--repo", "me/tiny-path"]
FILES = {"README.md", "config.json", "model.safetensors", "path.json", "tokenizer.json", "tokenizer_config.json"}
FILES |= {"configuration_l2d.py", "modeling_l2d.py", "path_l2d.py"}
IDS = [[1, 2, 3, 4], [9, 8, 7, 6]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A base with a licence, and a run on it."""
    folder = tmp_path_factory.mktemp("publish")
    base = write_base(folder / "base", model_type="llama")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A base\n")
    outcome = call(
        train.main, *options(model__name=str(base), model__architecture=None, **STEPS), "--workdir", folder / "run"
    )
    assert outcome.status == 0, outcome.err
    return folder / "run", base


def publish(workdir, *arguments):
    return call(convert.main, "publish", "--workdir", workdir, *REPO, *arguments)


@pytest.mark.slow
def test_a_trial_writes_a_folder_that_opens_again(trained, tmp_path):
    workdir, _ = trained
    outcome = publish(workdir, "--dry_run", tmp_path / "out")
    assert outcome.status == 0, outcome.err
    assert "whose base is a folder: give --base org/name before you upload it" in outcome.out
    assert {file.name for file in (tmp_path / "out").iterdir()} >= FILES
    answers = load(workdir, dtype="float32").generate(IDS, budget=3)
    assert load(tmp_path / "out", dtype="float32").generate(IDS, budget=3, max_new_tokens=8) == answers
    page = (tmp_path / "out" / "README.md").read_text()
    assert "license: apache-2.0" in page
    assert 'AutoModelForCausalLM.from_pretrained("me/tiny-path", trust_remote_code=True)' in page
    assert page.count("| [") == 0
    assert len([line for line in page.splitlines() if line.startswith(("| 1 |", "| 3 |"))]) == 2  # the budgets
    again = tmp_path / "again"
    outcome = call(convert.main, "import", "--base", tmp_path / "out", "--out", again)
    assert outcome.status == 0, outcome.err
    ours, theirs = (load_file(folder / "path.safetensors") for folder in (workdir / "export", again))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.slow
def test_another_base_and_a_changed_path_are_refused(trained, tmp_path):
    workdir, _ = trained
    out = tmp_path / "out"
    publish(workdir, "--dry_run", out)
    config = read_json(out / "config.json")
    other = write_base(tmp_path / "other", seed=5)
    (out / "config.json").write_text(json.dumps(config | {"base_model_name_or_path": str(other)}))
    assert "is not the one that it was trained on" in call(generate.main, "--model", out, "--prompt", "2 + 2?").error
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(out / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in tensors.items()}, out / "model.safetensors")
    error = call(generate.main, "--model", out, "--prompt", "2 + 2?").error
    assert "has changed since they were written: import it" in error
    assert call(convert.main, "import", "--base", out, "--out", tmp_path / "imported").status == 0


@pytest.mark.slow
def test_a_published_path_is_opened_from_the_hub(trained, tmp_path):
    workdir, base = trained
    with fake_hub() as hub:
        first = hub.add("org/base", {file.name: file.read_bytes() for file in base.iterdir()})
        program = [
            sys.executable,
            "-m",
            "l2d_jax.convert",
            "publish",
            "--workdir",
            workdir,
            *REPO,
            "--base",
            "org/base",
        ]
        environment = hub.environment(tmp_path / "home")
        done = subprocess.run(program, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"published {hub.address}/me/tiny-path"
        [(commit, files)] = hub.commits["me/tiny-path"]
        assert files.keys() >= FILES
        assert json.loads(files["config.json"])["base_revision"] == first
        assert "license: apache-2.0" in files["README.md"].decode()
        hub.add("org/base", {"config.json": b"{}"})  # the path stays with the revision that it was trained on
        code = (
            "import l2d_jax; from transformers import AutoModelForCausalLM; import torch\n"
            f"ids = {IDS}\n"
            "print(l2d_jax.load('me/tiny-path', dtype='float32').generate(ids, budget=1, max_new_tokens=8))\n"
            f"print(l2d_jax.load('me/tiny-path@{commit}', dtype='float32').generate(ids, budget=3, max_new_tokens=8))\n"
            "model = AutoModelForCausalLM.from_pretrained('me/tiny-path', trust_remote_code=True)\n"
            "model.float()\n"
            "new = model.generate(torch.tensor(ids), budget=1, max_new_tokens=8, do_sample=False)[:, 4:].tolist()\n"
            "print(new)\n"
            "try: l2d_jax.load('me/tiny-path@gone')\n"
            "except l2d_jax.errors.InputError as error: print(error)\n"
        )
        done = hub.python(code, tmp_path / "second")
        assert done.returncode == 0, done.stderr
        plain, refined, theirs, gone = done.stdout.splitlines()
    answers = [load(workdir, dtype="float32").generate(IDS, budget=budget) for budget in (1, 3)]
    assert json.loads(plain) == answers[0], done.stderr
    assert json.loads(refined) == answers[1]
    assert [row[: len(ours)] for row, ours in zip(json.loads(theirs), answers[0], strict=True)] == answers[0]
    assert gone.startswith("me/tiny-path has no revision gone on the hub")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--repo", "tiny", "--dry_run", "x"], "--repo is org/name, got 'tiny'"),
        (["--repo", "me/tiny"], "has no export yet: finish the training"),
    ],
)
def test_what_cannot_be_published(tmp_path, arguments, message):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    assert message in call(convert.main, "publish", "--workdir", tmp_path / "run", *arguments).error


@pytest.mark.slow
def test_a_base_that_is_here_alone_is_not_published(trained):
    assert "which is here alone: give --base org/name" in publish(trained[0]).error
