"""Evaluates a model on the paper's tasks: `python -m l2d_jax.evaluate --workdir DIR --tasks gsm8k,mmlu --budget 1 15`.

Results go to `DIR/eval/<task>/<solver>-<budget>/`: `samples.jsonl` has a line per problem with prompt, completions,
extracted answers and scores, and `results.json` has the figures. The same command again continues where it stopped.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from l2d_jax import command_line
from l2d_jax.command_line import file_name, folder_or_bucket, model_name
from l2d_jax.config import config_file, ranges
from l2d_jax.config.config_file import override_names
from l2d_jax.config.parsing import from_dict
from l2d_jax.config.schema import Config, MeshConfig
from l2d_jax.data import rows
from l2d_jax.decoding.batching import common_prefix
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.refinement.solver import SOLVERS
from l2d_jax.decoding.requests import check_decoding_memory, check_prompts
from l2d_jax.distributed import processes, runtime
from l2d_jax.errors import require
from l2d_jax.evaluation.plan import (
    DRAWS,
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
from l2d_jax.evaluation.tasks.task import TASKS, find_task
from l2d_jax.loading import find, load, model_fingerprint, newest_step
from l2d_jax.model.l2d import check_labels
from l2d_jax.model.llm import LLM
from l2d_jax.reports.page import interval

SECTIONS = ("decode", "mesh")  # of a config that are read
OF_MODEL = ("model.name", "model.tokenizer", "model.chat_template")  # besides, where a config is given


def main() -> None:
    """Parse the command line, open the model, and evaluate."""
    options, config = parse_arguments(command_line.Parser(prog="python -m l2d_jax.evaluate", description=__doc__))
    _, plans, run_plan = open_session(options, config)
    for plan in plans:
        run_plan(plan)


def open_session(
    options: argparse.Namespace, config: Config | None, *, used: Sequence[str] = ()
) -> tuple[LoadedModel, list[TaskPlan], Callable[[TaskPlan], None]]:
    """Check everything, then load the model; returns it, the plans and what runs one; raises `InputError`.

    The options of decoding that the caller has `used` are not refused where the plans do not use them.
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
    plans = make_plans(tasks, options, found.defaults if config is None else config.decode, base)
    mesh = runtime.start_decoding(mesh_config, rows=options.batch_size, kv_heads=base.architecture.num_key_value_heads)
    llm = LLM.declare(base.architecture, dtype=found.base.dtype)
    for plan in plans:
        check_settings(plan.settings, found.path_config)
        prompts = [one.ids for one in plan.problems]
        check_prompts(prompts, base.architecture, new_tokens=plan.settings.max_new_tokens)
        longest = max(map(len, prompts)) - common_prefix(prompts)
        size, remedy = plan.protocol.batch_size, "--batch_size or --max_new_tokens"
        check_decoding_memory(llm, found.path_config, plan.settings, rows=size, longest=longest, remedy=remedy)
    labels = {label_of(one.problem, plan.protocol) for plan in plans for one in plan.problems}
    check_labels(found.path_config, sorted(label for label in labels if label is not None))
    check_asked_options(options, plans, found, used=used)
    step = newest_step(found)  # resolved once: a training run may save another meanwhile
    # Other evaluations in these folders are refused before any weight is loaded.
    model = processes.decide(lambda: model_fingerprint(found, base, step))
    processes.decide(lambda: [open_results(plan, options, found, step, model).folder.name for plan in plans])
    loaded = load(options.workdir or options.model, mesh=mesh, dtype=options.dtype, step=step, **texts)

    def run_plan(plan: TaskPlan) -> None:
        results = partial(open_results, plan, options, found, step, model)
        processes.print_once(_line(plan, evaluate_plan(loaded, plan, results, run=run)))

    return loaded, plans, run_plan


