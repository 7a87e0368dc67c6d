import contextlib
import dataclasses
import re
import time

import jax
import jax.numpy as jnp
import pytest

from l2d_jax import train
from l2d_jax.config.schema import ProfileConfig
from l2d_jax.errors import InputError
from l2d_jax.training import workdir
from l2d_jax.training.profiler import check_steps, trace_steps
from l2d_jax.training.stopwatch import StartWatch, Stopwatch
from tests.support.programs import call, config, options


def add(state, step):
    return state + step, {"loss": state}


def traced_steps(folder):
    """The numbers of the steps in the one trace of a folder."""
    [file] = folder.rglob("*.xplane.pb")
    assert file.parent.parent == folder / "profile" / "plugins" / "profile"
    planes = jax.profiler.ProfileData.from_file(str(file)).planes
    events = [event for plane in planes for line in plane.lines for event in line.events if event.name == "train"]
    return sorted(dict(event.stats)["step_num"] for event in events)


def test_the_steps_that_are_named_are_traced(tmp_path, capsys):
    run = trace_steps(jax.jit(add), ProfileConfig(steps="5:7"), tmp_path, start=3)
    state = jnp.float32(0)
    for step in range(4, 9):
        state, metrics = run(state, step)
    assert (float(state), float(metrics["loss"])) == (30, 22)
    assert traced_steps(tmp_path) == [5, 6]
    assert capsys.readouterr().out == f"trace of steps 5 to 6: tensorboard --logdir {tmp_path}/profile\n"


@pytest.mark.parametrize("steps", [None, "3:9", "4:9", "2:3"])
def test_a_step_that_compiles_is_not_traced(tmp_path, capsys, steps):
    assert trace_steps(add, ProfileConfig(steps=steps), tmp_path, start=3) is add
    said = capsys.readouterr().out
    assert said == (
        "" if steps is None else f"no trace of the steps {steps}: step 5 is the first that can be traced from here\n"
    )


def test_steps_beyond_the_run_are_refused():
    check_steps(ProfileConfig(steps="4:7"), 6)
    with pytest.raises(InputError, match=r"config\.profile\.steps 4:8 goes beyond the run's 6 steps"):
        check_steps(ProfileConfig(steps="4:8"), 6)


@pytest.mark.slow
def test_a_training_run(tmp_path):
    changes = {"train__steps": 3, "train__validate_every": 0, "validation__budgets": (1,)}
    arguments = [*options(**changes), "--workdir", tmp_path]
    refused = call(train.main, *arguments, "--config.profile.steps=2:5")
    assert "config.profile.steps 2:5 goes beyond the run's 3 steps: choose earlier ones" in refused.error
    done = call(train.main, *arguments, "--config.profile.steps=2:4")
    assert done.status == 0
    assert traced_steps(tmp_path) == [2, 3]
    (start,) = re.findall(r"first step after [0-9.]+ s: (.*)", done.out)
    parts = "checks", "base model", "examples", "weights", "checkpoint", "validation", "compilation and step"
    assert re.sub(" [0-9.]+", "", start) == ", ".join(parts)


def test_a_run_that_goes_on_may_trace_other_steps(tmp_path):
    workdir.claim(tmp_path, config())
    (tmp_path / "checkpoints").mkdir()
    workdir.claim(tmp_path, dataclasses.replace(config(), profile=ProfileConfig(steps="5:7")))
    with pytest.raises(InputError, match=r"config\.train\.steps was 6, is 7"):
        workdir.claim(tmp_path, config(train__steps=7))


def test_every_second_is_of_one_part(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = Stopwatch()

    def batches():
        for batch in range(3):
            now[0] += 1
            yield batch

    for batch in watch.waiting(batches()):
        now[0] += 10
        if batch == 1:
            with contextlib.suppress(OSError), watch.during("save"):
                now[0] += 5
                raise OSError
            assert watch.lap() == {
                "seconds/step": 20,
                "seconds/data": 2,
                "seconds/save": 5,
                "seconds/validation": 0,
            }
    with watch.during("validation"):
        now[0] += 2
    assert watch.lap() == {"seconds/step": 10, "seconds/data": 1, "seconds/save": 0, "seconds/validation": 2}
    assert watch.summary() == "40 s: steps 75.0 %, data 7.5 %, save 12.5 %, validation 5.0 %".replace(" %", "%")


def test_what_the_first_step_waited_for(monkeypatch):
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    watch = StartWatch()
    for part, seconds in (("checks", 1), ("examples", 2.5)):
        now[0] += seconds
        watch.ended(part)
    assert watch.summary() == "first step after 3.5 s: checks 1.0, examples 2.5"
