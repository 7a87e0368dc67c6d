"""Whole programs on a workdir in a bucket: killed, disturbed, resumed by other processes, evaluated and exported."""

import json
import os
import random
import signal
import time
from typing import NamedTuple

import numpy as np
import pytest

from l2d_jax import convert, evaluate, generate, report, study, sweep, train
from l2d_jax.errors import RunError
from l2d_jax.storage import lock, mirror
from l2d_jax.storage.bucket import Bucket
from tests.distributed.test_processes import finish, launch
from tests.support import worker
from tests.support.forked import Forked, program
from tests.support.programs import TIMES, call, options, write_base

URL = "gs://bucket/runs/tiny"
KILLS = int(os.environ.get("L2D_JAX_KILLS", "20"))
SETTINGS = {
    "train__steps": 12,
    "train__checkpoint_every": 2,
    "train__keep": 2,
    "validation__budgets": (1,),
    "data__max_length": 224,
    "data__answer_length": 96,
}


class Whole(NamedTuple):
    """What a run leaves."""

    records: list
    weights: bytes


def start(arguments, url):
    return Forked(program, train.main, *arguments, "--workdir", url)


def train_to_its_end(arguments, url):
    """In a process of its own, too: the tests' own one compiles otherwise."""
    ended = start(arguments, url).end()
    assert ended.status == 0, ended


def read_records(emulator, url):
    """The log without times; nothing before the first upload."""
    text = emulator.files().get(f"{url.removeprefix('gs://bucket/')}/metrics.jsonl", b"").decode()
    records = [json.loads(line) for line in text.splitlines()]
    return [{name: value for name, value in record.items() if not name.startswith(TIMES)} for record in records]


def last_step(emulator, url):
    return max((record["step"] for record in read_records(emulator, url)), default=0)


def weights(emulator, url):
    return emulator.files()[f"{url.removeprefix('gs://bucket/')}/export/path.safetensors"]


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    """Of all runs: the options of a tiny training from a base in a folder."""
    return options(**SETTINGS, model__name=write_base(tmp_path_factory.mktemp("model") / "base"))


@pytest.fixture(scope="module")
def whole(bucket_server, arguments):
    """A run that nothing happens to."""
    url = "gs://bucket/whole"
    train_to_its_end(arguments, url)
    names = {name.removeprefix("whole/") for name in bucket_server.files()}
    assert {"config.json", "metrics.jsonl", "export/path.json", "export/path.safetensors"} <= names
    assert {name.split("/")[1] for name in names if name.startswith("checkpoints/")} == {"10", "12"}
    assert any(name.startswith("tensorboard/events") for name in names)
    assert ".lock" not in names
    return Whole(read_records(bucket_server, url), weights(bucket_server, url))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_is_the_whole_run(emulator, arguments, whole):
    """SIGKILL soon after some step is in the log, or seconds after the start; requests fail for a while."""
    rng, killed, ends = random.Random(0), [], 0
    while len(killed) < KILLS:
        url = f"{URL}{ends}"
        started, step = start(arguments, url), last_step(emulator, url) + rng.randrange(1, 5)
        with emulator.failing(503, times=rng.randrange(3)):
            end = time.monotonic() + (rng.uniform(0, 4) if rng.random() < 0.5 else 60)
            while started.process.is_alive() and last_step(emulator, url) < step and time.monotonic() < end:
                time.sleep(0.02)
            started.process.join(rng.uniform(0, 0.3))
        started.process.kill()
        ended = started.end()
        if ended.status == -signal.SIGKILL:
            killed.append(last_step(emulator, url))
        else:
            assert ended.status == 0, ended
            assert (read_records(emulator, url), weights(emulator, url)) == whole
            ends += 1
    train_to_its_end(arguments, f"{URL}{ends}")
    assert (read_records(emulator, f"{URL}{ends}"), weights(emulator, f"{URL}{ends}")) == whole
    print(f"killed after the steps {killed}; {ends + 1} whole runs")


