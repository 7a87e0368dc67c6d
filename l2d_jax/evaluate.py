"""Evaluates a model on the paper's tasks: `python -m l2d_jax.evaluate --workdir DIR --tasks gsm8k,mmlu --budget 1 15`.

Results go to `DIR/eval/<task>/<solver>-<budget>/`. `samples.jsonl` has a line per problem, with its prompt,
completions, extracted answers and scores; `results.json` has the figures. The same command again continues where it
stopped.
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
    config = f"config whose decode and mesh sections replace those of the workdir: {config_file.CONFIG_HELP}"
    parser.add_argument("--config", help=config)
    parser.add_argument("--tasks", required=True, help=f"tasks, separated by commas: {', '.join(task_names())}")
    parser.add_argument("--out", type=folder_or_bucket, help="folder for the results; default: DIR/eval of the workdir")
    parser.add_argument(
        "--name",
        type=file_name,
        help="name of the folder of results within the task's; default: <solver>-<budget> and what else differs",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="type of the weights and the products")
    problems = parser.add_argument_group("problems")
    problems.add_argument("--data_dir", type=model_name, help="read rows from <data_dir>/<task>, such as <split>.jsonl")
    problems.add_argument("--split", type=file_name, help="split of the data set; default: the paper's")
    problems.add_argument("--limit", type="Count", help="number of problems, evenly spaced; default: all")
    problems.add_argument("--shots", type="CountOrZero", help="examples before each question; default: as in the paper")
    problems.add_argument(
        "--prompts",
        choices=["paper", "thoughts"],
        default="paper",
        help="wording of the prompts; thoughts: ask the model to think first",
    )
    problems.add_argument(
        "--tagged", action="store_true", help="judge only the text in <answer> tags or after </think>"
    )
    choices = "how multiple choice is answered; likelihood: by the likeliest letter in one pass, unlike the paper"
    problems.add_argument("--choices", choices=["generate", "likelihood"], default="generate", help=choices)
    problems.add_argument(
        "--allow_code_execution", action="store_true", help="run generated programs, each in a sandbox"
    )
    decoding = parser.add_argument_group("decoding")
    decoding.add_argument(
        "--budget",
        type="Budget",
        nargs="+",
        help="evaluations of the path per token; several values are evaluated in turn",
    )
    decoding.add_argument("--solver", choices=SOLVER_NAMES, help="how the path is integrated")
    decoding.add_argument("--tolerance", type="Tolerance", help="error of each step of an adaptive solver")
    decoding.add_argument(
        "--label", type=class_label, help="class for guidance, a number; or category: the class of each problem"
    )
    decoding.add_argument("--guidance", type="Strength", help="strength of the guidance; at 1, the class alone counts")
    decoding.add_argument(
        "--temperature",
        type="Temperature",
        help="temperature of the sampled tokens; at 0, the likeliest token; default: the task's",
    )
    decoding.add_argument("--max_new_tokens", type="Tokens", help="longest completion; default: the task's")
    decoding.add_argument("--samples", type="Rows", help="completions of each problem; default: the task's")
    draws = f"noise samples, with --choices likelihood; default: {LIKELIHOOD_DRAWS}"
    decoding.add_argument("--draws", type="SeveralDraws", help=draws)
    decoding.add_argument("--batch_size", type="Rows", default=16, help="sequences at a time, over all devices")
    decoding.add_argument("--seed", type="Seed", default=0, help="seed of the noise and of the sampled tokens")


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
