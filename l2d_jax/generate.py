"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

from argparse import Namespace

from l2d_jax import command_line, console
from l2d_jax.config.choices import ADAPTIVE_SOLVERS, SEARCH_OPTIONS, SOLVER_NAMES
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
    parser.add_argument(
        "--prompt", action="append", help="a message to answer; give it once or more; without it, a chat begins"
    )
    parser.add_argument("--max_new_tokens", type="Tokens", help="the longest answer, in tokens")
    parser.add_argument("--seed", type="Seed", default=0, help="seed of the noise and of the sampled tokens")
    group = parser.add_argument_group("the refinement of each token")
    budget = "evaluations of the path per token, with the final one; several values are compared; adaptive: the most"
    group.add_argument("--budget", type="Budget", nargs="+", help=budget)
    group.add_argument("--solver", choices=SOLVER_NAMES, help="how the path is integrated")
    group.add_argument("--tolerance", type="Tolerance", help=f"error of each step, for {', '.join(ADAPTIVE_SOLVERS)}")
    group.add_argument("--label", type="Label", help="class for guidance, for a path that was trained with classes")
    group.add_argument("--guidance", type="Strength", help="strength of the guidance; at 1, the class alone counts")
    group.add_argument("--gate", type="Nats", help="skip the ODE where the LM alone has an entropy below this, in nats")
    parallel = "evaluate side by side where it is faster, wherever possible, or never; the answer is the same"
    group.add_argument("--parallel", choices=["auto", "on", "off"], help=parallel)
    group = parser.add_argument_group("sampling of each token")
    group.add_argument(
        "--temperature", type="Temperature", help="temperature of the sampled tokens; at 0, the likeliest token"
    )
    group.add_argument("--top_k", type="CountOrZero", help="sample from this number of likeliest tokens")
    group.add_argument(
        "--top_p", type="TopP", help="sample from the likeliest tokens that together reach this probability"
    )
    group.add_argument("--draws", type="Draws", help="noise samples per token, whose distributions are averaged")
    group.add_argument("--stop", action="append", default=[], help="a text or a special token that ends an answer")
    group = parser.add_argument_group("search over tokens, for the best of several answers")
    group.add_argument("--beams", type="Beams", help="partial answers to keep; each token costs one budget per beam")
    group.add_argument(
        "--candidates",
        type="Count",
        help="tokens to try after each beam, drawn at --temperature, which is then 1 by default",
    )
    group.add_argument(
        "--length_power", type="Power", help="divide a beam's score by its number of tokens to this power"
    )
    group.add_argument(
        "--repetition_penalty", type="Nats", help="nats to take off a beam's score for each repeated trigram"
    )
    trace = "a new folder for trace.jsonl and trace.html, which show the evaluations of each token"
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
