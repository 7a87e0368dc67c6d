"""Compares models on the same held-out answers: `python -m l2d_jax.study --config FILE --out DIR --models NAME=MODEL`.

A model is a workdir, a model folder, a hub id or a GGUF file. Each token of an answer is predicted from the true tokens
before it, by the language model alone (a budget of 1) and, if there is a path, with each solver at each budget. The
measurements of a model are kept in `DIR/NAME.json`: the same command again measures only models without such a file.
Gains are over the first model.

With `--answers N`, N problems whose answers end in `#### x` are also answered from the prompt alone: greedily at each
budget, by the majority of samples, and by beam search. A figure shows their accuracy against the compute per answer.
"""

from argparse import ArgumentTypeError, Namespace

from l2d_jax import command_line, console
from l2d_jax.command_line import file_name, folder_or_bucket, model_name
from l2d_jax.config import config_file
from l2d_jax.config.choices import ADAPTIVE_SOLVERS, SOLVER_NAMES
from l2d_jax.config.config_file import override_names
from l2d_jax.errors import require

BUDGETS = [1, 3, 7, 15, 31]
INSTEAD = {  # what stands for options of `DecodeConfig`, which a study chooses itself
    "solver": "use --solvers",
    "budget": "use --budgets",
    "guidance": "held-out answers have no label; leave it out",
    "temperature": "answers are greedy, and the samples of a majority have their own; leave it out",
    "max_new_tokens": "answers are as long as the right ones may be; leave it out",
}
BUDGETS_HELP = "evaluations per token; a solver that cannot spend a budget takes the next smaller one that it can spend"


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("study", description=__doc__)
    parser.add_argument(
        "--models",
        nargs="+",
        type=_named,
        metavar="NAME=MODEL",
        required=True,
        help="models to compare, with a name for each",
    )
    parser.add_argument(
        "--config", required=True, help=f"config for data, decoding and dtype; {config_file.CONFIG_HELP}"
    )
    parser.add_argument("--out", type=folder_or_bucket, required=True, help="folder for the results")
    parser.add_argument(
        "--split", type=file_name, help="split of the answers; None: the validation split of the config"
    )
    parser.add_argument(
        "--solvers", nargs="+", choices=SOLVER_NAMES, default=["midpoint"], help="solvers for models with a path"
    )
    parser.add_argument("--budgets", nargs="+", type="Budget", help=f"{BUDGETS_HELP}; None: {BUDGETS}")
    parser.add_argument(
        "--answers", type="CountOrZero", default=0, help="number of problems to answer from the prompt alone; 0: none"
    )
    parser.add_argument(
        "--samples", nargs="+", type="Draws", default=[], help="numbers of samples whose majority is the answer"
    )
    parser.add_argument("--beams", nargs="+", type="Beams", default=[], help="numbers of beams for beam search")
    return parser


def main() -> None:
    """Parse the command line, measure every model, and compare."""
    options, config = make_parser().parse_with_config()
    _check_asked(options)
    options.budgets = options.budgets or BUDGETS
    names = [name for name, _ in options.models]
    require(len(set(names)) == len(names), f"each model needs a different name, got {', '.join(names)}")
    with console.starting():
        from l2d_jax.programs import study
    study.run(options, config)


def _check_asked(options: Namespace) -> None:
    """Raise `InputError` for an option that was given, and that nothing here depends on."""
    overrides = override_names(options.overrides, "decode")
    for name, remedy in INSTEAD.items():
        require(name not in overrides, f"--config.decode.{name} changes nothing here: {remedy}")
    fixed = [solver for solver in options.solvers if solver not in ADAPTIVE_SOLVERS]
    rule = f"--config.decode.tolerance is for adaptive solvers ({', '.join(ADAPTIVE_SOLVERS)})"
    require("tolerance" not in overrides or fixed != options.solvers, f"{rule}: name one, or leave it out")
    rule = "an adaptive solver spends what its tolerance asks for, whatever the --budgets"
    require(fixed != [] or options.budgets is None, f"{rule}: leave them out, or name a solver with fixed steps")
    if options.answers:
        first = options.solvers[0]
        require(first in fixed, f"--answers are compared by what a budget costs: name another solver before {first}")
        return
    given = [f"--{name}" for name in ("samples", "beams") if getattr(options, name)]
    given += [f"--config.decode.{name}" for name in ("top_k", "top_p", "draws", "gate") if name in overrides]
    require(not given, f"{', '.join(given)} belong to free answers: give --answers too, or leave them out")


def _named(text: str) -> tuple[str, str]:
    name, _, model = text.partition("=")
    if not (model and name.isidentifier()):
        raise ArgumentTypeError(f"{text!r} is not NAME=MODEL, such as base=Qwen/Qwen2.5-7B-Instruct")
    return file_name(name), model_name(model)


if __name__ == "__main__":
    command_line.run(main)
