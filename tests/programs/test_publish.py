"""A run that is published: the folder, its page, and the way back, with a fake of the hub's HTTP interface."""

import importlib.util
import json
import shutil
import subprocess
import sys

import pytest
from safetensors.numpy import load_file, save_file

from l2d_jax import convert, generate, train, verify
from l2d_jax.files import read_json
from l2d_jax.loading import load
from l2d_jax.weights import publish as writing
from tests.support.exports import files
from tests.support.fake_hub import fake_hub
from tests.support.programs import call, options, write_base, write_tasks

STEPS = {"train__steps": 2, "validation__budgets": (1, 3), "decode__max_new_tokens": 8, "decode__budget": 3}
REPO = ["--repo", "me/tiny-path"]
FILES = {"README.md", "config.json", "model.safetensors", "path.json", "tokenizer.json", "tokenizer_config.json"}
FILES |= {f"{name}_l2d.py" for name in ("configuration", "folder", "modeling", "noise", "path", "reading", "solver")}
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
    if importlib.util.find_spec("torch"):
        for model in (workdir, tmp_path / "out"):
            outcome = call(verify.main, "--model", model, "--against", "torch", "--tokens", 8)
            assert outcome.out.splitlines()[-1:] == ["20 of 20 arrays pass"], outcome
    assert len([line for line in page.splitlines() if line.startswith(("| 1 |", "| 3 |"))]) == 2  # the budgets
    again = tmp_path / "again"
    outcome = call(convert.main, "import", "--base", tmp_path / "out", "--out", again)
    assert outcome.status == 0, outcome.err
    ours, theirs = (load_file(folder / "path.safetensors") for folder in (workdir / "export", again))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["l2d", "l2d-full", "hf", "peft"])
def test_a_published_folder_is_exported_as_the_run_is(trained, tmp_path, format):
    workdir, _ = trained
    publish(workdir, "--dry_run", tmp_path / "out")
    outcomes = [
        call(convert.main, "export", "--model", model, "--format", format, "--out", tmp_path / name)
        for name, model in (("first", workdir), ("second", tmp_path / "out"))
    ]
    if format == "peft":
        assert all("has no LoRA adapter" in outcome.error for outcome in outcomes)
        assert str(tmp_path / "out") in outcomes[1].error
        return
    assert [outcome.status for outcome in outcomes] == [0, 0], outcomes
    assert files(tmp_path / "first") == files(tmp_path / "second")


@pytest.mark.slow
def test_a_run_without_a_validation_is_refused_before_anything_is_written(trained, tmp_path, monkeypatch):
    shutil.copytree(trained[0], tmp_path / "run")
    file = tmp_path / "run" / "metrics.jsonl"
    kept = [line for line in file.read_text().splitlines() if "validation/loss" not in line]
    file.write_text("".join(line + "\n" for line in kept))
    monkeypatch.setattr(writing, "write_torch_folder", lambda *_, **__: pytest.fail("wrote the path"))
    assert "has no validation in metrics.jsonl" in publish(tmp_path / "run", "--dry_run", tmp_path / "out").error


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
    exported = call(convert.main, "export", "--model", out, "--format", "l2d", "--out", tmp_path / "exported")
    assert "has changed since they were written: import it" in exported.error
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
            f"import l2d_jax; ids = {IDS}\n"
            "print(l2d_jax.load('me/tiny-path', dtype='float32').generate(ids, budget=1, max_new_tokens=8))\n"
            f"print(l2d_jax.load('me/tiny-path@{commit}', dtype='float32').generate(ids, budget=3, max_new_tokens=8))\n"
            "try: l2d_jax.load('me/tiny-path@gone')\n"
            "except l2d_jax.errors.InputError as error: print(error)\n"
        )
        in_torch = (
            "from transformers import AutoModelForCausalLM; import torch\n"
            "model = AutoModelForCausalLM.from_pretrained('me/tiny-path', trust_remote_code=True)\n"
            "model.float()\n"
            "new = model.generate(torch.tensor(ids), budget=1, max_new_tokens=8, do_sample=False)[:, 4:].tolist()\n"
            "print(new)\n"
        )
        code += in_torch if importlib.util.find_spec("torch") else ""
        done = hub.python(code, tmp_path / "second")
        assert done.returncode == 0, done.stderr
        plain, refined, gone, *theirs = done.stdout.splitlines()
    answers = [load(workdir, dtype="float32").generate(IDS, budget=budget) for budget in (1, 3)]
    assert json.loads(plain) == answers[0], done.stderr
    assert json.loads(refined) == answers[1]
    for rows in map(json.loads, theirs):  # of PyTorch, where it is installed
        assert [row[: len(ours)] for row, ours in zip(rows, answers[0], strict=True)] == answers[0]
    assert gone.startswith("me/tiny-path has no revision gone on the hub")


