"""Evaluates a model on tasks."""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from l2d_jax import command_line
from l2d_jax.config.config_file import override_names
from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.data import rows
from l2d_jax.decoding.batching import common_prefix
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.requests import check_prompts
from l2d_jax.decoding.search.beam_search import check_search
from l2d_jax.distributed import processes, runtime
from l2d_jax.distributed.memory import parameters
from l2d_jax.evaluation.plan import (
    TaskPlan,
    check_asked_options,
    check_same,
    choose_run,
    label_of,
    make_plans,
    open_results,
    results_folder,
)
from l2d_jax.evaluation.results import KINDS, accuracy_interval
from l2d_jax.evaluation.runner import evaluate_plan
from l2d_jax.evaluation.suite import SUITE
from l2d_jax.evaluation.suite_rows import require_rows
from l2d_jax.evaluation.suite_run import PlanWork, answer_suite
from l2d_jax.evaluation.tasks.problem import Run
from l2d_jax.evaluation.tasks.task import find_task
from l2d_jax.loading import Folder, find, load, model_fingerprint, newest_step
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import check_labels
from l2d_jax.model.llm import LLM
from l2d_jax.performance.costs import trainable_parameters
from l2d_jax.reports.page import interval
from l2d_jax.reports.suite import suite_section, write_suite
from l2d_jax.storage import mirror


class Session(NamedTuple):
    """A loaded model, and what is evaluated."""

    loaded: LoadedModel
    plans: list[TaskPlan]
    run_plan: Callable[[TaskPlan], None]
    works: list[PlanWork]  # the plans with their results
    run: Run | None  # runs generated programs
    trained: int | None  # number of trained parameters of the model; None: not known


def run(options: argparse.Namespace, config: Config | None) -> None:
    """Open the model, and evaluate every plan; with `--suite`, show and write the table."""
    session = open_session(options, config)
    if options.suite is None:
        for plan in session.plans:
            session.run_plan(plan)
        return
    failures = answer_suite(session.loaded, session.works, _show, run=session.run)
    if processes.is_first():
        _write_table(session, options)
    if failures:
        raise failures[0]


def _write_table(session: Session, options: argparse.Namespace) -> None:
    """Write the table of a suite, and print it."""
    has_path = session.loaded.model.path is not None
    unused = {work.name: has_path and work.plan.settings.budget == 1 for work in session.works}
    trained = {name: 0 if is_unused else session.trained for name, is_unused in unused.items()}
    model = Path(options.workdir or options.out).resolve().name
    section = suite_section(write_suite(results_folder(options), model, options.suite, trained), {})
    if section is not None:
        section.printed()
    print(f"written to {mirror.shown_places(str(results_folder(options) / SUITE))}")


def _trained_parameters(found: Folder, architecture: Architecture) -> int | None:
    """The number of trained values of a workdir or a path; None for another language model, whose origin is unknown."""
    if found.trained is not None:
        return trainable_parameters(found.trained, architecture)
    return None if found.path_config is None else parameters(DiffusionPath.declare(found.path_config, architecture))


def open_session(
    options: argparse.Namespace,
    config: Config | None,
    *,
    used: Sequence[str] = (),
    vary: Callable[[list[TaskPlan]], list[TaskPlan]] = list,
) -> Session:
    """Check everything, then load the model.

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
    processes.take_turns(lambda: require_rows(tasks, options))
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
    names = processes.decide(lambda: [open_results(plan, options, found, step, model).folder.name for plan in plans])
    loaded = load(options.workdir or options.model, mesh=mesh, dtype=options.dtype, step=step, **texts)

    def run_plan(plan: TaskPlan) -> None:
        results = partial(open_results, plan, options, found, step, model)
        _show(plan, evaluate_plan(loaded, plan, results, run=run))

    openings = [partial(open_results, plan, options, found, step, model) for plan in plans]
    works = [PlanWork(*work) for work in zip(plans, names, openings, strict=True)]
    return Session(loaded, plans, run_plan, works, run, _trained_parameters(found, base.architecture))


def _show(plan: TaskPlan, figures: dict[str, Any]) -> None:
    processes.print_once(_line(plan, figures))


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
