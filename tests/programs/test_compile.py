"""The program, on a device of this machine in place of a TPU's, and once for a TPU where libtpu is installed."""

import importlib.util
import json

import jax
import pytest

from l2d_jax import compile, train
from l2d_jax.performance import lowering, tpu_estimate
from l2d_jax.performance.topologies import Topology
from l2d_jax.programs import compile as program
from tests.support.programs import call, config, options

SMALL = options(train__batch_size=4)


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Compiles for this machine's own device, with a cache of its own; the list counts the compilations."""
    lowered: list[str] = []
    real = lowering.lower_train

    def lower(*arguments):
        lowered.append("train")
        return real(*arguments)

    monkeypatch.setattr(lowering, "lower_train", lower)
    monkeypatch.setattr(Topology, "devices", lambda self: jax.devices()[:1])
    monkeypatch.setattr(program, "LIBRARIES", ("jax",))
    monkeypatch.setattr(program, "EVERY", 0.2)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return lowered


@pytest.mark.slow
def test_a_question_is_compiled_once(here, tmp_path):
    arguments = (*SMALL, "--topology", "v5e:1x1", "--work", "train")
    first = call(compile.main, *arguments, "--hlo", tmp_path / "out")
    again = call(compile.main, *arguments)
    assert (first.status, again.status, here) == (0, 0, ["train"])
    assert "compiling train for v5e:1x1: " in first.err
    assert again.err == ""
    assert (
        "train on v5e:1x1, 1 devices, data=1 x fsdp=1 x tensor=1 x context=1 x stationary=1 (compiled in " in first.out
    )
    assert "(from the cache)" in again.out
    assert first.out.splitlines()[1:] == again.out.splitlines()[1:]
    assert "ENTRY" in (tmp_path / "out" / "train.hlo").read_text()
    found = json.loads(call(compile.main, *arguments, "--json").out)["train"]
    assert found["cached"]
    assert 1 <= found["FLOPs"] / found["useful FLOPs"] < 4


def test_a_search_is_kept_for_auto(here, monkeypatch):
    """The compiler's figures are our own: four rows at a time do not fit, and two are faster than one."""
    shares = {4: 0.3, 2: 0.4, 1: 0.5}

    def answer(question, mesh, *, folder=None):
        accumulation = question.config.train.accumulation
        return {"needed": 4 / accumulation, "usable": 3.0, "share of peak": shares[accumulation], "cached": True}

    monkeypatch.setattr(program, "answer", answer)
    arguments = (*SMALL, "--topology", "v5e:1x1", "--work", "train")
    default = call(compile.main, *arguments).out.splitlines()[1]
    assert default.startswith("  plan: remat full, accumulation 1, mesh of one device (not compiled for 1 ")
    outcome = call(compile.main, *arguments, "--search")
    found = outcome.out.splitlines()[1].strip()
    assert found.startswith("plan: remat products, accumulation 2, mesh of one device (40.0% of peak, compiled for 1 ")
    assert [line.split(", ")[1] for line in outcome.err.splitlines()] == [f"accumulation {n}" for n in (4, 2, 1)]
    assert call(compile.main, *arguments).out.splitlines()[1].strip() == found
    assert call(train.main, *SMALL, "--dry_run").out.splitlines()[-1] == found.replace("plan: ", "plan  ")
    assert "remat none, accumulation 1" in call(train.main, *SMALL, "--dry_run", "--config.train.remat=none").out


def test_what_makes_another_question(monkeypatch):
    def asked(work="train", topology="v5e:2x2", slices=1, batch=8, passes=1.4, **changes):
        return program.Question(
            work, config(**changes), Topology.parse(topology, slices=slices), batch, 64, passes
        ).key()

    monkeypatch.setattr(program, "LIBRARIES", ("jax",))
    assert asked() == asked() == asked(batch=4) == asked(passes=2.0)  # which are decoding's alone
    keys = {asked(), asked("decode"), asked("decode", batch=4), asked(topology="v5e:2x4"), asked(slices=2)}
    keys.add(asked("decode", passes=2.0))
    keys.add(asked(train__loss_chunk=16))
    monkeypatch.setattr(program, "LIBRARIES", ("jax", "flax"))
    assert len({*keys, asked()}) == 8


def test_new_source_is_another_question(monkeypatch, tmp_path):
    for name in ("compile.py", "model/llm.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1")
    monkeypatch.setattr(program, "PACKAGE", tmp_path)
    monkeypatch.setattr(program, "LIBRARIES", ("jax",))
    question = program.Question("train", config(), Topology.parse("v5e:2x2"), 8, 64, 1.4)
    before = question.key()
    assert question.key() == before
    (tmp_path / "model" / "llm.py").write_text("x = 2")
    assert question.key() != before


def test_a_program_that_is_refused(here, monkeypatch):
    class Refused(jax.stages.Lowered):
        def __init__(self):
            pass

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Used 31.5G of 15.75G hbm.")

    monkeypatch.setattr(lowering, "lower_train", lambda *arguments: Refused())
    outcome = call(compile.main, *SMALL, "--topology", "v5e:1x1", "--work", "train")
    assert outcome.status == 1
    assert "does not fit: 15.75 GiB (100%) too much" in outcome.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v5e"], "a slice of v5e has 2 sizes, got 'v5e': write it as v5e:4x4"),
        (["--topology", "v5e:1x1", "--batch", "0"], "--batch: the number must be in [1, 1000000], got 0"),
        (["--topology", "v5e:1x1", "--config.mesh.fsdp=3"], "needs 3 devices, found 1"),
        ([], "required: --topology"),
    ],
)
def test_bad_input_is_one_line(here, arguments, message):
    assert message in call(compile.main, *SMALL, *arguments).error
    assert here == []


@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: the extra tpu")
def test_for_a_tpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    arguments = (*SMALL, "--topology", "v5e:2x2", "--json")
    assert "does not divide over data x fsdp = 4" in call(compile.main, *arguments, "--config.train.batch_size=6").error
    outcome = call(compile.main, *arguments)
    assert outcome.status == 0
    for found in json.loads(outcome.out).values():
        assert tpu_estimate.fits(found)
        assert found["cycles"] > 0
        assert found["moved"]["all-gather"] > 0
    found = json.loads(outcome.out)
    assert (found["train"]["loops of unknown length"], found["decode"]["loops of unknown length"]) == (0, 0)
    assert found["decode"]["evaluations"] == "as a stream"
    plain = json.loads(call(compile.main, *arguments, "--work", "decode", "--config.decode.parallel=off").out)["decode"]
    assert (plain["evaluations"], plain["loops of unknown length"]) == ("one by one", 1)