def parse_arguments(parser: command_line.Parser) -> tuple[argparse.Namespace, Config | None]:
    """The options, and the config if the command line names one; raises `InputError`."""
    command_line.add_source(parser)
    config = f"for its decode and mesh sections, in place of the workdir's decode; {config_file.CONFIG_HELP}"
    parser.add_argument("--config", help=config)
    parser.add_argument("--tasks", required=True, help=f"with commas between them: {', '.join(TASKS)}")
    parser.add_argument("--out", type=folder_or_bucket, help="where results go; DIR/eval of a workdir")
    parser.add_argument("--name", type=file_name, help="of the folder within a task's; <solver>-<budget> and others")
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], help="of weights and products")
    problems = parser.add_argument_group("problems")
    problems.add_argument("--data_dir", type=model_name, help="read rows from <data_dir>/<task>, such as <split>.jsonl")
    problems.add_argument("--split", type=file_name, help="another than the paper's")
    problems.add_argument("--limit", type="Count", help="so many problems, evenly spaced; None: all")
    problems.add_argument("--shots", type="CountOrZero", help="examples before each question; None: the paper's")
    problems.add_argument("--prompts", choices=["paper", "thoughts"], default="paper", help="thoughts: ask for them")
    problems.add_argument("--tagged", action="store_true", help="judge what <answer> tags hold, or follows </think>")
    choices = "likelihood: of tasks with options, the likeliest letter by one pass over a prompt; not the paper's way"
    problems.add_argument("--choices", choices=["generate", "likelihood"], default="generate", help=choices)
    problems.add_argument("--allow_code_execution", action="store_true", help="run generated programs, each isolated")
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--budget", type="Budget", nargs="+", help="evaluations of the path per token, once or more")
    decoding.add_argument("--solver", choices=SOLVERS, help="how the path is integrated")
    decoding.add_argument("--tolerance", type="Tolerance", help="of each step of an adaptive solver")
    decoding.add_argument("--label", type=class_label, help="class for guidance, or category: each problem's own")
    decoding.add_argument("--guidance", type="Strength", help="its strength; 1: the class alone")
    decoding.add_argument("--temperature", type="Temperature", help="of the final draw; None: the task's; 0: arg max")
    decoding.add_argument("--max_new_tokens", type="Tokens", help="of a completion; None: the task's")
    decoding.add_argument("--samples", type="Rows", help="completions of each problem; None: the task's")
    decoding.add_argument("--draws", type="SeveralDraws", help=f"of noise, with --choices likelihood; None: {DRAWS}")
    decoding.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, on all devices together")
    decoding.add_argument("--seed", type="Seed", default=0, help="of the noise and the draws")
    options, rest = parser.parse_known_args()
    options.overrides = config_file.split_overrides(rest)
    for name in options.overrides:
        is_read = name.partition(".")[0] in SECTIONS or (name in OF_MODEL and options.config is not None)
        remedy = "use --dtype" if name == "model.dtype" else "leave it out"
        rule = f"only the sections {' and '.join(SECTIONS)} are read, and with --config {', '.join(OF_MODEL)}"
        require(is_read, f"--config.{name} changes nothing here, {rule}: {remedy}")
    require(bool(options.workdir or options.out), "--model, or a hub id, needs --out DIR, for the results")
    return options, None if options.config is None else config_file.read_config(options.config, options.overrides)


def class_label(text: str) -> int | float | str:
    """The value of `--label`: "category", or the number of a class."""
    try:
        return text if text == "category" else command_line.number(ranges.Label, text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'must be "category" or a class: {error}') from None


def _line(plan: TaskPlan, figures: dict[str, Any]) -> str:
    shown = ", ".join(f"{kind} {interval(accuracy_interval(figures, kind))}" for kind in KINDS)
    speed = figures["speed"]
    took = f"{speed['problems']} answered in {speed['seconds']:.0f} s"
    if speed["tokens"]:
        counts = [f"{figures[f'{name} per token']:.2f} {name}" for name in ("evaluations", "passes")]
        took += f", {' in '.join(counts)} a token, {speed['tokens per second']:.1f} tokens/s"
    name = f"{plan.task.name} {plan.settings.solver} {plan.settings.budget}"
    return f"{name}: {shown} of {figures['problems']} problems; {took}"


if __name__ == "__main__":
    command_line.run(main)
