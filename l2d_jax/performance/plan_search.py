"""Which plans of a training step a search compiles for a slice of TPUs: a few, whose memory grows until it is too much.

Saving the products comes first, with one row on each device at a time, then two, four and eight while they fit. Only
where not one row fits is everything computed again. Saving all moves more bytes than it saves work: 39.9 % of peak in
place of 44.0 (Llama 1B on v5e:1x1), 55.9 in place of 61.0 (Qwen 7B on v5p:2x2x1, four rows); it is tried where the
config asks for it.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.distributed.sharding import mesh_sizes
from l2d_jax.model.attention import LANES
from l2d_jax.training.plans import SPARE, StepPlan, allows, apply_plan, plan_text

ROWS = (1, 2, 4, 8)  # of a micro-batch, on each device


def search_plans(config: Config, devices: Sequence[Any], ask: Callable[[Config], Mapping[str, Any]]) -> list[StepPlan]:
    """What `ask`, which gives the figures of `tpu_estimate`, says of the plans that the config allows."""
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
    """The config's mesh if it sets one; otherwise shards of the weights, and of rows where these are too few.

    Slices have copies of the weights, since the network between them is slow.
    """
    count, batch = len(devices), config.train.batch_size
    if config.mesh != MeshConfig():
        return mesh_sizes(config.mesh, count)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    shards = max(size for size in range(1, count + 1) if count % size == batch % size == 0)
    rest, data = count // shards, slices if shards % slices == 0 else 1
    axis = "context" if config.data.max_length % (LANES * rest) == 0 else "tensor"
    return {"data": data, "fsdp": shards // data, "tensor": 1, "context": 1, axis: rest}
