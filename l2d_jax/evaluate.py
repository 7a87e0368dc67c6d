"""Evaluates a model on the paper's tasks: `python -m l2d_jax.evaluate --workdir DIR --tasks gsm8k,mmlu --budget 1 15`.

Results go to `DIR/eval/<task>/<solver>-<budget>/`. `samples.jsonl` has a line per problem with prompt, completions,
extracted answers and scores. `results.json` has the scores of the task. The same command again resumes.

`--suite paper` evaluates the six tasks of the paper's main table, estimates the time, and writes the table to
`DIR/eval/suite.json`. A command evaluates one model. For several, give the command for each of them, and then
`python -m l2d_jax.report --workdir DIR DIR ...`, which shows all rows in one table.
"""

import argparse

from l2d_jax import command_line, console
from l2d_jax.command_line import file_name, folder_or_bucket, model_name
from l2d_jax.config import config_file, ranges
from l2d_jax.config.choices import (
    DTYPES,
    LIKELIHOOD_DRAWS,
    SEARCH_OPTIONS,
    SOLVER_NAMES,
    TUNED_OPTIONS,
    TUNED_PROBLEMS,
    suite_tasks,
    task_names,
)
from l2d_jax.config.schema import Config
from l2d_jax.errors import require

SECTIONS = ("decode", "mesh")  # of a config that are read
OF_MODEL = ("model.name", "model.tokenizer", "model.chat_template")  # besides, where a config is given


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("evaluate", description=__doc__)
    add_arguments(parser)
    add_tuning(parser)
    return parser


def main() -> None:
    """Parse the command line, open the model, and evaluate."""
    options, config = parse_arguments(make_parser())
    with console.starting():
        from l2d_jax.programs import evaluate
    evaluate.run(options, config)


