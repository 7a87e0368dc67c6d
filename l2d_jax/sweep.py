"""Draws the paper's figures for a path: `python -m l2d_jax.sweep --workdir DIR --tasks gsm8k,mmlu`.

They show the accuracy of free answers against the budget and against the t at which the diffusion stops, accuracy
against t within one diffusion (on the tokens of right answers), and the evaluations that an adaptive solver takes on
each task. With `--label` they show accuracy against the strength of guidance, by task and by category. Ends and
strengths are varied at the largest budget.
"""

from l2d_jax import command_line, console
from l2d_jax.config.config_file import override_names
from l2d_jax.errors import require
from l2d_jax.evaluate import add_arguments, parse_arguments

BUDGETS = [1, 3, 7, 15, 31]
ENDS = [0.2, 0.4, 0.6, 0.8, 1.0]
STRENGTHS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0]


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("sweep", description=__doc__)
    ends = f"values of t at which the diffusion of free answers stops (default: {ENDS})"
    parser.add_argument("--ends", type="End", nargs="+", help=ends)
    parser.add_argument("--strengths", type="Strength", nargs="+", help=f"strengths of guidance (default: {STRENGTHS})")
    add_arguments(parser)
    parser.set_defaults(tune=None, tune_problems=None)  # a sweep compares values, and chooses none
    return parser


def main() -> None:
    """Parse the command line, evaluate, trace right answers, and report."""
    options, config = parse_arguments(make_parser())
    if "budget" not in override_names(options.overrides, "decode") and options.total_budget is None:
        options.budget = options.budget or BUDGETS
    is_varied = options.strengths is None or options.label is not None
    require(is_varied, "--strengths are of the guidance by a class: give a --label, or leave them out")
    has_end = "end" in override_names(options.overrides, "decode") or (config is not None and config.decode.end != 1)
    rule = "--ends and config.decode.end both say where the diffusion stops: leave one of them out"
    require(not (has_end and options.ends), rule)
    options.ends = [] if has_end else options.ends or ENDS
    options.strengths = options.strengths or STRENGTHS
    with console.starting():
        from l2d_jax.programs import sweep
    sweep.run(options, config)


if __name__ == "__main__":
    command_line.run(main)
