"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

from argparse import Namespace

from l2d_jax import command_line, console
from l2d_jax.config.choices import ADAPTIVE_SOLVERS, DTYPES, SEARCH_OPTIONS, SOLVER_NAMES
from l2d_jax.errors import InputError, require


def main() -> None:
    """Parse the command line, load the model, then answer once or until the end of input."""
    options = make_parser().parse_args()
    _check_asked(options)
    with console.starting():
        from l2d_jax.programs import generate
    generate.run(options)


def make_parser() -> command_line.Parser:
    """The options of the program."""
    parser = command_line.Parser("generate", description=__doc__)
    command_line.add_source(parser)
    parser.add_argument("--prompt", action="append", help="a message to answer; without one, a chat begins")
    parser.add_argument("--max_new_tokens", type="Tokens", help="the longest answer, in tokens")
    parser.add_argument("--dtype", choices=DTYPES, help="type of weights and products")
    parser.add_argument("--seed", type="Seed", default=0, help="seed of the noise and of the sampled tokens")
    group = parser.add_argument_group("the refinement of each token")
    budget = "evaluations of the path per token, including the final one; several compare; adaptive solvers: at most"
    group.add_argument("--budget", type="Budget", nargs="+", help=budget)
    group.add_argument("--solver", choices=SOLVER_NAMES, help="method that integrates the ODE")
    end = "time t at which the ODE stops, for the final evaluation; adaptive solvers stop at 1 - 1/sigma at the latest"
    group.add_argument("--end", type="End", help=end)
    group.add_argument("--tolerance", type="Tolerance", help=f"error of a step of {', '.join(ADAPTIVE_SOLVERS)}")
    group.add_argument("--label", type="Label", help="class for guidance, for a path that was trained with classes")
    group.add_argument("--guidance", type="Strength", help="strength of the guidance; at 1, the class alone counts")
    group.add_argument("--gate", type="Nats", help="skip the ODE where the LM alone has an entropy below this, in nats")
    parallel = (
        "evaluations side by side: if that is faster, whenever possible, or never; the answer is the same. check: in "
        "the program of on, but each pass accepts only one evaluation"
    )
    group.add_argument("--parallel", choices=["auto", "on", "off", "check"], help=parallel)
    group = parser.add_argument_group("sampling of each token")
    group.add_argument("--temperature", type="Temperature", help="temperature of the tokens; 0: arg max")
    group.add_argument("--top_k", type="CountOrZero", help="sample from this number of likeliest tokens; 0: all")
    group.add_argument("--top_p", type="TopP", help="sample from the likeliest tokens with this total probability")
    group.add_argument("--draws", type="Draws", help="noise samples per token; their mean distribution counts")
    group.add_argument("--stop", action="append", default=[], help="a text or a special token that ends an answer")
    command_line.add_search(parser, temperature="--temperature (default: 1)", has_total=False)
    trace = "a new folder for trace.jsonl and trace.html, which show what each token took"
    parser.add_argument("--trace", type=command_line.folder_or_bucket, help=trace)
    return parser


def _check_asked(options: Namespace) -> None:
    """Raise `InputError` for options that do not go together."""
    if options.workdir and not (options.workdir / "checkpoints").is_dir():
        raise InputError(f"{options.workdir} is no workdir of training: it has no checkpoints folder")
    is_chat = not options.prompt
    is_single = not is_chat or len(options.budget or []) <= 1
    require(is_single, "a chat has one budget: give one, or a --prompt to compare several on")
    require(not (is_chat and options.trace), "a trace is of answers to prompts, not of a chat: give a --prompt")
    for name in SEARCH_OPTIONS if options.beams is None else ():
        require(getattr(options, name) is None, f"--{name} is an option of token search: give --beams too")
    for what, is_there in {"a chat": is_chat, "--stop": options.stop, "--trace": options.trace}.items():
        require(options.beams is None or not is_there, f"{what} does not go with --beams: leave one out")


if __name__ == "__main__":
    command_line.run(main)
