"""Plans of training steps: the values of rematerialisation, micro-batches and mesh that a config leaves "auto".

`compile --search` keeps what the compiler says of a few plans for a slice of TPUs, by the devices and the sizes of
the step, not by a model's name; `plans.json` has that for the models of the paper. Saving the products comes first,
with one row on each device at a time, then two, four and eight while they fit. Only where not one row fits is
everything computed again. Saving all moves more bytes than it saves work (`docs/evidence/tpu_estimates.md`); it is
tried where the config asks for it. Without an entry, a step computes all again in the backward pass, has one
micro-batch, and shards the weights over all devices.

The noise of a step depends on its micro-batches, so a run keeps their number wherever it resumes. The workdir records
the plan for each slice. A run that returns to a slice takes the recorded plan, so it repeats itself bit for bit.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NotRequired

import jax
from jax.sharding import Mesh
from typing_extensions import TypedDict

from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.distributed import runtime
from l2d_jax.distributed.memory import parameters
from l2d_jax.distributed.sharding import count_slices, mesh_sizes
from l2d_jax.files import Count, cache_folder, check, explained, read_json, write_whole
from l2d_jax.model.attention import LANES
from l2d_jax.storage import mirror
from l2d_jax.training.methods import method_of
from l2d_jax.weights.base_model import read_architecture

TABLE = "plans.json"  # results of searches: this machine's in the cache, the package's next to this file
RECORD = "plan.json"  # in a workdir: the plan for each slice on which it was trained
ANY = "any devices"  # key of a record for runs of versions without plans
ROWS = (1, 2, 4, 8)  # rows per device of a micro-batch that a search tries
SPARE = 0.1  # share of a device's memory that a plan must leave free


class StepPlan(TypedDict):
    """How a step is computed, and what the compiler says about it."""

    remat: Literal["none", "products", "full"]
    accumulation: Count  # micro-batches
    mesh: dict[str, int]
    spare: NotRequired[float]  # share of a device's memory that it leaves free; negative if it does not fit
    share_of_peak: NotRequired[float]  # rate of useful operations relative to peak; 0 if it does not fit


def apply_plan(plan: StepPlan, config: Config) -> Config:
    """Put the values of a plan into a config."""
    train = dataclasses.replace(config.train, remat=plan["remat"], accumulation=plan["accumulation"])
    return dataclasses.replace(config, train=train, mesh=from_dict(MeshConfig, plan["mesh"], prefix="mesh"))


def allows(config: Config, plan: StepPlan, *, devices: int) -> bool:
    """Whether a plan agrees with the options that a config sets."""
    train, mesh, planned = config.train, config.mesh, from_dict(MeshConfig, plan["mesh"], prefix="mesh")
    is_same = train.remat in ("auto", plan["remat"]) and train.accumulation in ("auto", plan["accumulation"])
    return is_same and (mesh == MeshConfig() or mesh_sizes(mesh, devices) == mesh_sizes(planned, devices))


def devices_text(devices: Sequence[Any]) -> str:
    """The number and kind of devices, such as "16 TPU v5 lite", and the number of slices if there are several."""
    slices = count_slices(devices)
    return f"{len(devices)} {devices[0].device_kind}" + (f" in {slices} slices" if slices > 1 else "")


def plan_text(plan: StepPlan, devices: Sequence[Any]) -> str:
    """A plan and where it comes from, in one line."""
    mesh = " ".join(f"{name}={size}" for name, size in plan["mesh"].items() if size != 1) or "of one device"
    share = f"{plan['share_of_peak']:.1%} of peak, compiled for" if "share_of_peak" in plan else "not compiled for"
    values = f"remat {plan['remat']}, accumulation {plan['accumulation']}, mesh {mesh}"
    return f"plan: {values} ({share} {devices_text(devices)})"


def step_text(config: Config, devices: Sequence[Any]) -> str:
    """The key of a plan: the devices, and the sizes that determine the cost of a step."""
    a, method, train, data = read_architecture(config.model), method_of(config), config.train, config.data
    frozen, trained = parameters(method.declare_frozen(a)), parameters(method.declare(a))
    options = f"draws {train.draws_per_context}, chunk {train.loss_chunk}"
    options += ", packed" * data.packing + ", own estimates" * (train.own_estimates > 0)
    return (
        f"{devices_text(devices)}: {train.method} of {a.num_hidden_layers} layers x {a.hidden_size}, "
        f"{frozen} {config.model.dtype} + {trained} values, {train.batch_size} rows of {data.max_length} tokens, "
        f"{data.answer_length or data.max_length} of them answers, {options}"
    )


def choose_plan(config: Config, devices: Sequence[Any], *, workdir: Path | None = None) -> StepPlan:
    """Choose the plan of a config for some devices; it agrees with every option that the config sets.

    The order is: in a `workdir` with checkpoints, the plan recorded for these devices; the fastest plan of the tables
    that leaves `SPARE` of the memory free; the default. Raises `InputError` for a malformed file.
    """
    where, recorded = devices_text(devices), {} if workdir is None else recorded_plans(workdir)
    plans = [recorded[name] for name in (where, ANY) if name in recorded]
    for begun in recorded.values():
        train = dataclasses.replace(config.train, accumulation=begun["accumulation"])
        config = dataclasses.replace(config, train=train)
    for table in (_read_table(folder / TABLE) for folder in (cache_folder(), Path(__file__).parent)):
        if any(name.startswith(f"{where}: ") for name in table):
            plans += sorted(table.get(step_text(config, devices), []), key=lambda plan: -plan.get("share_of_peak", 0))
    for plan in plans:
        if plan.get("spare", SPARE) >= SPARE and allows(config, plan, devices=len(devices)):
            return plan
    remat: Any = "full" if config.train.remat == "auto" else config.train.remat
    return StepPlan(remat=remat, accumulation=config.train.micro_batches, mesh=mesh_sizes(config.mesh, len(devices)))


def start_planned(config: Config) -> tuple[Config, Mesh, str]:
    """Start JAX with the plan of a config; returns the config with the plan's values, the mesh, and `plan_text`."""
    runtime.start_jax(config.mesh)
    plan = choose_plan(config, jax.devices())
    config = apply_plan(plan, config)
    return config, runtime.start_jax(config.mesh), plan_text(plan, jax.devices())


