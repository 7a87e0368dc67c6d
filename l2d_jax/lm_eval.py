"""Runs tasks of EleutherAI's lm-evaluation-harness: `python -m l2d_jax.lm_eval --workdir DIR --tasks piqa --out DIR`.

Prompts, few-shot examples, metrics and the printed table are the harness's; `results.json` and `samples.jsonl` go to
`--out`. Its own command line reads the weights before the tasks' data, which may be missing.
"""

import argparse
import contextlib
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

from l2d_jax import command_line
from l2d_jax.config.parsing import nearest, require
from l2d_jax.config.schema import MeshConfig
from l2d_jax.data.tokenizer import first_line, require_chat_template
from l2d_jax.decoding.refine import check_budget
from l2d_jax.decoding.requests import check_decoding_memory, override_settings
from l2d_jax.decoding.solver import ADAPTIVE, SOLVERS
from l2d_jax.distributed import processes, runtime
from l2d_jax.errors import InputError
from l2d_jax.files import output_folder
from l2d_jax.loading import find, load
from l2d_jax.model.llm import LLM
from l2d_jax.weights import model_folder

CHANGES = ("budget", "solver", "tolerance")  # options that are settings of decoding
HARNESS = ("num_fewshot", "limit", "apply_chat_template", "confirm_run_unsafe_code")  # options that it takes
LIMITS = ("draws", "batch_size", "max_new_tokens", "seed")


def main() -> None:
    """Parse the command line, open the tasks, load the model, then ask and report."""
    options = _parse()
    try:
        from l2d_jax.evaluation.lm_eval_model import HarnessOptions, LmEvalModel, parse_generation, require_tokenizer
    except ImportError as error:
        raise InputError(f"lm-evaluation-harness cannot be imported ({error}): pip install '.[lm-eval]'") from None
    import lm_eval
    from lm_eval.utils import handle_non_serializable, make_table

    folder = find(options.workdir or options.model, dtype=options.dtype)
    changes = {name: value for name in CHANGES if (value := getattr(options, name)) is not None}
    settings = override_settings(folder.defaults, changes)
    scoring = dataclasses.replace(settings, budget=1, solver="euler") if options.likelihood == "base" else settings
    check_budget(settings, has_path=folder.path_config is not None)
    asked = HarnessOptions(settings, scoring, **{name: getattr(options, name) for name in LIMITS})
    runtime.start_jax(MeshConfig())
    base = processes.take_turns(lambda: model_folder.find_base(folder.base))
    kv_heads = base.architecture.num_key_value_heads
    mesh = runtime.start_decoding(MeshConfig(), rows=options.batch_size, kv_heads=kv_heads)
    tokenizer = require_tokenizer(base.tokenizer)
    length = min(options.max_new_tokens or 1, base.architecture.max_position_embeddings)
    limited = dataclasses.replace(settings, max_new_tokens=length)
    llm = LLM.declare(base.architecture, dtype=folder.base.dtype)
    check_decoding_memory(llm, folder.path_config, limited, rows=options.batch_size, longest=1, remedy="--batch_size")
    if options.apply_chat_template:
        require_chat_template(tokenizer)
    names = options.tasks.split(",")
    manager = open_tasks(names, options.include_path)
    tasks = manager.load(names)["tasks"].values()
    for task in tasks:
        if task.OUTPUT_TYPE == "generate_until":
            parse_generation(task.config.generation_kwargs or {}, asked)
    unsafe = [task.task_name for task in tasks if getattr(task, "UNSAFE_CODE", False)]
    require(
        options.confirm_run_unsafe_code or not unsafe,
        f"{', '.join(unsafe)} runs programs that the model writes, without isolation: take `python -m "
        "l2d_jax.evaluate`, which has a sandbox, or allow it with --confirm_run_unsafe_code",
    )
    with output_folder(options.out) if processes.is_first() else contextlib.nullcontext() as out:
        loaded = load(options.workdir or options.model, mesh=mesh, dtype=options.dtype)
        model = LmEvalModel(loaded, options=asked)
        given = {name: getattr(options, name) for name in HARNESS}
        results: dict[str, Any] = lm_eval.simple_evaluate(model, tasks=names, task_manager=manager, **given)
        results["config"] |= {"model": str(folder.path), "step": loaded.step, "likelihood": options.likelihood}
        results["config"] |= asked._asdict() | {"settings": vars(settings), "scoring": vars(scoring)}
        if out is not None:
            dump = partial(json.dumps, default=handle_non_serializable)
            samples = [{"task": name, **row} for name, rows in results.pop("samples", {}).items() for row in rows]
            (out / "samples.jsonl").write_text("".join(dump(sample) + "\n" for sample in samples))
            (out / "results.json").write_text(dump(results, indent=2) + "\n")
    for column in ("results", "groups"):
        if results.get(column):
            processes.print_once(make_table(results, column))


