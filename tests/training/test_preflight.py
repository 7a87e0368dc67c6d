"""What a run needs is looked at before anything else: hosts, workdir, base model, disks."""

import shutil
import types

import huggingface_hub
import pytest
from huggingface_hub import errors

from l2d_jax import train
from l2d_jax.errors import InputError
from l2d_jax.training import preflight
from tests.distributed.test_processes import finish, launch
from tests.support.forked import program
from tests.support.programs import call, config, options, write_base


def file(size, *, is_here=False, commit="abc123"):
    return types.SimpleNamespace(commit_hash=commit, file_size=size, will_download=not is_here)


@pytest.fixture
def answers(monkeypatch):
    """What the hub answers to a dry run: files, or an error; nothing is in the cache."""
    given = []

    def snapshot_download(hub_id, *, revision=None, dry_run=False, local_files_only=False, **options):
        if local_files_only or not dry_run:
            raise errors.LocalEntryNotFoundError("nothing is here")
        answer = given[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return given


def response():
    return types.SimpleNamespace(headers={}, request=None, status_code=403)


def test_it_says_what_it_has_looked_at_and_trains_nothing(tmp_path):
    base = write_base(tmp_path / "base")
    outcome = call(train.main, *options(), f"--config.model.name={base}", "--workdir", tmp_path / "run", "--preflight")
    assert outcome.status == 0, outcome
    lines = [line for line in outcome.out.splitlines() if not line.startswith("plan: ")]
    assert [line.split(": ")[:2] for line in lines] == [
        ["preflight", name]
        for name in ("versions", "writing to the workdir", "one workdir for all", "base model", "memory", "disk")
    ]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert not list((tmp_path / "run").glob(".preflight*"))


def test_a_gated_base_names_its_page_and_the_token(tmp_path, answers):
    answers.append(errors.GatedRepoError("gated", response=response()))
    asked = [*options(), "--config.model.name=meta/llama", "--config.model.architecture=None"]
    error = call(train.main, *asked, "--workdir", tmp_path / "run").error
    assert "meta/llama is gated: accept its licence at https://huggingface.co/meta/llama and set HF_TOKEN" in error
    assert not (tmp_path / "run").exists()


def test_a_base_from_the_hub_is_pinned(tmp_path, answers):
    """The first run takes the newest revision, the next ones the same."""
    answers.append([file(10)])
    assert preflight.pinned_base("org/name", tmp_path) == "org/name@abc123"
    assert preflight.pinned_base("org/name@main", tmp_path) == "org/name@main"
    assert preflight.pinned_base(str(tmp_path), tmp_path) == str(tmp_path)
    (tmp_path / "config.json").write_text('{"model": {"name": "org/name@former"}}')
    assert preflight.pinned_base("org/name", tmp_path) == "org/name@former"
    assert preflight.pinned_base("org/other", tmp_path) == "org/other@abc123"


def test_a_disk_that_is_too_small_is_one_line(tmp_path, answers, mesh, monkeypatch):
    answers.append([file(30 * 2**30), file(5, is_here=True)])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=10 * 2**30))
    run = config(model__name="org/name")
    with pytest.raises(
        InputError, match=r"preflight on .*: disk: .* has 10.0 GiB free and needs 30.0: make room there"
    ):
        preflight.check_run(run, tmp_path, mesh)


def test_other_code_is_named(tmp_path, mesh, monkeypatch):
    versions = iter([{**preflight._versions(), "jax": "0.1"}, preflight._versions()])
    monkeypatch.setattr(preflight, "_versions", lambda: next(versions))
    with pytest.raises(InputError, match=r"versions: jax \S+ here, 0.1 on process 0: install the same on all hosts"):
        preflight.check_run(config(), tmp_path, mesh)


def impatient(*arguments):
    preflight.PATIENCE = 1
    program(train.main, *arguments)


@pytest.mark.slow
def test_two_hosts_with_a_folder_each_are_told(tmp_path):
    """On each of them, before anything is trained."""
    started = launch({i: (impatient, *options(), "--workdir", tmp_path / str(i), "--preflight") for i in range(2)})
    for status, _, err in finish(started):
        assert status == 2, err
        assert "is not the same folder on all hosts (1 of 2 processes not seen)" in err
