"""Token search: the paper's beam search over tokens. The authors released no code for it.

Every step samples tokens to extend each beam, and keeps the best beams. The answer is sampled from the final beams.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.generation import broken_logits, group_size, make_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.requests import (
    UNRESTRICTED,
    Answer,
    Prompt,
    Request,
    Restrictions,
    path_config,
)
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.search.search_lanes import Beam, EndedSearch, SearchLanes
from l2d_jax.errors import require
from l2d_jax.model import diffusion
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM


class SearchResult(NamedTuple):
    """The answer of a search, the beams from which it was sampled, and the cost of all beams."""

    answer: list[int]  # token ids without the stop token
    beams: list[Beam]  # best first; the answer is one of them
    tokens: int = 0  # number of tokens of the answer, including its stop token
    evaluations: int = 0  # evaluations of the path by all beams
    passes: int = 0  # passes over the weights, counted for each running beam


def search(
    loaded: LoadedModel,
    prompt: Prompt,
    *,
    settings: DecodeConfig | None = None,
    config: SearchConfig | None = None,
    seed: int = 0,
    restrictions: Restrictions = UNRESTRICTED,
) -> SearchResult:
    """Search for an answer to one prompt; raises `InputError` as `search_prompts` does."""
    settings = loaded.defaults if settings is None else settings
    asked = {"guidance"} if settings.guidance != loaded.defaults.guidance else set[str]()  # it needs a label
    request = Request([prompt], settings, seed, restrictions=restrictions, stop_ids=loaded.stop_ids, asked=asked)
    found = search_prompts(loaded.decoder, request, SearchConfig() if config is None else config)
    [[result]] = [results for ended in found for results in ended.values()]
    return result


def search_prompts(
    model: Model, request: Request, config: SearchConfig, *, lanes: int | None = None
) -> Iterator[dict[int, list[SearchResult]]]:
    """Search for answers to the prompts of a request; yields the results of finished prompts, by their numbers.

    There are `request.samples` results for each prompt. Each is a search with the noise that an ordinary sample has. At
    most `lanes` searches (None: all) run at a time. When one ends, its lane goes to the next prompt, the longest first.
    In float32 a result does not depend on the number of lanes, except for ties.

    The budget is per beam. Temperature and length come from `config`, and those of the request are ignored.
    Likelihoods are normalised over the allowed tokens.
    Raises `InputError` as `decode_lanes` does, and for more candidates than tokens in the vocabulary, for top-k or
    top-p (they would change the likelihood that is searched), for stop strings and grammars (they cannot end a beam),
    and for settings of single prompts. Prompts whose logits were NaN are left out, and an error names them at the end.
    """
    ordered = sorted(request.prompts, key=lambda prompt: -len(prompt.ids))
    if not ordered:
        return
    count, restrictions = len(ordered) * request.samples, request.restrictions
    lanes = min(lanes or count, count)
    path, longest = path_config(model), len(ordered[0].ids) - request.prefix
    check_search(request.settings, config, model.llm, path, longest=longest, lanes=lanes, searches=count)
    require(not restrictions.stops, f"a search takes no stop strings, got {restrictions.stops}: cut its answer instead")
    require(restrictions.grammar is None, "a search takes no response_format: leave it out")
    require(not restrictions.has_penalties, "a search takes no penalties and no logit_bias: leave them out")
    rule = "the prompts of a search share their settings: use a separate call for other settings"
    require(all(prompt.settings is None for prompt in ordered), rule)
    length, temperature = config.max_new_tokens, config.temperature
    settings = dataclasses.replace(request.settings, max_new_tokens=length, temperature=temperature)
    request = dataclasses.replace(request, prompts=ordered, settings=settings)
    answers = make_answers(request, model.llm.architecture, path)
    opened = SearchLanes(model.reading(refines=settings.budget > 1), request, config, lanes=lanes)
    found: dict[int, list[EndedSearch]] = {}
    broken = set[int]()
    for ended in _run(opened, answers, lanes=lanes):
        number = ended.answer.prompt.number
        several = found.setdefault(number, [])
        several.append(ended)
        broken |= set() if ended.beams else {number}
        if len(several) == request.samples and number not in broken:
            several = sorted(found.pop(number), key=lambda one: one.answer.copy)
            yield {number: [_result(one, config.final_temperature) for one in several]}
    if broken:
        raise broken_logits(broken)


def _run(opened: SearchLanes, answers: Sequence[Answer], *, lanes: int) -> Iterator[EndedSearch]:
    """Search for all answers, in their order; yields each search when it has ended."""
    group = group_size(lanes)
    opened.admit(answers[:lanes], group=group)
    waiting = answers[lanes:]
    while not opened.is_idle:
        yield from opened.step()
        while waiting and opened.free >= min(group, len(waiting)):
            opened.admit(waiting[:group], group=group)
            waiting = waiting[group:]


def _result(ended: EndedSearch, temperature: float) -> SearchResult:
    seed, number, copy = ended.answer.seed, ended.answer.prompt.number, ended.answer.copy
    chosen = draw_answer(ended.beams, seed=seed, number=number, copy=copy, temperature=temperature)
    return SearchResult(
        answer=chosen.ids,
        beams=ended.beams,
        tokens=len(chosen.ids) + chosen.is_ended,
        evaluations=ended.evaluations,
        passes=ended.passes,
    )


def draw_answer(beams: Sequence[Beam], *, seed: int, number: int, copy: int, temperature: float) -> Beam:
    """Sample the answer among the final beams, in proportion to exp(score / temperature); 0: the best beam."""
    key = jax.random.fold_in(jax.random.key(seed), 1)
    if number or copy:  # a search for the only answer to the first prompt has always used the key above
        key = jax.random.fold_in(jax.random.fold_in(key, number), copy)
    place = diffusion.sample_token(key, jnp.float32([beam.score for beam in beams]), jnp.float32(temperature))
    return beams[int(place)]


def check_search(
    settings: DecodeConfig,
    config: SearchConfig,
    llm: LLM,
    path: PathConfig | None,
    *,
    longest: int,
    lanes: int = 1,
    searches: int = 1,
) -> None:
    """Raise `InputError` if the search is impossible, or needs too much memory after prompts of `longest` tokens.

    `llm` may have declared weights, without values. `lanes` of the `searches` run at a time.
    """
    size, top_k, top_p = llm.architecture.vocab_size, settings.top_k, settings.top_p
    problem = f"search.candidates {config.candidates} exceed the {size} tokens of the model"
    require(config.candidates <= size, f"{problem}: take at most {size}")
    rule = "a search compares likelihoods over all tokens: set top_k to 0 and top_p to 1"
    require(top_k == 0 and top_p == 1, f"{rule}, got {top_k} and {top_p}")
    settings = dataclasses.replace(settings, max_new_tokens=config.max_new_tokens)
    prompts = lanes + (group_size(lanes) if lanes < searches else 0)  # and those that are being read
    sizes = {"rows": prompts * config.beams, "longest": longest, "candidates": config.candidates}
    remedy = "--beams, --candidates or --max_new_tokens"
    remedy = f"--batch_size, {remedy}" if lanes > 1 else remedy
    check_decoding_memory(llm, path, settings, **sizes, remedy=remedy)
