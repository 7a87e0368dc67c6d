"""Answers prompts, or chats."""

import contextlib
import dataclasses
import itertools
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from l2d_jax import command_line
from l2d_jax.config.choices import SEARCH_OPTIONS
from l2d_jax.config.schema import DecodeConfig, MeshConfig
from l2d_jax.data.messages import Message
from l2d_jax.data.tokenizer import prompt_ids, require_tokenizer
from l2d_jax.decoding import requests
from l2d_jax.decoding.generation import generate_answers, make_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.requests import Prompt, Request, Restrictions
from l2d_jax.decoding.search.beam_search import check_search, search
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.decoding.trace import TokenTrace, check_single_sample, trace
from l2d_jax.distributed import runtime
from l2d_jax.loading import find, load
from l2d_jax.model.llm import LLM
from l2d_jax.reports.trace import AnswerTrace, write_trace
from l2d_jax.storage.partial import output_folder


def run(options: Namespace) -> None:
    """Load the model, then answer once or until the end of input."""
    folder = find(options.workdir or options.model, dtype=options.dtype, **command_line.tokenizer_options(options))
    given = {name: value for name, value in vars(options).items() if value is not None}
    names = given.keys() & {field.name for field in dataclasses.fields(DecodeConfig)} - {"budget"}
    changes = {name: given[name] for name in names}
    budgets = [{}] if options.budget is None else [{"budget": budget} for budget in options.budget]
    variants = [requests.override_settings(folder.defaults, changes | budget) for budget in budgets]
    searched = None
    if options.beams is not None:
        chosen = {name: given[name] for name in ("beams", *SEARCH_OPTIONS, "temperature") if name in given}
        searched = SearchConfig(**chosen, max_new_tokens=variants[0].max_new_tokens)
    prompts = options.prompt or []
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts or [""]]
    base = folder.find_base()
    ids = [prompt_ids(messages, require_tokenizer(base.tokenizer)) for messages in conversations]
    numbered, restrictions = requests.number_prompts(ids, labels=[options.label] * len(ids)), Restrictions(options.stop)
    asked = names if options.label is None else {*names, "label"}
    for settings in variants:  # raises before any weights are read
        request = Request(numbered, settings, options.seed, restrictions=restrictions, tokenizer=base.tokenizer)
        make_answers(request, base.architecture, folder.path_config)
        if options.trace:
            check_single_sample(settings)
    requests.check_asked(asked, variants, folder.path_config, has_label=options.label is not None)
    runtime.start_jax(MeshConfig())
    mesh = runtime.start_decoding(MeshConfig(), rows=1, kv_heads=base.architecture.num_key_value_heads)
    llm, longest = LLM.declare(base.architecture, dtype=folder.base.dtype), max(map(len, ids))
    for settings in variants:
        remedy = "--draws or --max_new_tokens"
        check_decoding_memory(llm, folder.path_config, settings, rows=1, longest=longest, remedy=remedy)
        if searched is not None:
            check_search(settings, searched, llm, folder.path_config, longest=longest)
    with output_folder(options.trace) if options.trace else contextlib.nullcontext() as out:
        loaded = load(
            options.workdir or options.model, mesh=mesh, dtype=options.dtype, **command_line.tokenizer_options(options)
        )
        answer = partial(_print_answer, loaded, options, searched=searched)
        if not prompts:
            _chat(answer, variants[0], seed=options.seed)
            return
        traces = []
        for (number, prompt), settings in itertools.product(enumerate(prompts), variants):
            if len(prompts) * len(variants) > 1:
                print(f"\n[budget {settings.budget}] {prompt}")
            _, tokens = answer(messages=conversations[number], settings=settings, seed=options.seed)
            traces.append(AnswerTrace(number, prompt, settings, tokens))
        if out is not None:
            write_trace(out, traces)


def _print_answer(
    loaded: LoadedModel,
    options: Namespace,
    *,
    searched: SearchConfig | None,
    messages: Sequence[Message],
    settings: DecodeConfig,
    seed: int,
) -> tuple[str, list[TokenTrace]]:
    """Print an answer, piece by piece unless it is traced or searched, and return it with its trace, if any."""
    if searched is None and not options.trace:
        text = ""
        for piece in loaded.stream(messages, settings=settings, seed=seed, label=options.label, stop=options.stop):
            print(piece, end="", flush=True)
            text += piece
        print()
        return text, []
    prompt, tokens = Prompt(0, prompt_ids(messages, require_tokenizer(loaded.tokenizer)), options.label), []
    if searched is None:
        request = Request([prompt], settings, seed, 1, 0, Restrictions(options.stop), loaded.stop_ids, loaded.tokenizer)
        [(ids, rest)] = generate_answers(loaded.decoder, request)
        [tokens] = trace(loaded, request, [ids])
    else:
        ids, rest = search(loaded, prompt, settings=settings, config=searched, seed=seed).answer, ""
    text = to_text(ids, loaded.tokenizer) + rest
    print(text, flush=True)
    return text, tokens


def _chat(answer: Callable[..., tuple[str, Any]], settings: DecodeConfig, *, seed: int) -> None:
    """Answer line by line, keeping the conversation, until an empty line or the end of input."""
    messages: list[dict[str, str]] = []
    print(f"budget {settings.budget}, {settings.solver}; an empty line ends the chat")
    with contextlib.suppress(EOFError):
        while text := input("> ").strip():
            messages.append({"role": "user", "content": text})
            said, _ = answer(messages=messages, settings=settings, seed=seed + len(messages))
            messages.append({"role": "assistant", "content": said})
        return
    print()