def add_arguments(parser: command_line.Parser) -> None:
    """Add the options of an evaluation, which `sweep` takes too."""
    command_line.add_source(parser)
    config = f"config for the sections decode and mesh, instead of that of the workdir; {config_file.CONFIG_HELP}"
    parser.add_argument("--config", help=config)
    tasks = parser.add_mutually_exclusive_group(required=True)
    tasks.add_argument("--tasks", help=f"tasks, with commas between them: {', '.join(task_names())}")
    suite = "the six tasks of the paper's main table, or all nine of the paper, with one table of results"
    tasks.add_argument("--suite", choices=[*suite_tasks()], help=suite)
    parser.add_argument("--out", type=folder_or_bucket, help="folder for the results; None: DIR/eval of the workdir")
    parser.add_argument(
        "--name",
        type=file_name,
        help="name of the results folder in the folder of a task; None: `<solver>-<budget>` and what else differs",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of weights and products")
    problems = parser.add_argument_group("problems")
    problems.add_argument(
        "--data_dir",
        type=model_name,
        help="folder with `<task>/<split>.jsonl` or another format, read instead of the hub",
    )
    problems.add_argument("--split", type=file_name, help="split of the tasks; None: the split of the paper")
    problems.add_argument("--limit", type="Count", help="number of problems, evenly spaced; None: all")
    problems.add_argument(
        "--shots", type="CountOrZero", help="examples before each question; None: as many as in the paper"
    )
    problems.add_argument(
        "--prompts",
        choices=["paper", "thoughts", "reasoning"],
        default="paper",
        help="prompts of the paper; thoughts: prompts that ask for thoughts first; reasoning: no examples, "
        "for models that think at length, with 4096 tokens at temperature 0.6 and top-p 0.95, and --tagged",
    )
    problems.add_argument(
        "--tagged", action="store_true", help="judge only what `<answer>` tags hold or what follows `</think>`"
    )
    choices = (
        "multiple choice: generate an answer, as in the paper, or compare the likelihoods of the letters in one pass"
    )
    problems.add_argument("--choices", choices=["generate", "likelihood"], default="generate", help=choices)
    problems.add_argument(
        "--allow_code_execution", action="store_true", help="run generated programs, each one isolated"
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument("--budget", type="Budget", nargs="+", help="evaluations of the path per token")
    decoding.add_argument("--solver", choices=SOLVER_NAMES, help="method that integrates the ODE")
    decoding.add_argument("--tolerance", type="Tolerance", help="error of a step of an adaptive solver")
    decoding.add_argument("--label", type=class_label, help="class for guidance; category: the class of each problem")
    decoding.add_argument("--guidance", type="Strength", help="strength of the guidance; 1: the class alone")
    decoding.add_argument(
        "--temperature", type="Temperature", help="temperature of the tokens; 0: arg max; None: that of the task"
    )
    decoding.add_argument(
        "--max_new_tokens", type="Tokens", help="longest completion, in tokens; None: that of the task"
    )
    decoding.add_argument("--samples", type="Rows", help="completions of each problem; None: as many as the task takes")
    draws = f"noise samples per token, with --choices likelihood; None: {LIKELIHOOD_DRAWS}"
    decoding.add_argument("--draws", type="SeveralDraws", help=draws)
    decoding.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, over all devices")
    decoding.add_argument("--seed", type="Seed", default=0, help="seed of the noise and of the sampled tokens")
    command_line.add_search(parser, temperature="--temperature or that of the task")


def add_tuning(parser: command_line.Parser) -> None:
    """Add the options that choose others on held-out problems."""
    tuning = parser.add_argument_group("options chosen on held-out problems")
    names = ", ".join(f"--{name}" for name in TUNED_OPTIONS)
    tuning.add_argument(
        "--tune",
        nargs="+",
        choices=["guidance", "search"],
        help=f"choose the guidance, or {names}, for each category, by the strict score on held-out problems",
    )
    count = f"held-out problems of each category, evenly spaced; None: {TUNED_PROBLEMS}"
    tuning.add_argument("--tune_problems", type="Count", help=count)


def parse_arguments(parser: command_line.Parser) -> tuple[argparse.Namespace, Config | None]:
    """The options, and the config if the command line names one; raises `InputError`."""
    options, rest = parser.parse_known_args()
    options.overrides = config_file.split_overrides(rest)
    if options.suite is not None:
        options.tasks = ",".join(suite_tasks()[options.suite])
    for name in options.overrides:
        is_read = name.partition(".")[0] in SECTIONS or (name in OF_MODEL and options.config is not None)
        remedy = "use --dtype" if name == "model.dtype" else "leave it out"
        rule = f"only the sections {' and '.join(SECTIONS)} are read, and with --config {', '.join(OF_MODEL)}"
        require(is_read, f"--config.{name} changes nothing here, {rule}: {remedy}")
    require(bool(options.workdir or options.out), "--model, or a hub id, needs --out DIR, for the results")
    _check_search(options)
    _check_tuning(options)
    return options, None if options.config is None else config_file.read_config(options.config, options.overrides)


def _check_search(options: argparse.Namespace) -> None:
    """Raise `InputError` for options of token search that have no effect or do not go together."""
    if options.beams is None:
        for name in (*SEARCH_OPTIONS, "total_budget"):
            require(getattr(options, name) is None, f"--{name} is an option of token search: give --beams too")
        return
    problem = "--choices likelihood generates no answer, so --beams changes nothing"
    require(options.choices != "likelihood", f"{problem}: leave one of them out")
    both = options.budget is not None and options.total_budget is not None
    require(not both, "--budget is per beam, --total_budget is for all beams: leave one of them out")
    few = f"--batch_size {options.batch_size} does not hold the {options.beams} beams of a search"
    require(options.batch_size >= options.beams, f"{few}: use {options.beams} or more")


def _check_tuning(options: argparse.Namespace) -> None:
    """Raise `InputError` for options of `--tune` that have no effect or do not go together."""
    parts = options.tune or ()
    is_used = bool(parts) or options.tune_problems is None
    require(is_used, "--tune_problems is the number of problems for --tune: give both, or neither")
    require("guidance" not in parts or options.label is not None, "--tune guidance needs a class: give --label too")
    require("search" not in parts or options.beams is not None, "--tune search needs a search: give --beams too")
    for name in TUNED_OPTIONS if "search" in parts else ():
        rule = f"--tune search chooses --{name}, which is given as well: leave one of them out"
        require(getattr(options, name) is None, rule)


def class_label(text: str) -> int | float | str:
    """The value of `--label`: "category", or the number of a class."""
    try:
        return text if text == "category" else command_line.number(ranges.Label, text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f'must be "category" or a class: {error}') from None


if __name__ == "__main__":
    command_line.run(main)