PROGRAMS = """
import sys
from l2d_jax import evaluate, generate, programs, serve
import l2d_jax.programs.serve
from tests.support.programs import call
asked = ["--prompt", "2 + 2?", "--max_new_tokens", "8"]
for name in sys.argv[3:]:
    outcome = call(generate.main, "--workdir", name, *asked, "--budget", "1", "3")
    print(name, "answers", outcome.status, ascii(outcome.out), outcome.err.splitlines()[-1] if outcome.status else "")
tasks = ["--tasks", "gsm8k", "--data_dir", sys.argv[1], "--limit", "1", "--max_new_tokens", "4", "--budget", "3"]
print("evaluate", ascii(call(evaluate.main, "--workdir", sys.argv[3], *tasks, "--out", sys.argv[2]).out))
print("evaluate", call(evaluate.main, "--workdir", sys.argv[3], *tasks).err.splitlines()[-1])
programs.serve._serve = lambda *_: None
print("serve", call(serve.main, "--workdir", sys.argv[3], "--port", "0").out.strip())
"""
REMOTE = {"auto_map": {"AutoConfig": "run.Config", "AutoModelForCausalLM": "run.Model"}}


@pytest.mark.slow
def test_programs_open_a_path_by_its_hub_id(trained, tmp_path):
    """At a revision or at the newest, and the base at the revision that the path names. Its code is not run."""
    workdir, base = trained
    publish(workdir, "--dry_run", tmp_path / "out")
    config = read_json(tmp_path / "out" / "config.json")
    path = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    ran = tmp_path / "ran"
    theirs = {file.name: file.read_bytes() for file in base.iterdir()}
    plain = read_json(base / "config.json")
    theirs |= {"config.json": json.dumps(plain | REMOTE).encode(), "run.py": f"open({str(ran)!r}, 'w')".encode()}
    other = write_base(tmp_path / "other", model_type="llama", seed=5)
    with fake_hub() as hub:
        revision = hub.add("org/base", theirs)
        hub.add("org/base", {file.name: file.read_bytes() for file in other.iterdir()})

        def at(revision):
            named = {"base_model_name_or_path": "org/base", "base_revision": revision}
            return path | {"config.json": json.dumps(config | named).encode()}

        good, newest = hub.add("me/path", at(revision)), hub.add("me/path", at(None))  # whose base is another now
        hub.add("me/gone", at("gone"))
        names = [f"me/path@{good}", "me/path", "me/path@gone", "me/gone", f"org/base@{revision}", "me/nothing"]
        done = hub.python(
            PROGRAMS, tmp_path / "home", arguments=[write_tasks(tmp_path / "data"), tmp_path / "eval", *names]
        )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    answers, refused = lines[0], dict(zip(names[1:], lines[1:6], strict=True))
    expected = call(
        generate.main, "--workdir", workdir, "--prompt", "2 + 2?", "--max_new_tokens", "8", "--budget", "1", "3"
    )
    assert answers.removeprefix(f"{names[0]} answers 0 ").strip() == ascii(expected.out)
    for name, message in {
        "me/path": "put that one back",  # the line is shortened in its middle
        "me/path@gone": "me/path has no revision gone on the hub: name one",
        "me/gone": "org/base has no revision gone on the hub: name one",
        f"org/base@{revision}": f"org/base@{revision} has no diffusion path: give a language model by --model",
        "me/nothing": "nor could the hub give it",
    }.items():
        assert refused[name].startswith(f"{name} answers 2 '' error: ")
        assert message in refused[name]
    assert "gsm8k" in lines[6]
    assert (tmp_path / "eval" / "gsm8k").is_dir()
    assert "--model, or a hub id, needs --out DIR" in lines[7]
    assert lines[8].startswith(f"serve serving {names[0]} at http://127.0.0.1:")
    assert len(lines) == 9
    assert newest != good
    assert not ran.exists()


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
