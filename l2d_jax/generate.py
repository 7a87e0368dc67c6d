"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

import argparse
import dataclasses
from pathlib import Path

from l2d_jax import command_line, models
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.generation import (
    Restrictions,
    StopSearch,
    check_prompts,
    check_settings,
    encode_prompt,
    stream_text,
)
from l2d_jax.loaded import Loaded, find, load
from l2d_jax.rules import ADAPTIVE, SOLVERS

AMPLE = 512  # evaluations a token, at most: for an adaptive solver that is given no budget


def main() -> None:
    """Parse the command line, load the model, then answer once or until the end of input."""
    parser = command_line.Parser(prog="python -m l2d_jax.generate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=Path, help="a workdir of training: its newest checkpoint answers")
    source.add_argument("--model", help="a model folder, a hub id or a GGUF file; without a path the budget is 1")
    parser.add_argument("--prompt", action="append", help="a message to answer, given once or more; without it, a chat")
    parser.add_argument(
        "--budget",
        type=int,
        nargs="+",
        help="evaluations of the path per token, the final one included; several compare; adaptive solvers: at most",
    )
    parser.add_argument("--solver", choices=SOLVERS, help="how the path is integrated")
    parser.add_argument("--tolerance", type=float, help=f"of each step of {', '.join(ADAPTIVE)}")
    parser.add_argument("--temperature", type=float, help="of the final draw; 0: arg max")
    parser.add_argument("--top_k", type=int, help="draw from so many of the likeliest tokens")
    parser.add_argument(
        "--top_p", type=float, help="draw from the likeliest tokens that together reach this probability"
    )
    parser.add_argument("--draws", type=int, help="noise draws whose mean distribution is the answer's")
    parser.add_argument(
        "--gate", type=float, help="skip the ODE where the model alone is surer than this entropy, in nats"
    )
    parser.add_argument("--stop", action="append", default=[], help="a text that ends an answer, given once or more")
    parser.add_argument("--max_new_tokens", type=int, help="at most so many tokens an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the draws")
    options = parser.parse_args()
    if options.workdir and not (options.workdir / "checkpoints").is_dir():
        raise InputError(f"{options.workdir} is no workdir of training: it has no checkpoints folder")
    found = find(options.workdir or options.model)
    prompts, several = options.prompt or [], len(options.prompt or []) * len(options.budget or [0]) > 1
    if options.prompt is None and len(options.budget or []) > 1:
        raise InputError("a chat has one budget: give one, or a --prompt to compare several on")
    variants = [choose(found.defaults, options, budget=budget) for budget in options.budget or [None]]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts or [""]]
    base = models.find_base(found.base)
    for settings in variants:
        check_settings(settings, has_path=found.has_path)
        check_prompts(
            [encode_prompt(messages, base.tokenizer) for messages in conversations], settings, base.architecture
        )
    stops = Restrictions(stops=options.stop)
    StopSearch(options.stop, base.tokenizer, 0)  # raises before any weight is read
    loaded = load(options.workdir or options.model)
    if options.prompt is None:
        chat(loaded, variants[0], seed=options.seed, restrictions=stops)
    for prompt, messages in zip(prompts, conversations, strict=False):
        for settings in variants:
            if several:
                print(f"\n[budget {settings.budget}] {prompt}")
            answer(loaded, messages, settings, seed=options.seed, restrictions=stops)


def choose(defaults: DecodeConfig, options: argparse.Namespace, *, budget: int | None) -> DecodeConfig:
    """The model's own settings with those of the command line; raises `InputError`."""
    names = {f.name for f in dataclasses.fields(DecodeConfig)} - {"budget"}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    if budget is None:
        budget = AMPLE if given.get("solver") in ADAPTIVE else defaults.budget
    return dataclasses.replace(defaults, **given, budget=budget)


def answer(
    loaded: Loaded, messages: list[dict[str, str]], settings: DecodeConfig, *, seed: int, restrictions: Restrictions
) -> str:
    """Print an answer as it comes, and return it."""
    text = ""
    for piece in stream_text(loaded, messages, settings=settings, seed=seed, restrictions=restrictions):
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def chat(loaded: Loaded, settings: DecodeConfig, *, seed: int, restrictions: Restrictions) -> None:
    """Answer line by line, keeping the conversation, until an empty line or the end of input."""
    messages: list[dict[str, str]] = []
    print(f"budget {settings.budget}, {settings.solver}; an empty line ends the chat")
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            print()
            return
        if not text:
            return
        messages.append({"role": "user", "content": text})
        text = answer(loaded, messages, settings, seed=seed + len(messages), restrictions=restrictions)
        messages.append({"role": "assistant", "content": text})


if __name__ == "__main__":
    command_line.run(main)
