"""Plans: what a config leaves open is filled from a table, the same on the same devices, and not on others."""

import dataclasses
import json
import types
from pathlib import Path

import pytest

from l2d_jax.config.config_file import read_config
from l2d_jax.config.schema import MeshConfig
from l2d_jax.errors import InputError
from l2d_jax.training import plans
from l2d_jax.training.workdir import claim
from tests.support.programs import ROOT, config

FSDP = {"data": 1, "fsdp": 16, "tensor": 1, "context": 1, "stationary": 1}
SLOW = {"remat": "full", "accumulation": 4, "mesh": FSDP, "spare": 0.6, "share_of_peak": 0.3}
FAST = {"remat": "products", "accumulation": 2, "mesh": FSDP, "spare": 0.1, "share_of_peak": 0.6}
TIGHT = {"remat": "products", "accumulation": 1, "mesh": FSDP, "spare": 0.09, "share_of_peak": 0.7}
DEFAULT = {"remat": "full", "accumulation": 1, "mesh": FSDP}
FREE = {"train__batch_size": 64}


def devices(count=16, kind="TPU v5 lite", *, slices=1):
    return [types.SimpleNamespace(device_kind=kind, slice_index=n * slices // count) for n in range(count)]


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    """The package's table, with three plans for the tiny config on a slice and nothing else; this machine has none."""
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path))
    monkeypatch.setattr(plans, "__file__", str(tmp_path / "plans.py"))
    plans.add_plans(config(**FREE), devices(), [SLOW, FAST])
    plans.add_plans(config(**FREE), devices(), [TIGHT, FAST])
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path / "cache"))
    return tmp_path / "plans.json"


def chosen(where=None, workdir=None, **changes):
    return values(plans.choose_plan(config(**FREE | changes), where or devices(), workdir=workdir))


def values(plan):
    return {name: plan[name] for name in DEFAULT}


def test_the_fastest_that_leaves_room_is_taken(table):
    assert [len(found) for found in json.loads(table.read_text()).values()] == [3]
    plan = plans.choose_plan(config(**FREE), devices())
    assert plan == FAST
    text = "plan: remat products, accumulation 2, mesh fsdp=16 (60.0% of peak, compiled for 16 TPU v5 lite)"
    assert plans.plan_text(plan, devices()) == text
    assert plans.plan_text(DEFAULT | {"mesh": {"fsdp": 1}}, devices(1, "cpu")) == (
        "plan: remat full, accumulation 1, mesh of one device (not compiled for 1 cpu)"
    )
    planned = plans.apply_plan(plan, config(**FREE))
    assert (planned.train.remat, planned.train.accumulation, planned.mesh) == ("products", 2, MeshConfig(**FSDP))


@pytest.mark.parametrize(
    ("changes", "plan"),
    [
        ({"train__remat": "full"}, values(SLOW)),
        ({"train__accumulation": 4}, values(SLOW)),
        ({"mesh__fsdp": -1}, values(FAST)),
        ({"train__remat": "none"}, DEFAULT | {"remat": "none"}),
        ({"train__accumulation": 8}, DEFAULT | {"accumulation": 8}),
        ({"mesh__tensor": 2}, DEFAULT | {"mesh": {**FSDP, "fsdp": 8, "tensor": 2}}),
    ],
)
def test_what_the_config_sets_stays(changes, plan):
    assert chosen(**changes) == plan


@pytest.mark.parametrize(
    "changes",
    [
        {"train__batch_size": 32},
        {"data__max_length": 128, "data__answer_length": 64},
        {"data__answer_length": 64},
        {"data__packing": True},
        {"train__draws_per_context": 2},
        {"train__own_estimates": 0.5},
        {"train__loss_chunk": 64},
        {"path__lora_rank": 4},
        {"path__layers": "dense"},
        {"model__dtype": "bfloat16"},
    ],
    ids=str,
)
def test_another_step_has_no_plan(changes):
    assert chosen(**changes) == DEFAULT


@pytest.mark.parametrize("changes", [{"path__sigma": 32.0}, {"optim__peak_rate": 1e-5}, {"train__seed": 3}], ids=str)
def test_what_costs_nothing_keeps_the_plan(changes):
    assert chosen(**changes) == values(FAST)


