"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

import argparse
import dataclasses
from pathlib import Path

from l2d_jax import command_line, models
from l2d_jax.config import DecodeConfig
from l2d_jax.errors import InputError
from l2d_jax.generation import check_prompts, check_settings, encode_prompt, stream_text
from l2d_jax.loaded import Loaded, find, load
from l2d_jax.solvers import SOLVERS


def main() -> None:
    """Parse the command line, load the model, then answer once or until the end of input."""
    parser = command_line.Parser(prog="python -m l2d_jax.generate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--workdir", type=Path, help="a workdir of training: its newest checkpoint answers")
    source.add_argument("--model", help="a model folder, a hub id or a GGUF file; without a path the budget is 1")
    parser.add_argument("--prompt", help="one message to answer; without it, a chat")
    parser.add_argument("--budget", type=int, help="evaluations of the path per token, the final one included")
    parser.add_argument("--solver", choices=list(SOLVERS), help="how the path is integrated")
    parser.add_argument("--temperature", type=float, help="of the final draw; 0: arg max")
    parser.add_argument("--max_new_tokens", type=int, help="at most so many tokens an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the draws")
    options = parser.parse_args()
    if options.workdir and not (options.workdir / "checkpoints").is_dir():
        raise InputError(f"{options.workdir} is no workdir of training: it has no checkpoints folder")
    found = find(options.workdir or options.model)
    settings = choose(found.defaults, options)
    check_settings(settings, has_path=found.has_path)
    messages = [{"role": "user", "content": options.prompt or ""}]
    base = models.find_base(found.base)
    check_prompts([encode_prompt(messages, base.tokenizer)], settings, base.architecture)
    loaded = load(options.workdir or options.model)
    if options.prompt is not None:
        answer(loaded, messages, settings, seed=options.seed)
    else:
        chat(loaded, settings, seed=options.seed)


def choose(defaults: DecodeConfig, options: argparse.Namespace) -> DecodeConfig:
    """The model's own settings with those of the command line; raises `InputError`."""
    names = {f.name for f in dataclasses.fields(DecodeConfig)}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    return dataclasses.replace(defaults, **given)


def answer(loaded: Loaded, messages: list[dict[str, str]], settings: DecodeConfig, *, seed: int) -> str:
    """Print an answer as it comes, and return it."""
    text = ""
    for piece in stream_text(loaded, messages, settings=settings, seed=seed):
        print(piece, end="", flush=True)
        text += piece
    print()
    return text


def chat(loaded: Loaded, settings: DecodeConfig, *, seed: int) -> None:
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
        messages.append({"role": "assistant", "content": answer(loaded, messages, settings, seed=seed + len(messages))})


if __name__ == "__main__":
    command_line.run(main)
