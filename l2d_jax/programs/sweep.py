"""Evaluates a path at several budgets, ends and guidance strengths, traces right answers, and draws figures."""

import itertools
import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from l2d_jax.config.schema import Config
from l2d_jax.data import tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.solver import AMPLE
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.trace import accuracy_by_time, check_grid, mean_evaluations
from l2d_jax.distributed import processes
from l2d_jax.errors import require
from l2d_jax.evaluation.plan import TaskPlan, label_of, results_folder
from l2d_jax.files import write_whole
from l2d_jax.programs.evaluate import open_session
from l2d_jax.programs.report import report_workdir
from l2d_jax.reports.evaluation import WITHIN
from l2d_jax.storage import mirror

TRACED = 64  # number of right answers per task that are traced, evenly spaced over its problems


def run(options: Namespace, config: Config | None) -> None:
    """Evaluate, trace right answers, and report."""
    loaded, plans, run_plan, *_ = open_session(options, config, used=("tolerance",), vary=partial(_vary, options))
    require(loaded.model.path is not None, "a sweep is of a diffusion path, and this model has none: use evaluate")
    for plan in plans:
        run_plan(plan)
    for name, plan in _largest(plans).items():
        found = _trace_answers(loaded, plan)
        if processes.is_first():
            file = results_folder(options) / name / WITHIN
            write_whole(file, json.dumps(found, indent=2) + "\n")
            mirror.publish(file)
    if processes.is_first():
        report_workdir(options.workdir or options.out, {})


def _vary(options: Namespace, plans: list[TaskPlan]) -> list[TaskPlan]:
    """The plans, and those of each task at its largest budget with other ends and guidance strengths.

    No plan occurs twice. Raises `InputError` for a solver without a grid, and for a budget of 1 alone.
    """
    largest = _largest(plans)
    for plan in largest.values():
        check_grid(plan.settings)
    changes: list[Mapping[str, float]] = [{"end": end} for end in options.ends]
    changes += [{"guidance": strength} for strength in options.strengths] if options.label is not None else []
    pairs = itertools.product(changes, largest.values())
    others = [plan._replace(settings=replace(plan.settings, **change)) for change, plan in pairs]
    return [*{(plan.task.name, plan.settings): plan for plan in (*plans, *others)}.values()]


def _largest(plans: Sequence[TaskPlan]) -> dict[str, TaskPlan]:
    """The plan of each task, by its name, with the largest budget; of several, the first."""
    names = dict.fromkeys(plan.task.name for plan in plans)
    groups = {name: [plan for plan in plans if plan.task.name == name] for name in names}
    return {name: max(group, key=lambda plan: plan.settings.budget) for name, group in groups.items()}


def _trace_answers(loaded: LoadedModel, plan: TaskPlan) -> dict[str, object]:
    """Accuracy by t within the diffusion of right answers, and the evaluations of an adaptive solver."""
    assert loaded.tokenizer is not None
    count = min(TRACED, len(plan.problems))
    problems = [plan.problems[index * len(plan.problems) // count] for index in range(count)]
    labels = [label_of(one.problem, plan.protocol) for one in problems]
    prompts = number_prompts([one.ids for one in problems], labels=labels)
    answers = tokenizer.text_ids([one.problem.answer for one in problems], loaded.tokenizer)
    adaptive = replace(plan.settings, solver="fehlberg2", budget=AMPLE)
    evaluations = mean_evaluations(loaded, Request(prompts, adaptive), answers)
    found: dict[str, object] = {"solver": adaptive.solver, "tolerance": adaptive.tolerance, "evaluations": evaluations}
    return found | accuracy_by_time(loaded, Request(prompts, plan.settings), answers)
