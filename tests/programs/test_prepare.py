import os
import signal
import subprocess
import sys
import time

import datasets
import pytest
from safetensors.numpy import load_file

from l2d_jax import prepare, train
from l2d_jax.data import examples, prepared, tokenizer
from l2d_jax.errors import LONGEST_LINE, InputError
from l2d_jax.weights import base_model
from tests.support.programs import ROOT, call, options, same_bits, without_times

STEPS = {"train__steps": 3, "data__packing": True}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.mark.slow
def test_training_is_the_same_bit_for_bit_and_neither_reads_nor_tokenises_the_source(tmp_path, monkeypatch):
    outcome = call(prepare.main, *options(**STEPS), "--out", tmp_path / "out")
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.splitlines()[0].startswith("train: 14 (2 too long and 0 with too long an answer left out)")
    assert outcome.out.endswith(f" MiB; train with --config.data.prepared={tmp_path / 'out'}\n")
    assert call(train.main, *options(**STEPS), "--workdir", tmp_path / "source").status == 0
    monkeypatch.setattr(examples, "read_parts", lambda *_: pytest.fail("reads the source"))
    monkeypatch.setattr(tokenizer, "turn_texts", lambda *_, **__: pytest.fail("tokenises"))
    arguments = [*options(**STEPS, data__prepared=tmp_path / "out"), "--workdir"]
    outcome = call(train.main, *arguments, tmp_path / "prepared")
    assert (outcome.status, outcome.err) == (0, "")
    assert without_times(tmp_path / "prepared") == without_times(tmp_path / "source")
    paths = [load_file(tmp_path / name / "export" / "path.safetensors") for name in ("prepared", "source")]
    assert same_bits(*paths)
    assert "resuming after step 3" in call(train.main, *arguments, tmp_path / "source").out  # the same examples


def test_bad_input_is_one_line_before_a_base_is_opened(tmp_path, monkeypatch):
    def opened(*_):
        raise InputError("opens the base")

    def error(**changes):
        return call(train.main, *options(data__prepared=out, **changes), "--workdir", tmp_path / "run").error

    monkeypatch.setattr(base_model, "find_base", opened)
    out = tmp_path / "out"
    assert error().startswith(f"{out} has no manifest.json: its preparation has not ended")
    assert call(prepare.main, *options(), "--out", out).status == 0
    assert error(data__max_length=200).startswith(f"{out} was prepared with config.data.max_length 256, not 200: ")
    assert error() == "opens the base"
    next((out / "shards").iterdir()).write_bytes(b"")
    assert "is missing, or not as it was written: give the command of l2d_jax.prepare again" in error()
    assert len(error()) < LONGEST_LINE
    outcome = call(prepare.main, *options(data__prepared=out), "--out", "x")
    assert "names examples that are prepared already" in outcome.error
    assert "out/manifest.json" in call(prepare.main, *options(), "--out", out / "manifest.json").error
    assert "gs://BUCKET/FOLDER, got 'ftp://x/y'" in call(prepare.main, *options(), "--out", "ftp://x/y").error


@pytest.mark.slow
def test_a_preparation_that_is_killed_goes_on(tmp_path, monkeypatch):
    arguments = [*options(data__train_examples=2000), "--out", str(tmp_path / "out")]
    code = f"import sys; sys.argv[1:] = {[*arguments, '--processes', '2']}; from l2d_jax.data import prepared; "
    code += "prepared.SHARD = 64; from l2d_jax import prepare; prepare.main()"
    started = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, stderr=subprocess.PIPE
    )
    shards = tmp_path / "out" / "shards"
    while not list(shards.glob("*-*.arrow")):
        assert started.poll() is None
        time.sleep(0.01)
    started.send_signal(signal.SIGKILL)
    started.wait()
    started.stderr.read()  # ends with the last process of the pool
    kept = {path: path.stat().st_mtime_ns for path in shards.glob("*-*.arrow")}
    assert not (tmp_path / "out" / "manifest.json").exists()
    monkeypatch.setattr(prepared, "SHARD", 64)
    assert call(prepare.main, *arguments, "--processes", "1").status == 0
    assert {path: path.stat().st_mtime_ns for path in kept} == kept
    assert len(list(shards.glob("*-*.arrow"))) == 33
