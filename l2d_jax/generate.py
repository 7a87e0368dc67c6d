"""Answers a prompt, or chats: `python -m l2d_jax.generate --workdir DIR --prompt "…" --budget 15`."""

import argparse
import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from l2d_jax import command_line
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import generation
from l2d_jax.decoding.beam_search import check_search, search
from l2d_jax.decoding.beams import SearchConfig
from l2d_jax.decoding.generation import Loaded, Restrictions, check_prompts, check_settings, encode_prompt, stream_text
from l2d_jax.decoding.solver import ADAPTIVE, AMPLE, SOLVERS
from l2d_jax.decoding.stop_strings import StopSearch, to_text
from l2d_jax.decoding.trace import TokenTrace, check_draws, trace
from l2d_jax.errors import InputError
from l2d_jax.files import output_folder
from l2d_jax.loading import find, load
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.l2d import check_labels
from l2d_jax.reports.trace import AnswerTrace, write_trace
from l2d_jax.weights import model_folder

Messages = Sequence[dict[str, str]]


@runtime_checkable
class Answer(Protocol):
    """Prints the answer to a conversation, and returns it."""

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Raises `InputError` as `generation.stream` does."""
        ...


@dataclass(frozen=True)
class Streamed:
    """Prints text as it comes."""

    restrictions: Restrictions
    label: int | None  # class for guidance

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        text = ""
        options = {"settings": settings, "seed": seed, "label": self.label}
        for piece in stream_text(loaded, messages, restrictions=self.restrictions, **options):  # type: ignore[arg-type]
            print(piece, end="", flush=True)
            text += piece
        print()
        return text


@dataclass(frozen=True)
class Traced:
    """Prints the whole answer, and keeps what each of its tokens took."""

    restrictions: Restrictions
    label: int | None
    traces: list[list[TokenTrace]] = field(default_factory=list)  # of all answers so far

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        prompts = [encode_prompt(messages, loaded.tokenizer)]
        labels = None if self.label is None else [self.label]
        answers = generation.generate(
            loaded, prompts, settings=settings, seed=seed, labels=labels, restrictions=self.restrictions
        )
        self.traces.extend(trace(loaded, prompts, answers, settings=settings, seed=seed, labels=labels))
        return _show(loaded, answers[0])


@dataclass(frozen=True)
class Searched:
    """Prints the best answer of a search."""

    config: SearchConfig
    label: int | None

    def __call__(self, loaded: Loaded, messages: Messages, settings: DecodeConfig, *, seed: int) -> str:
        """Print and return the answer."""
        prompt = encode_prompt(messages, loaded.tokenizer)
        found = search(loaded, prompt, settings=settings, config=self.config, seed=seed, label=self.label)
        return _show(loaded, found.answer)


def _show(loaded: Loaded, ids: Sequence[int]) -> str:
    text = to_text(ids, loaded.tokenizer)
    print(text, flush=True)
    return text


OF_SEARCH = ("candidates", "length_power", "repetition_penalty")  # options that go with --beams alone


def main() -> None:
    """Parse the command line, load the model, then answer once or until the end of input."""
    options = parse()
    found = find(options.workdir or options.model)
    variants = [choose(found.defaults, options, budget=budget) for budget in options.budget or [None]]
    prompts = options.prompt or []
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts or [""]]
    base = model_folder.find_base(found.base)
    ids = [encode_prompt(messages, base.tokenizer) for messages in conversations]
    for settings in variants:
        check_settings(settings, has_path=found.path_config is not None)
        check_prompts(ids, settings, base.architecture)
    check_labels(found.path_config, [] if options.label is None else [options.label])
    StopSearch(options.stop, base.tokenizer, 0)  # raises before any weight is read
    answer = choose_answer(options, variants, architecture=base.architecture)
    with output_folder(options.trace) if options.trace else contextlib.nullcontext() as folder:
        loaded = load(options.workdir or options.model)
        if not prompts:
            chat(loaded, answer, variants[0], seed=options.seed)
            return
        asked = [(number, settings) for number in range(len(prompts)) for settings in variants]
        for number, settings in asked:
            if len(asked) > 1:
                print(f"\n[budget {settings.budget}] {prompts[number]}")
            answer(loaded, conversations[number], settings, seed=options.seed)
        if folder is not None and isinstance(answer, Traced):
            traced = zip(asked, answer.traces, strict=True)
            write_trace(folder, [AnswerTrace(n, prompts[n], s, tokens) for (n, s), tokens in traced])


def parse() -> argparse.Namespace:
    """The command line; raises `InputError` for options that do not go together."""
    parser = command_line.Parser(prog="python -m l2d_jax.generate", description=__doc__)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--workdir", type=command_line.local_path, help="a workdir of training: its newest checkpoint answers"
    )
    source.add_argument("--model", help="a model folder, a hub id or a GGUF file; without a path the budget is 1")
    parser.add_argument("--prompt", action="append", help="a message to answer, given once or more; without it, a chat")
    parser.add_argument("--max_new_tokens", type=int, help="at most so many tokens an answer")
    parser.add_argument("--seed", type=int, default=0, help="of the noise and the draws")
    refining = parser.add_argument_group("the refinement of each token")
    refining.add_argument(
        "--budget",
        type=int,
        nargs="+",
        help="evaluations of the path per token, the final one included; several compare; adaptive solvers: at most",
    )
    refining.add_argument("--solver", choices=SOLVERS, help="how the path is integrated")
    refining.add_argument("--tolerance", type=float, help=f"of each step of {', '.join(ADAPTIVE)}")
    refining.add_argument("--label", type=int, help="class for guidance, for a path that was trained with classes")
    refining.add_argument("--guidance", type=float, help="its strength; 1: the class alone")
    gate = "skip the ODE where the model alone is surer than this entropy, in nats"
    refining.add_argument("--gate", type=float, help=gate)
    drawing = parser.add_argument_group("the draw of each token")
    drawing.add_argument("--temperature", type=float, help="of the final draw; 0: arg max")
    drawing.add_argument("--top_k", type=int, help="draw from so many of the likeliest tokens")
    top_p = "draw from the likeliest tokens that together reach this probability"
    drawing.add_argument("--top_p", type=float, help=top_p)
    drawing.add_argument("--draws", type=int, help="noise draws whose mean distribution is the answer's")
    stop = "a text that ends an answer, given once or more"
    drawing.add_argument("--stop", action="append", default=[], help=stop)
    searching = parser.add_argument_group("search over tokens, for the best of several answers")
    searching.add_argument("--beams", type=int, help="answers that are kept; each token costs so many budgets")
    candidates = "tokens that are sampled to go on with each beam, at --temperature or else 1"
    searching.add_argument("--candidates", type=int, help=candidates)
    searching.add_argument("--length_power", type=float, help="a beam's score is divided by its tokens to this power")
    penalty = "nats of a beam's score that a repeated trigram costs"
    searching.add_argument("--repetition_penalty", type=float, help=penalty)
    trace = "a new folder for what each token of the answers took: trace.jsonl and trace.html"
    parser.add_argument("--trace", type=command_line.local_path, help=trace)
    options = parser.parse_args()
    if options.workdir and not (options.workdir / "checkpoints").is_dir():
        raise InputError(f"{options.workdir} is no workdir of training: it has no checkpoints folder")
    if options.prompt is None and len(options.budget or []) > 1:
        raise InputError("a chat has one budget: give one, or a --prompt to compare several on")
    if options.prompt is None and options.trace:
        raise InputError("a trace is of answers to prompts, not of a chat: give a --prompt")
    return options


def choose(defaults: DecodeConfig, options: argparse.Namespace, *, budget: int | None) -> DecodeConfig:
    """The model's own settings with those of the command line; raises `InputError`."""
    names = {f.name for f in dataclasses.fields(DecodeConfig)} - {"budget"}
    given = {name: value for name, value in vars(options).items() if name in names and value is not None}
    if budget is None:
        budget = AMPLE if given.get("solver") in ADAPTIVE else defaults.budget
    return dataclasses.replace(defaults, **given, budget=budget)


def choose_answer(options: argparse.Namespace, variants: list[DecodeConfig], *, architecture: Architecture) -> Answer:
    """How to answer; raises `InputError` for options that do not go together."""
    if options.beams is None:
        for name in OF_SEARCH:
            if getattr(options, name) is not None:
                raise InputError(f"--{name} is an option of token search: give --beams too")
        restrictions = Restrictions(stops=options.stop)
        if not options.trace:
            return Streamed(restrictions, options.label)
        for settings in variants:
            check_draws(settings)
        return Traced(restrictions, options.label)
    others = {"a chat": not options.prompt, "--stop": options.stop, "--trace": options.trace}
    for what, is_there in others.items():
        if is_there:
            raise InputError(f"{what} does not go with --beams: leave one out")
    names = ("beams", *OF_SEARCH, "temperature")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    config = SearchConfig(**given, max_new_tokens=variants[0].max_new_tokens)
    for settings in variants:
        check_search(settings, config, architecture=architecture)
    return Searched(config, options.label)


def chat(loaded: Loaded, answer: Answer, settings: DecodeConfig, *, seed: int) -> None:
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
