"""Real processes on this machine: they meet, share the data, decide together, and one of them does not come or dies."""

import re
import signal
import socket
import time
from functools import partial

import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils

from l2d_jax import command_line, evaluate, train
from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed import processes, runtime, sharding
from l2d_jax.distributed.cluster import find_cluster
from l2d_jax.distributed.processes import join
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.training.metrics import read_metrics
from l2d_jax.weights import model_folder
from tests.support import tiny, worker
from tests.support.forked import Forked, program
from tests.support.programs import (
    TIMES,
    call,
    config,
    options,
    same_bits,
    without_times,
    write_base,
    write_model,
    write_tasks,
)


def free_port():
    with socket.create_server(("", 0)) as server:
        return server.getsockname()[1]


def variables(port, count, index):
    """By which a process knows of the others."""
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
        "JAX_PROCESS_ID": str(index),
        "L2D_JAX_HEARTBEAT": "10",
    }


def launch(tasks, *, count=None, **environment):
    """Start processes 0, 1, ... of `count` (None: as many as there are tasks), each with a function and arguments."""
    port = free_port()
    return [
        Forked(*task, environment={**variables(port, count or len(tasks), index), **environment})
        for index, task in tasks.items()
    ]


def finish(started):
    """Exit status, output and errors of each."""
    return [process.end() for process in started]


def meet():
    command_line.run(lambda: runtime.start_jax(MeshConfig()) and None)


@pytest.mark.slow
def test_one_that_never_comes():
    """Process 0 without the other, and the other without process 0: one line each, and no abort."""
    alone = [launch({index: (meet,)}, count=2, L2D_JAX_WAIT="1")[0] for index in (0, 1)]
    for index, (status, out, err) in enumerate(finish(alone)):
        assert status == 2
        assert out.startswith(f"process {index} of 2, waiting for the others at localhost:")
        assert err.startswith(f"error: process {index} of 2 has waited 1 s at localhost:")
        assert "and not all 2 came: run the same command on all workers at once" in err
        assert err.count("\n") == 1


def talk(folder, how):
    """What two processes do that end "together", or one of them "alone"."""
    mesh = runtime.start_jax(MeshConfig())
    index = jax.process_index()
    other = runtime.start_jax(MeshConfig(fsdp=1, tensor=-1))
    print(*(sharding.rows_on_devices(each, 6) for each in (mesh, other)))
    assert processes.decide(lambda: {"who": [index, "é"]}) == {"who": [0, "é"]}

    def read():
        if index == 0:
            time.sleep(1)
            (folder / how).write_text("downloaded")
        return (folder / how).read_text()  # process 1 is on the same host and comes later

    assert processes.take_turns(read) == "downloaded"
    processes.print_once("one line")
    if how == "together":
        declared = DiffusionPath.declare(tiny.path_config(), tiny.architecture("llama"))
        model_folder.save_path(folder, sharding.initialize(declared, jax.random.key(0), mesh), base="x")
    for say in (processes.take_turns, processes.decide):

        def fail(say=say):
            if (say is processes.decide) or index == 1:
                raise InputError(f"bad in {index}")

        try:
            say(fail)
        except processes.SharedError as error:
            print(error)
    if how == "alone":
        if index == 1:
            raise InputError("bad here alone")
        multihost_utils.sync_global_devices("never")
    processes.decide(fail)


def talk_and_end(*arguments):
    command_line.run(partial(talk, *arguments))


@pytest.mark.slow
def test_what_processes_tell_each_other(tmp_path, mesh):
    """They end together where all know of an error, and none waits for one that has failed alone."""
    ends = {}
    for how in ("together", "alone"):
        ends[how] = launch(dict.fromkeys(range(2), (talk_and_end, tmp_path, how)))
    told = [
        ["[0, 1, 2] [0, 1, 2, 3, 4, 5]", "one line", "bad in 1", "bad in 0"],
        ["[3, 4, 5] [0, 1, 2, 3, 4, 5]", "bad in 1", "bad in 0"],
    ]
    for (status, out, err), lines in zip(finish(ends["together"]), told, strict=True):
        assert status == 2
        assert [line for line in out.splitlines() if not line.startswith(("process", "[Gloo]"))] == lines
        assert err == "error: bad in 0\n"
    declared = DiffusionPath.declare(tiny.path_config(), tiny.architecture("llama"))
    path = sharding.initialize(declared, jax.random.key(0), mesh)
    assert same_bits(model_folder.load_path(tmp_path, tiny.architecture("llama"), mesh), path)  # gathered from both
    first, second = finish(ends["alone"])
    assert second[0] == 2
    assert second[2] == "error: bad here alone\n"
    assert first[0] not in (0, 2)
    assert "error: process 0 of 2 has ended before its work was done" in first[2].splitlines()[-1]


