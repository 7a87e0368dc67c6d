"""Training under what goes wrong on real machines: kill -9 at any moment, a full disk, bad files, a second run."""

import itertools
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path

import pytest

from l2d_jax import train
from l2d_jax.distributed.sharding import abstract
from l2d_jax.generate import main as generate
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.storage.lock import hold
from l2d_jax.training import run as loop
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.metrics import read_metrics
from tests.support.forked import Forked, program
from tests.support.programs import TIMES, call, config, options, same_bits

KILLS = int(os.environ.get("L2D_JAX_KILLS", "5"))
SETTINGS = {
    "train__steps": 24,
    "train__checkpoint_every": 2,
    "train__keep": 2,
    "train__validate_every": 12,
    "validation__budgets": (1,),
    "data__max_length": 224,
    "data__answer_length": 96,
}


def start(workdir, *, room=None):
    """A process that trains; from the steps in `room` on, no file of the run may grow beyond so many bytes."""
    return Forked(run, [*options(**SETTINGS), "--workdir", workdir], room or {})


def run(arguments, room):
    """What the process does."""
    place, steps = loop.micro_batches, itertools.count(1)

    def place_with_limit(*placed):
        limit = room.get(next(steps))
        if limit is not None:
            folder, end = arguments[-1] / "checkpoints", time.monotonic() + 30  # a failed save may leave folders
            while any(not (step / "manifest.json").exists() for step in folder.iterdir()) and time.monotonic() < end:
                time.sleep(0.01)  # a save is under way
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return place(*placed)

    loop.micro_batches = place_with_limit
    program(train.main, *arguments)


def finish(workdir, **limits):
    """Exit status, and all that was printed."""
    status, out, err = start(workdir, **limits).end()
    return status, out + err


def records(workdir):
    """Without times, and without what tells of failed saves."""
    found = [{k: v for k, v in record.items() if not k.startswith(TIMES)} for record in read_metrics(workdir)]
    return [record for record in found if "failed_save" not in record]


def last_step(workdir):
    return max((record["step"] for record in records(workdir)), default=0)


def steps(workdir):
    return sorted(path.name for path in (workdir / "checkpoints").iterdir())


def check_whole(workdir, whole, mesh):
    """The same losses and the same newest path and moments as those of the whole run, bit for bit."""
    assert records(workdir) == records(whole)
    assert same_bits(newest_path(workdir, mesh), newest_path(whole, mesh))


def newest_path(workdir, mesh):
    declared = DiffusionPath.declare(config(**SETTINGS).path, Architecture.from_hf(config().model.architecture))
    checkpoints = Checkpoints(workdir / "checkpoints")
    assert checkpoints.latest() == SETTINGS["train__steps"]
    return checkpoints.restore(checkpoints.latest(), {"path": abstract(declared, mesh)})["path"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The workdir of a run that nothing happens to."""
    workdir = tmp_path_factory.mktemp("whole") / "workdir"
    status, text = finish(workdir)
    assert status == 0, text
    assert "warning" not in text
    return workdir


@pytest.fixture
def copy(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "workdir"))


@pytest.mark.slow
def test_a_run_that_is_killed_at_any_moment_is_the_whole_run(whole, tmp_path, mesh, capsys):
    """SIGKILL at moments of its life, or at so many milliseconds after a step, each time started again."""
    rng, workdir = random.Random(0), tmp_path / "workdir"
    seconds, killed, ends = None, [], 0
    while len(killed) < KILLS:
        began, started = time.monotonic(), start(workdir)
        if seconds is None or rng.random() < 0.5:
            step = last_step(workdir) + rng.randrange(1, 6)
            while started.process.is_alive() and last_step(workdir) < step:
                time.sleep(0.01)
            seconds = seconds or time.monotonic() - began
            started.process.join(rng.uniform(0, 0.2))
        else:
            started.process.join(rng.uniform(0, 2 * seconds))
        started.process.kill()
        status, *text = started.end()
        if status == -signal.SIGKILL:
            killed.append(last_step(workdir))
        else:
            assert status == 0, text
            check_whole(workdir, whole, mesh)
            shutil.rmtree(workdir)
            ends += 1
    status, text = finish(workdir)
    assert status == 0, text
    check_whole(workdir, whole, mesh)
    left = [name for name in steps(workdir) if not name.isdigit()]
    with capsys.disabled():
        print(f"\nkilled {len(killed)} times, at the steps {killed}; {ends + 1} whole runs; left at the end: {left}")


@pytest.mark.slow
def test_a_full_disk_costs_checkpoints_and_nothing_else(whole, tmp_path, mesh):
    """Too full for arrays at the steps 5 to 7, for anything from step 23 on; then the same command goes on."""
    workdir = tmp_path / "workdir"
    status, text = finish(workdir, room={5: 8000, 8: resource.RLIM_INFINITY, 23: 0})
    assert status == 1, text
    usual = ("plan: ", "first step after ")
    lines = [line for line in text.splitlines() if "/24  " not in line and not line.startswith(usual)]
    lost = "warning: checkpoint of step {} was not saved (File too large): training goes on; the newest good one is {}"
    assert lines[1:-1] == [lost.format(6, "step 4"), lost.format(24, "step 22")]
    assert lines[-1].startswith("error: the last 3 records could not be written to ")
    assert [record for record in read_metrics(workdir) if "failed_save" in record] == [{"step": 8, "failed_save": 6}]
    assert records(workdir) == records(whole)[:-3]
    assert steps(workdir) == ["20", "22"]
    status, text = finish(workdir)
    assert status == 0, text
    assert "resuming after step 22" in text
    check_whole(workdir, whole, mesh)


@pytest.mark.slow
def test_a_bad_checkpoint_is_passed_over_by_training_and_by_generation(whole, copy, mesh):
    """Generation also while a run holds the workdir, which a second run may not; and it changes nothing."""
    data = max((copy / "checkpoints" / "24").glob("path/ocdbt.process_0/d/*"), key=lambda path: path.stat().st_size)
    bad = bytearray(data.read_bytes())
    bad[len(bad) // 2] ^= 1
    data.write_bytes(bad)
    warning = f"checkpoint 24 in {copy / 'checkpoints'} is passed over, and left as it is: "
    with hold(copy):
        outcome = call(generate, "--workdir", copy, "--prompt", "Hi", "--budget", 1, "--max_new_tokens", 1)
        assert outcome.status == 0, outcome
        assert (
            outcome.err == f"warning: {warning}{data.relative_to(copy / 'checkpoints' / '24')} has changed since it "
            "was saved\n"
        )
        refused = call(train.main, *options(**SETTINGS), "--workdir", copy)
        assert f"workdir {copy} is in use by process {os.getpid()} on " in refused.error
    assert steps(copy) == ["22", "24"]
    status, text = finish(copy)
    assert status == 0, text
    assert warning in text
    assert "resuming after step 22" in text
    check_whole(copy, whole, mesh)
    assert steps(copy) == ["22", "24", "24.broken"]
    assert (copy / "checkpoints" / "24.broken" / data.relative_to(copy / "checkpoints" / "24")).read_bytes() == bad


@pytest.mark.slow
def test_without_any_good_checkpoint_a_run_begins_anew(whole, copy, mesh):
    for manifest in (copy / "checkpoints").glob("*/manifest.json"):
        manifest.unlink()
    status, text = finish(copy)
    assert status == 0, text
    assert text.count("warning: checkpoint 2") == 2
    assert "resuming" not in text
    check_whole(copy, whole, mesh)
