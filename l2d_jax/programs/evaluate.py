"""Evaluates a model on tasks."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from l2d_jax import command_line
from l2d_jax.config.config_file import override_names
from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.data import rows
from l2d_jax.decoding.batching import common_prefix
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.requests import check_decoding_memory, check_prompts
from l2d_jax.decoding.search.beam_search import check_search
from l2d_jax.distributed import processes, runtime
from l2d_jax.evaluation.plan import (
    TaskPlan,
    check_asked_options,
    check_same,
    choose_run,
    label_of,
    make_plans,
    open_results,
)
from l2d_jax.evaluation.results import KINDS, accuracy_interval
from l2d_jax.evaluation.runner import evaluate_plan
from l2d_jax.evaluation.tasks.task import find_task
from l2d_jax.loading import find, load, model_fingerprint, newest_step
from l2d_jax.model.l2d import check_labels
from l2d_jax.model.llm import LLM
from l2d_jax.reports.page import interval


def run(options: argparse.Namespace, config: Config | None) -> None:
    """Open the model, and evaluate every plan."""
    _, plans, run_plan = open_session(options, config)
    for plan in plans:
        run_plan(plan)


def open_session(
    options: argparse.Namespace,
    config: Config | None,
    *,
    used: Sequence[str] = (),
    vary: Callable[[list[TaskPlan]], list[TaskPlan]] = list,
) -> tuple[LoadedModel, list[TaskPlan], Callable[[TaskPlan], None]]:
    """Check everything, then load the model; returns it, the plans, and a function that runs a plan.

    Decoding options in `used` are not refused if the plans do not use them, because the caller does. `vary` turns the
    plans that the options name into those to check and return. Raises `InputError`.
    """
    rows.keep_quiet()
    texts = command_line.tokenizer_options(options, config)
    found = find(options.workdir or options.model, dtype=options.dtype, **texts)
    if config is not None:
        check_same(found, config)
    tasks = [find_task(name) for name in options.tasks.split(",")]
    of_mesh = override_names(options.overrides, "mesh")
    mesh_config = from_dict(MeshConfig, of_mesh, prefix="config.mesh") if config is None else config.mesh
    runtime.start_jax(mesh_config)
    run = choose_run(tasks, is_allowed=options.allow_code_execution)
    base = processes.take_turns(found.find_base)
    plans = vary(make_plans(tasks, options, found.defaults if config is None else config.decode, base))
    mesh = runtime.start_decoding(mesh_config, rows=options.batch_size, kv_heads=base.architecture.num_key_value_heads)
    llm = LLM.declare(base.architecture, dtype=found.base.dtype)
    for plan in plans:
        check_settings(plan.settings, found.path_config)
        prompts = plan.prompts
        check_prompts(prompts, base.architecture, new_tokens=plan.settings.max_new_tokens)
        longest = max(map(len, prompts)) - common_prefix(prompts)
        if plan.search is None:
            size, remedy = plan.protocol.batch_size, "--batch_size or --max_new_tokens"
            check_decoding_memory(llm, found.path_config, plan.settings, rows=size, longest=longest, remedy=remedy)
        else:
            sizes = {"longest": longest, "lanes": plan.lanes, "searches": len(plan.problems) * plan.protocol.samples}
            check_search(plan.settings, plan.search, llm, found.path_config, **sizes)
    labels = {label_of(one.problem, plan.protocol) for plan in plans for one in plan.problems}
    check_labels(found.path_config, sorted(label for label in labels if label is not None))
    check_asked_options(options, plans, found, used=used)
    step = newest_step(found)  # resolved once: a training run may save another step in the meantime
    # Folders with other evaluations are refused before any weights are loaded.
    model = processes.decide(lambda: model_fingerprint(found, base, step))
    processes.decide(lambda: [open_results(plan, options, found, step, model).folder.name for plan in plans])
    loaded = load(options.workdir or options.model, mesh=mesh, dtype=options.dtype, step=step, **texts)

    def run_plan(plan: TaskPlan) -> None:
        results = partial(open_results, plan, options, found, step, model)
        processes.print_once(_line(plan, evaluate_plan(loaded, plan, results, run=run)))

    return loaded, plans, run_plan


def _line(plan: TaskPlan, figures: dict[str, Any]) -> str:
    shown = ", ".join(f"{kind} {interval(accuracy_interval(figures, kind))}" for kind in KINDS)
    speed = figures["speed"]
    took = f"{speed['problems']} answered in {speed['seconds']:.0f} s"
    if speed["tokens"]:
        counts = [f"{figures[f'{name} per token']:.2f} {name}" for name in ("evaluations", "passes")]
        took += f", {' in '.join(counts)} a token, {speed['tokens per second']:.1f} tokens/s"
    name = f"{plan.task.name} {plan.settings.solver} {plan.settings.budget}"
    name += f", {plan.search.beams} beams" if plan.search is not None else ""
    return f"{name}: {shown} of {figures['problems']} problems; {took}"