def test_a_port_that_is_taken_is_one_line():
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        cluster = find_cluster(variables(port, 2, 0))
        with pytest.raises(InputError, match=rf"port {port} of JAX_COORDINATOR_ADDRESS .* cannot be used"):
            join(cluster)


@pytest.fixture(scope="module")
def steps():
    """One validation before the first step, and one after the last."""
    changes = {
        "train__steps": 16,
        "train__batch_size": 4,
        "train__validate_every": 0,
        "train__remat": "none",
        "data__validation_examples": 3,
    }
    return options(validation__budgets=(1,), validation__time_bins=1, **changes)


@pytest.fixture(scope="module")
def whole(steps, tmp_path_factory):
    """A run in one piece, of one process."""
    workdir = tmp_path_factory.mktemp("whole")
    outcome = call(train.main, *steps, "--workdir", workdir)
    assert outcome.status == 0, outcome.err
    return workdir


@pytest.mark.slow
def test_sigterm_saves_and_the_same_command_goes_on_bit_for_bit(steps, whole, tmp_path, mesh):
    [(status, out, err)] = finish(launch({0: (worker.train, "TERM@2", *steps, "--workdir", tmp_path)}))
    assert status == 143, err
    assert err == "SIGTERM: saving after the step under way; another one ends at once\n"
    assert out.endswith("stopped by SIGTERM: step 2 is saved, and the same command goes on from there\n")
    assert "waiting" not in out
    assert not (tmp_path / "export").exists()
    resumed = call(train.main, *steps, "--workdir", tmp_path)
    assert resumed.status == 0
    assert "resuming after step 2\n" in resumed.out
    assert without_times(tmp_path) == without_times(whole)
    architecture = Architecture.from_hf(config().model.architecture)
    assert same_bits(*(model_folder.load_path(folder / "export", architecture, mesh) for folder in (tmp_path, whole)))


@pytest.mark.slow
def test_any_number_of_processes_goes_on_with_the_same_curve(steps, whole, tmp_path):
    """SIGTERM to one of two, -9 to one of four, and one that is alone finishes what they began."""
    arguments = [*steps, "--workdir", tmp_path]

    def run(*mishaps):
        return finish(launch(dict(enumerate((worker.train, mishap, *arguments) for mishap in mishaps))))

    first, second = run("none", "TERM@4")
    assert (first[0], second[0]) == (143, 143), first[2] + second[2]
    assert "is saved, and the same command goes on" in first[1]
    assert "step" not in second[1]  # process 0 alone writes
    assert 4 <= (stopped := number(first[1], "stopped by SIGTERM: step")) < 10

    results = run("none", "none", "KILL@13", "none")
    assert number(results[0][1], "resuming after step") == stopped
    for index, (status, _, err) in enumerate(results):
        assert (status == -signal.SIGKILL) if index == 2 else (status not in (0, 2, 143)), err
        assert f"error: process {index} of 4 has ended before its work was done" in err
        assert "run the same command on all workers again" in err

    end = call(train.main, *arguments)
    assert end.status == 0, end.err
    assert number(end.out, "resuming after step") in (
        stopped,
        9,
        12,
    )  # the killed ones may not have finished writing 12
    one, other = (read_metrics(folder) for folder in (whole, tmp_path))
    assert [record["step"] for record in one] == [record["step"] for record in other]
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        for name in (name for name in a if not name.startswith(TIMES)):
            bound = 1e-6 if "loss" in name else 1e-4
            np.testing.assert_allclose(b[name], a[name], rtol=bound, err_msg=f"{name} at step {a['step']}")


def number(out, words):
    """The number after these words, which one line has."""
    [found] = re.findall(rf"^{words} (\d+)", out, re.MULTILINE)
    return int(found)


@pytest.mark.slow
def test_two_processes_evaluate_as_one(tmp_path, mesh):
    """The same completions and letters, written by process 0 alone."""
    model = write_model(tmp_path / "model", write_base(tmp_path / "base"), mesh)
    data = write_tasks(tmp_path / "data")
    words = ["--model", model, "--dtype", "float32", "--data_dir", data, "--shots", 1, "--budget", 3, "--batch_size", 4]
    asked = {
        "gsm8k": ["--tasks", "gsm8k", "--max_new_tokens", 4],
        "mmlu": ["--tasks", "mmlu", "--choices", "likelihood"],
    }
    for name, more in asked.items():
        assert call(evaluate.main, *words, *more, "--out", tmp_path / "alone").status == 0
        asks = (program, evaluate.main, *words, *more, "--out", tmp_path / "both")
        first, second = finish(launch(dict.fromkeys(range(2), asks)))
        assert (first[0], second[0]) == (0, 0), (first, second)
        assert "problems;" in first[1]
        assert "problems;" not in second[1]
        [alone], [both] = ((tmp_path / out).glob(f"{name}/*/samples.jsonl") for out in ("alone", "both"))
        assert sorted(both.read_text().splitlines()) == sorted(alone.read_text().splitlines())
