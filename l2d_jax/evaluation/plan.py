"""Plans of evaluations: tasks and settings, which are checked, and problems, which are read, before any weight."""

import argparse
import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from l2d_jax.config.parsing import require
from l2d_jax.config.schema import Config, DecodeConfig
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.evaluation.results import Results
from l2d_jax.evaluation.runner import EvaluationProtocol, check_protocol
from l2d_jax.evaluation.sandbox import grade
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Run
from l2d_jax.evaluation.tasks.task import Task, encode_problems
from l2d_jax.fingerprint import Fingerprint, digest
from l2d_jax.loading import Folder
from l2d_jax.weights import model_folder
from l2d_jax.weights.locate import absolute_name

DECODING_OPTIONS = ("solver", "tolerance", "guidance", "temperature", "max_new_tokens")


class TaskPlan(NamedTuple):
    """One task at one setting."""

    task: Task
    problems: Sequence[EncodedProblem]
    digest: str  # of the problems and their prompts
    settings: DecodeConfig
    protocol: EvaluationProtocol


def check_same(found: Folder, config: Config) -> None:
    """Raise `InputError` if the config names another model than the workdir's."""
    if found.base_name not in (config.model.name, absolute_name(config.model.name)):
        raise InputError(
            f"the path of {found.path} was trained on {found.base_name}, and the config's model is another, "
            f"{config.model.name}: give the config that it was trained with, or none"
        )


def choose_run(tasks: Sequence[Task], *, is_allowed: bool) -> Run | None:
    """What runs generated programs, or None if no task needs it; raises `InputError` if it may not or cannot run."""
    names = [task.name for task in tasks if task.kind == "code"]
    if not names:
        return None
    require(is_allowed, f"{', '.join(names)} runs programs that the model writes: allow it with --allow_code_execution")
    reason = processes.decide(grade.unavailable)
    require(reason is None, str(reason))
    note = processes.decide(grade.unbounded)
    if note is not None:
        processes.print_once(note)
    return grade.grade


def make_plans(
    tasks: Sequence[Task], options: argparse.Namespace, decode: DecodeConfig, base: model_folder.BaseFiles
) -> list[TaskPlan]:
    """A plan for each task and budget, with its problems read and encoded; raises `InputError`."""
    if base.tokenizer is None:
        raise InputError("the model has no tokenizer, and tasks are text: add its tokenizer files")
    names = [field.name for field in dataclasses.fields(EvaluationProtocol)]
    asked = EvaluationProtocol(**{name: getattr(options, name) for name in names})
    chosen = {name: value for name in DECODING_OPTIONS if (value := getattr(options, name)) is not None}
    plans = []
    for task in tasks:
        given = {name: getattr(options, name) for name in ("limit", "split", "shots")}
        read = partial(task.load, options.data_dir, prompts=options.prompts, **given)
        problems = processes.take_turns(read)
        if options.data_dir is None and options.prompts == "paper" and set(given.values()) == {None}:
            task.check_size(problems)  # the paper's whole split
        encoded = encode_problems(problems, base.tokenizer)
        processes.print_once(
            f"{task.name}: {len(encoded)} problems, {len(problems) - len(encoded)} dropped for their length"
        )
        hashed = digest([[one.problem._asdict(), one.ids] for one in encoded])
        usual = task.sampling_for(options.prompts)._asdict()
        samples = usual.pop("samples")
        protocol = dataclasses.replace(asked, samples=asked.samples or samples)
        check_protocol(protocol, encoded)
        for budget in options.budget or [decode.budget]:
            settings = dataclasses.replace(decode, **(usual | chosen), budget=budget)
            plans.append(TaskPlan(task, encoded, hashed, settings, protocol))
    return plans


def open_results(
    plan: TaskPlan, options: argparse.Namespace, found: Folder, step: int | None, model: Fingerprint
) -> Results:
    """The results of a plan for the model at `step`; raises `InputError` if the folder holds another evaluation."""
    parts = [plan.settings.solver, str(plan.settings.budget)]
    parts += [plan.protocol.prompts] if plan.protocol.prompts != "paper" else []
    parts += [] if plan.protocol.label is None else [f"label_{plan.protocol.label}", f"{plan.settings.guidance:g}"]
    parts += [plan.protocol.choices] if plan.protocol.choices != "generate" else []
    split = options.split or plan.task.split
    about = {"task": plan.task.name, "split": split, "limit": options.limit, "shots": options.shots}
    about |= {"model": found.base_name, "dtype": found.base.dtype, "step": step}
    about["fingerprint"] = {**model, "problems": plan.digest}
    protocol = dataclasses.asdict(plan.protocol)
    if found.base.dtype == "float32":  # elsewhere rounding decides words, and depends on the shape of a batch
        del protocol["batch_size"]  # a smaller one may continue where memory was short
    about |= {"decode": dataclasses.asdict(plan.settings), "asking": protocol}
    return Results(results_folder(options) / plan.task.name / (options.name or "-".join(parts)), about)


def results_folder(options: argparse.Namespace) -> Path:
    """The folder that holds a folder for each task."""
    return Path(options.out or options.workdir / "eval")