def _parse() -> argparse.Namespace:
    parser = command_line.Parser(prog="python -m l2d_jax.lm_eval", description=__doc__)
    command_line.add_source(parser)
    parser.add_argument("--dtype", choices=["float32", "bfloat16", "int8"], help="of weights and products")
    parser.add_argument("--tasks", required=True, help="names of tasks and groups of them, with commas between them")
    parser.add_argument("--out", type=command_line.folder_or_bucket, required=True, help="a new folder for the results")
    of_tasks = parser.add_argument_group("tasks")
    folder = "a folder of task files (YAML), given once or more; they come before the harness's own"
    of_tasks.add_argument("--include_path", type=command_line.local_path, action="append", default=[], help=folder)
    of_tasks.add_argument("--limit", type="Count", help="use the first N examples of each task; None: all")
    of_tasks.add_argument("--num_fewshot", type="CountOrZero", help="examples before each question; None: the task's")
    of_tasks.add_argument("--apply_chat_template", action="store_true", help="write prompts as conversations")
    of_tasks.add_argument("--confirm_run_unsafe_code", action="store_true", help="run programs without any isolation")
    asking = parser.add_argument_group("decoding and likelihoods")
    asking.add_argument("--budget", type="Budget", help="evaluations of the path per token; 1: the base model")
    asking.add_argument("--solver", choices=SOLVERS, help="how the path is integrated")
    asking.add_argument("--tolerance", type="Tolerance", help=f"of each step of {', '.join(ADAPTIVE)}")
    asking.add_argument("--likelihood", choices=["path", "base"], default="path", help="base: the language model alone")
    asking.add_argument("--draws", type="SeveralDraws", default=8, help="noise samples for each likelihood")
    asking.add_argument("--max_new_tokens", type="Tokens", help="the longest answer, in tokens; None: the task's")
    asking.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, on all devices together")
    asking.add_argument("--seed", type="Seed", default=0, help="of the noise and of the sampled tokens")
    return parser.parse_args()


def open_tasks(names: list[str], folders: list[Path]) -> Any:
    """A manager that has opened tasks and groups with their data, once; raises `InputError` for what it cannot open."""
    from lm_eval.tasks import TaskManager

    for folder in folders:
        require(folder.is_dir(), f"--include_path {folder} is not a folder: give one with task files")
    manager = TaskManager(include_path=[str(folder) for folder in folders], include_defaults=False)
    if not set(names) <= set(manager.all_subtasks):  # to index the harness's own takes several seconds
        manager = TaskManager(include_path=[str(folder) for folder in folders])
    unknown = next((name for name in names if name not in manager.all_tasks), None)
    if unknown is not None:
        near = nearest(unknown, manager.all_tasks)
        if "did you mean" not in near:
            near = ": `lm_eval ls tasks` lists them; --include_path adds a folder's"
        raise InputError(f"no task {unknown!r}{near}")
    try:
        opened = manager.load(names)
    except Exception as error:  # a task is a program of its own, and reads its data from anywhere
        raise InputError(f"the tasks {', '.join(names)} cannot be opened: {first_line(error)}") from error
    manager.load = lambda _: opened
    return manager


if __name__ == "__main__":
    command_line.run(main)