@pytest.mark.slow
def test_a_bucket_that_fails_for_ever_is_a_line_and_the_same_command_goes_on(emulator, arguments, whole):
    """No checkpoint counts whose records are not in the bucket."""
    with emulator.failing(500, where="metrics.jsonl"):
        outcome = call(train.main, *arguments, "--workdir", URL)
    assert outcome.status == 1, outcome
    lines = outcome.err.splitlines()
    assert all("was not saved (" in line for line in lines[:-1]), outcome
    assert lines[-1].startswith(f"error: the log could not be written to {URL}/metrics.jsonl (")
    assert not any("checkpoints" in name for name in emulator.files())
    train_to_its_end(arguments, URL)
    assert (read_records(emulator, URL), weights(emulator, URL)) == whole


@pytest.mark.slow
def test_a_second_run_is_refused_and_an_expired_lock_taken_over(emulator, arguments, monkeypatch):
    monkeypatch.setenv(lock.LEASE, "2")
    monkeypatch.setattr(lock.socket, "gethostname", lambda: "first")
    with lock.hold(mirror.open_folder(URL)):
        monkeypatch.setattr(lock.socket, "gethostname", lambda: "second")
        outcome = call(train.main, *arguments, "--workdir", URL)
        assert f"workdir {URL} is in use by process {os.getpid()} on first: wait for that run" in outcome.error
        Bucket(URL).write(lock.NAME, b'{"pid": 1, "host": "third"}')
        time.sleep(1)
        with pytest.raises(RunError, match=f"the lock of {URL} was taken by another run: give the same command again"):
            lock.check_held()
    assert Bucket(URL).read(lock.NAME) == b'{"pid": 1, "host": "third"}'
    began = time.monotonic()
    with lock.hold(mirror.open_folder(URL)):
        assert time.monotonic() - began > 2
    assert emulator.files() == {}


@pytest.mark.slow
def test_from_two_processes_to_an_export(emulator, arguments, whole):
    """Two processes are killed, one goes on; then the other programs, each as a machine that knows the URL alone."""
    first = launch(dict.fromkeys(range(2), (worker.train, "KILL@5", *arguments, "--workdir", URL)))
    statuses = [status for status, _, _ in finish(first)]
    assert 0 not in statuses
    assert read_records(emulator, URL)[-1]["step"] >= 2
    outcome = call(train.main, *arguments, "--workdir", URL)
    assert outcome.status == 0, outcome
    assert "resuming after step" in outcome.out
    for ours, theirs in zip(read_records(emulator, URL), whole.records, strict=True):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-5, atol=1e-4, err_msg=name)
    tasks = ["--tasks", "word_problems", "--limit", 2, "--max_new_tokens", 2]
    commands = [
        (generate.main, "--workdir", URL, "--prompt", "Hi", "--budget", 3, "--max_new_tokens", 2),
        (evaluate.main, "--workdir", URL, *tasks, "--budget", 1),
        (sweep.main, "--workdir", URL, *tasks, "--budget", 3),
        (study.main, *arguments, "--models", f"tiny={URL}", "--budgets", 3, "--answers", 2, "--out", f"{URL}_study"),
        (report.main, "--workdir", URL),
        (convert.main, "export", "--model", URL, "--format", "l2d", "--out", f"{URL}_l2d"),
    ]
    for main, *asked in commands:
        mirror._mirrors.clear()
        outcome = call(main, *asked)
        assert outcome.status == 0, outcome
        assert "/tmp" not in outcome.out
    names = set(emulator.files())
    assert {"runs/tiny/report.html", "runs/tiny/report.png", "runs/tiny_l2d/l2d.safetensors"} <= names
    assert {"runs/tiny/eval/word_problems/within.json", "runs/tiny_study/tiny.json"} <= names
    assert any(name.startswith("runs/tiny/eval/word_problems") and name.endswith("samples.jsonl") for name in names)
    again = call(study.main, *commands[3][1:])  # by another machine
    assert (again.status, "measuring" in again.out) == (0, False), again
