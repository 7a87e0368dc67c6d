"""What is to be asked of a model: tasks and settings, checked and read before any weight is."""

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from l2d_jax.config.parsing import require
from l2d_jax.config.schema import Config, DecodeConfig
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.evaluation.results import Results
from l2d_jax.evaluation.runner import Asked, Asking, check_asking, settings_for
from l2d_jax.evaluation.sandbox import grade
from l2d_jax.evaluation.sandbox.submission import Submission
from l2d_jax.evaluation.tasks.problem import Program, Run
from l2d_jax.evaluation.tasks.task import Task, encode_problems
from l2d_jax.loading import Folder
from l2d_jax.weights import model_folder

OF_DECODING = ("solver", "tolerance", "guidance", "temperature", "max_new_tokens")


class Plan(NamedTuple):
    """One task at one setting."""

    task: Task
    asked: Sequence[Asked]
    settings: DecodeConfig
    asking: Asking


def check_same(found: Folder, config: Config) -> None:
    """Raise `InputError` if a config is of another model than the workdir's."""
    if found.base.name != config.model.name:
        raise InputError(
            f"the path of {found.path} was trained on {found.base.name}, and the config's model is another, "
            f"{config.model.name}: give the config that it was trained with, or none"
        )


def choose_run(tasks: Sequence[Task], *, is_allowed: bool) -> Run | None:
    """What runs generated programs; raises `InputError` where a task needs it and it is not allowed or not possible."""
    names = [task.name for task in tasks if task.kind == "code"]
    if not names:
        return None
    require(is_allowed, f"{', '.join(names)} runs programs that the model writes: allow it with --allow_code_execution")
    reason = processes.decide(grade.unavailable)
    if reason is not None:
        raise InputError(reason)
    return run_programs


def run_programs(programs: Sequence[Program]) -> list[Any]:
    """Judge programs in isolation."""
    return grade.grade([Submission(*program[1:]) for program in programs])


def make_plans(
    tasks: Sequence[Task], options: argparse.Namespace, decode: DecodeConfig, base: model_folder.FoundBase
) -> list[Plan]:
    """All that is to be asked, read and encoded; raises `InputError`."""
    if base.tokenizer is None:
        raise InputError("the model has no tokenizer, and tasks are text: add its tokenizer files")
    names = [field.name for field in dataclasses.fields(Asking)]
    plans = []
    for task in tasks:
        given = {name: getattr(options, name) for name in ("limit", "split", "shots")}
        read = partial(task.load, options.data_dir, prompts=options.prompts, **given)
        problems = processes.take_turns(read)
        if options.data_dir is None and options.prompts == "paper" and set(given.values()) == {None}:
            task.check_size(problems)  # the whole of what the paper asks
        asked = [Asked(*pair) for pair in encode_problems(problems, base.tokenizer)]
        processes.report(f"{task.name}: {len(asked)} problems, {len(problems) - len(asked)} dropped for their length")
        for budget in options.budget or [decode.budget]:
            asking = Asking(**{name: getattr(options, name) for name in names})
            chosen = {name: getattr(options, name) for name in OF_DECODING} | {"budget": budget}
            settings, samples = settings_for(task, asking, decode, **chosen)
            asking = dataclasses.replace(asking, samples=samples)
            check_asking(asking, asked)
            plans.append(Plan(task, asked, settings, asking))
    return plans


def open_results(plan: Plan, options: argparse.Namespace, found: Folder, step: int | None) -> Results:
    """The folder of a plan, for a model of this step; raises `InputError` if it holds another evaluation."""
    parts = [plan.settings.solver, str(plan.settings.budget)]
    parts += [plan.asking.prompts] if plan.asking.prompts != "paper" else []
    parts += [] if plan.asking.label is None else [f"label_{plan.asking.label}", f"{plan.settings.guidance:g}"]
    parts += [plan.asking.choices] if plan.asking.choices != "generate" else []
    split = options.split or plan.task.dataset.split
    about = {"task": plan.task.name, "split": split, "limit": options.limit, "shots": options.shots}
    about |= {"model": found.base.name, "dtype": found.base.dtype, "step": step}
    asking = dataclasses.asdict(plan.asking)
    del asking["batch_size"]  # nothing depends on it, and a smaller one may go on where memory was short
    about |= {"decode": dataclasses.asdict(plan.settings), "asking": asking}
    return Results(results_folder(options) / plan.task.name / (options.name or "-".join(parts)), about)


def results_folder(options: argparse.Namespace) -> Path:
    """Where the folders of all tasks are."""
    return Path(options.out or options.workdir / "eval")
