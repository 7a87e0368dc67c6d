"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

import argparse
import contextlib
import dataclasses
from pathlib import Path

from l2d_jax import command_line, generation, models, trace_page
from l2d_jax.architecture import Architecture
from l2d_jax.beams import SearchConfig
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.files import output_folder
from l2d_jax.generation import (
    Restrictions,
    StopSearch,
    check_prompts,
    check_settings,
    encode_prompt,
    stream_text,
    to_text,
)
from l2d_jax.loaded import Loaded, find, load
from l2d_jax.rules import ADAPTIVE, SOLVERS
from l2d_jax.search import check_search, search
from l2d_jax.trace import TokenTrace, check_draws, trace

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
    parser.add_argument(
        "--trace", type=Path, help="a new folder for what each token of the answers took: trace.jsonl and trace.html"
    )
    add_search(parser)
    options = parser.parse_args()
    if options.workdir and not (options.workdir / "checkpoints").is_dir():
        raise InputError(f"{options.workdir} is no workdir of training: it has no checkpoints folder")
    found = find(options.workdir or options.model)
    prompts, several = options.prompt or [], len(options.prompt or []) * len(options.budget or [0]) > 1
    if options.prompt is None and len(options.budget or []) > 1:
        raise InputError("a chat has one budget: give one, or a --prompt to compare several on")
    if options.prompt is None and options.trace:
        raise InputError("a trace is of answers to prompts, not of a chat: give a --prompt")
    variants = [choose(found.defaults, options, budget=budget) for budget in options.budget or [None]]
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts or [""]]
    base = models.find_base(found.base)
    for settings in variants:
        check_settings(settings, has_path=found.has_path)
        if options.trace:
            check_draws(settings)
        check_prompts(
            [encode_prompt(messages, base.tokenizer) for messages in conversations], settings, base.architecture
        )
    config = choose_search(options, variants, architecture=base.architecture)
    stops = Restrictions(stops=options.stop)
    StopSearch(options.stop, base.tokenizer, 0)  # raises before any weight is read
    with output_folder(options.trace) if options.trace else contextlib.nullcontext() as folder:
        loaded, traces = load(options.workdir or options.model), []
        if options.prompt is None:
            chat(loaded, variants[0], seed=options.seed, restrictions=stops)
        for number, (prompt, messages) in enumerate(zip(prompts, conversations, strict=False)):
            for settings in variants:
                if several:
                    print(f"\n[budget {settings.budget}] {prompt}")
                if folder is None:
                    answer(loaded, messages, settings, seed=options.seed, restrictions=stops, config=config)
                    continue
                tokens = answer_traced(loaded, messages, settings, seed=options.seed, restrictions=stops)
                traces.append(trace_page.AnswerTrace(number, prompt, settings, tokens))
        if folder is not None:
            trace_page.write(folder, traces)


def choose(defaults: DecodeConfig, options: argparse.Namespace, *, budget: int | None) -> DecodeConfig:
    """The model's own settings with those of the command line; raises `InputError`."""
    names = {f.name for f in dataclasses.fields(DecodeConfig)} - {"budget"}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    if budget is None:
        budget = AMPLE if given.get("solver") in ADAPTIVE else defaults.budget
    return dataclasses.replace(defaults, **given, budget=budget)


def add_search(parser: argparse.ArgumentParser) -> None:
    """The options of token search."""
    parser.add_argument(
        "--beams", type=int, help="search over tokens, keeping so many answers, and print the best; each has the budget"
    )
    parser.add_argument(
        "--candidates", type=int, help="tokens that are sampled to go on with each beam, at --temperature or else 1"
    )
    parser.add_argument("--length_power", type=float, help="a beam's score is divided by its tokens to this power")
    parser.add_argument("--repetition_penalty", type=float, help="nats of a beam's score that a repeated trigram costs")


def choose_search(
    options: argparse.Namespace, variants: list[DecodeConfig], *, architecture: Architecture
) -> SearchConfig | None:
    """The search of the command line, None without one; raises `InputError`."""
    names = ("beams", "candidates", "length_power", "repetition_penalty", "temperature")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    if options.beams is None:
        for name in [name for name in names[1:4] if name in given]:
            raise InputError(f"--{name} is an option of token search: give --beams too")
        return None
    for what, is_there in [("a chat", options.prompt is None), ("--stop", options.stop), ("--trace", options.trace)]:
        if is_there:
            raise InputError(f"{what} does not go with --beams, whose answer is known at the end alone: leave one out")
    config = SearchConfig(**given, max_new_tokens=variants[0].max_new_tokens)
    for settings in variants:
        check_search(settings, config, architecture=architecture)
    return config


def answer(
    loaded: Loaded,
    messages: list[dict[str, str]],
    settings: DecodeConfig,
    *,
    seed: int,
    restrictions: Restrictions,
    config: SearchConfig | None = None,
) -> str:
    """Print an answer as it comes, or that of a search once it is known, and return it."""
    text = ""
    if config is not None:
        prompt = encode_prompt(messages, loaded.tokenizer)
        text = to_text(search(loaded, prompt, settings=settings, config=config, seed=seed).answer, loaded.tokenizer)
        print(text, flush=True)
        return text
    for piece in stream_text(loaded, messages, settings=settings, seed=seed, restrictions=restrictions):
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def answer_traced(
    loaded: Loaded, messages: list[dict[str, str]], settings: DecodeConfig, *, seed: int, restrictions: Restrictions
) -> list[TokenTrace]:
    """Print an answer once it is complete, and return what its tokens took."""
    prompt = encode_prompt(messages, loaded.tokenizer)
    [ids] = generation.generate(loaded, [prompt], settings=settings, seed=seed, restrictions=restrictions)
    print(to_text(ids, loaded.tokenizer), flush=True)
    return trace(loaded, [prompt], [ids], settings=settings, seed=seed)[0]


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