def search_plans(config: Config, devices: Sequence[Any], ask: Callable[[Config], Mapping[str, Any]]) -> list[StepPlan]:
    """Try the plans that the config allows; `ask` returns the figures of `tpu_estimate` for a config."""
    found: list[StepPlan] = []
    mesh, batch = plan_mesh(config, devices), config.train.batch_size
    for remat in ("products", "full") if config.train.remat == "auto" else (config.train.remat,):
        for rows in (mesh["data"] * mesh["fsdp"] * rows for rows in ROWS):
            plan = StepPlan(remat=remat, accumulation=max(batch // rows, 1), mesh=mesh)
            if batch % rows or not allows(config, plan, devices=len(devices)):
                continue
            figures = ask(apply_plan(plan, config))
            plan["spare"] = round(1 - figures["needed"] / figures["usable"], 3)
            plan["share_of_peak"] = round(figures.get("share of peak", 0.0), 4)
            print(plan_text(plan, devices), file=sys.stderr, flush=True)
            found.append(plan)
            if plan["spare"] < SPARE:
                break
        if any(plan["spare"] >= SPARE for plan in found):
            break
    return found


def plan_mesh(config: Config, devices: Sequence[Any]) -> dict[str, int]:
    """The config's mesh if it sets one; otherwise a mesh that shards the weights.

    `fsdp` is as large as the rows of a batch allow. The remaining devices divide the tokens of a row (`context`) or
    heads (`tensor`). Each slice has a copy of the weights, because the network between slices is slow.
    """
    count, batch = len(devices), config.train.batch_size
    if config.mesh != MeshConfig():
        return mesh_sizes(config.mesh, count)
    slices = count_slices(devices)
    shards = max(size for size in range(1, count + 1) if count % size == batch % size == 0)
    rest, data = count // shards, slices if shards % slices == 0 else 1
    axis = "context" if config.data.max_length % (LANES * rest) == 0 else "tensor"
    return {"data": data, "fsdp": shards // data, "tensor": 1, "context": 1, axis: rest}


def add_plans(config: Config, devices: Sequence[Any], plans: list[StepPlan]) -> None:
    """Add the results of a search for a config on some devices to the table of this machine."""
    file, key, values = cache_folder() / TABLE, step_text(config, devices), itemgetter("remat", "accumulation", "mesh")
    table = _read_table(file)
    table[key] = [old for old in table.get(key, []) if values(old) not in map(values, plans)] + plans
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(table, indent=1, sort_keys=True) + "\n")


def recorded_plans(workdir: Path) -> dict[str, StepPlan]:
    """The plans with which a run was trained, keyed by `devices_text`; empty if it has no checkpoints yet.

    Workdirs of versions without plans have the values in their config, for `ANY` devices.
    """
    file = workdir / RECORD
    if not (workdir / "checkpoints").exists():
        return {}
    if file.exists():
        return check(read_json(file), dict[str, StepPlan], file, remedy="restore it or choose another --workdir")
    file, remedy = workdir / "config.json", "restore it or choose another --workdir"
    sections = check(read_json(file), dict[str, dict[str, Any]], file, remedy=remedy)
    train = {"remat": "full", "accumulation": 1} | sections.get("train", {})
    begun = StepPlan(remat=train["remat"], accumulation=train["accumulation"], mesh={"fsdp": -1})
    return {} if "auto" in begun.values() else {ANY: begun}


def record_plan(workdir: Path, devices: Sequence[Any], plan: StepPlan) -> None:
    """Record in a workdir which plan the run uses on these devices."""
    plans = recorded_plans(workdir) | {devices_text(devices): plan}
    with explained(f"cannot write to workdir {workdir}", "choose another --workdir"):
        write_whole(workdir / RECORD, json.dumps(plans, indent=2) + "\n")
        mirror.publish(workdir / RECORD)


def _read_table(file: Path) -> dict[str, list[StepPlan]]:
    return check(read_json(file), dict[str, list[StepPlan]], file, remedy="remove it") if file.exists() else {}
