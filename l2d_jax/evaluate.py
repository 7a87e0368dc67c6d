"""Evaluates a model on the paper's tasks: `python -m l2d_jax.evaluate --workdir DIR --tasks gsm8k,mmlu --budget 1 15`.

Results go to `DIR/eval/<task>/<solver>-<budget>/`: `samples.jsonl` has a line per problem with prompt, completions,
extracted answers and scores, and `results.json` has the figures. The same command again continues where it stopped.
"""

import argparse

from l2d_jax import command_line, console
from l2d_jax.command_line import file_name, folder_or_bucket, model_name
from l2d_jax.config import config_file, ranges
from l2d_jax.config.choices import DTYPES, LIKELIHOOD_DRAWS, SOLVER_NAMES, task_names
from l2d_jax.config.schema import Config
from l2d_jax.errors import require

SECTIONS = ("decode", "mesh")  # of a config that are read
OF_MODEL = ("model.name", "model.tokenizer", "model.chat_template")  # besides, where a config is given


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("evaluate", description=__doc__)
    add_arguments(parser)
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
    config = f"for its decode and mesh sections, in place of the workdir's decode; {config_file.CONFIG_HELP}"
    parser.add_argument("--config", help=config)
    parser.add_argument("--tasks", required=True, help=f"with commas between them: {', '.join(task_names())}")
    parser.add_argument("--out", type=folder_or_bucket, help="where results go; DIR/eval of a workdir")
    parser.add_argument("--name", type=file_name, help="of the folder within a task's; <solver>-<budget> and others")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and products")
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
    decoding.add_argument("--solver", choices=SOLVER_NAMES, help="how the path is integrated")
    decoding.add_argument("--tolerance", type="Tolerance", help="of each step of an adaptive solver")
    decoding.add_argument("--label", type=class_label, help="class for guidance, or category: each problem's own")
    decoding.add_argument("--guidance", type="Strength", help="its strength; 1: the class alone")
    decoding.add_argument("--temperature", type="Temperature", help="of the final draw; None: the task's; 0: arg max")
    decoding.add_argument("--max_new_tokens", type="Tokens", help="of a completion; None: the task's")
    decoding.add_argument("--samples", type="Rows", help="completions of each problem; None: the task's")
    draws = f"noise samples, with --choices likelihood; None: {LIKELIHOOD_DRAWS}"
    decoding.add_argument("--draws", type="SeveralDraws", help=draws)
    decoding.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, on all devices together")
    decoding.add_argument("--seed", type="Seed", default=0, help="of the noise and the draws")


def parse_arguments(parser: command_line.Parser) -> tuple[argparse.Namespace, Config | None]:
    """The options, and the config if the command line names one; raises `InputError`."""
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


if __name__ == "__main__":
    command_line.run(main)