@pytest.mark.parametrize("where", [devices(8), devices(kind="TPU v6 lite"), devices(slices=2)], ids=plans.devices_text)
def test_another_slice_has_no_plan(where):
    assert chosen(where=where) == DEFAULT | {"mesh": {**FSDP, "fsdp": len(where)}}


def test_a_search_of_this_machine_comes_first(table):
    assert plans.devices_text(devices(slices=2)) == "16 TPU v5 lite in 2 slices"
    plans.add_plans(config(**FREE), devices(), [SLOW])
    assert chosen() == values(SLOW)
    plans.add_plans(config(**FREE), devices(8), [TIGHT])
    assert chosen() == values(SLOW)
    table.write_text('{"16 TPU v5 lite: ": [{"remat": "some"}]}')
    with pytest.raises(InputError, match=r"plans.json: .*remat must be .* got 'some': remove it"):
        chosen()


def begin(workdir, plan, where):
    (workdir / "checkpoints").mkdir(parents=True, exist_ok=True)
    plans.record_plan(workdir, where, plan)


def test_a_run_keeps_its_plan_on_a_slice_and_its_micro_batches_everywhere(table, tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    plans.record_plan(run, devices(), SLOW)
    assert chosen(workdir=run) == values(FAST)  # nothing is trained yet
    begin(run, SLOW, devices())
    assert chosen(workdir=run) == values(SLOW)
    elsewhere = DEFAULT | {"accumulation": 4, "mesh": {**FSDP, "fsdp": 8}}
    assert chosen(where=devices(8), workdir=run) == elsewhere
    begin(run, elsewhere, devices(8))
    table.unlink()
    assert chosen(workdir=run) == values(SLOW)
    assert chosen(where=devices(8), workdir=run) == elsewhere


def test_a_run_from_before_goes_on_as_it_began(tmp_path):
    """Its config has values where there is "auto" now."""
    train = dataclasses.asdict(config(train__batch_size=64, train__remat="none", train__accumulation=4).train)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps({"train": train}))
    for where in (devices(), devices(4)):
        plan = plans.choose_plan(config(**FREE), where, workdir=tmp_path)
        assert plan == {"remat": "none", "accumulation": 4, "mesh": {"fsdp": -1}}
        plans.record_plan(tmp_path, where, plan)
    train["accumulation"] = "auto"  # that of a run whose record is lost
    (tmp_path / "config.json").write_text(json.dumps({"train": train}))
    (tmp_path / "plan.json").unlink()
    assert chosen(workdir=tmp_path) == values(FAST)


def test_a_damaged_record_is_one_line(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "plan.json").write_text('{"1 cpu": {"remat": "none"}}')
    with pytest.raises(InputError, match=r"plan.json: 1 cpu.accumulation is missing: restore it or choose another"):
        chosen(workdir=tmp_path)


@pytest.mark.parametrize("name", ["llama1b", "llama8b", "qwen1p5b", "qwen7b"])
def test_the_papers_models_have_plans(monkeypatch, name):
    """In the table of the package, for one slice of each kind at least."""
    monkeypatch.undo()
    paper = read_config(str(ROOT / "configs" / f"{name}.py"))
    step = plans.step_text(paper, devices()).partition(": ")[2]
    found = [key.partition(": ") for key in json.loads(Path(plans.__file__).with_suffix(".json").read_text())]
    slices = [where.split(" ", 1) for where, _, what in found if what == step]
    assert {kind for _, kind in slices} >= {"TPU v5 lite", "TPU v5", "TPU v6 lite"}
    for count, kind in slices:
        plan = plans.choose_plan(paper, devices(int(count), kind))
        assert plan["spare"] >= plans.SPARE
        assert 0.2 < plan["share_of_peak"] < 1


def test_auto_is_what_the_run_began_with(tmp_path):
    claim(tmp_path, config(train__remat="none", train__batch_size=4, train__accumulation=2))
    (tmp_path / "checkpoints").mkdir()
    claim(tmp_path, config(train__batch_size=4))
    for changes in ({"train__remat": "full"}, {"train__accumulation": 4}):
        with pytest.raises(
            InputError, match=r"belongs to another config: config.train.\w+ was ('none'|2), is ('full'|4):"
        ):
            claim(tmp_path, config(**{"train__batch_size": 4} | changes))
