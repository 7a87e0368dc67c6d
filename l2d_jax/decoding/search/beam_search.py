"""Token search: the paper's beam search over tokens. The authors released no code for it.

Every step samples tokens to extend each beam, and keeps the best beams. The answer is sampled from the final beams.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.buckets import CHUNK, answer_slots, sample_bucket
from l2d_jax.decoding.generation import open_lanes
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import UNRESTRICTED, Prompt, Request, Restrictions, check_decoding_memory, path_config
from l2d_jax.decoding.search.beams import Beams, Scoring, SearchConfig, extend, start_beams
from l2d_jax.errors import InputError, require
from l2d_jax.model import diffusion
from l2d_jax.model.llm import LLM


class Beam(NamedTuple):
    """One answer of a search."""

    ids: list[int]  # without the stop token
    score: float
    log_likelihood: float  # in nats, including the stop token
    repeats: int  # number of repeated n-grams
    is_ended: bool  # True: ended by a stop token; False: by its length


class SearchResult(NamedTuple):
    """The answer of a search, and the beams from which it was sampled."""

    answer: list[int]  # token ids without the stop token
    beams: list[Beam]  # best first; the answer is one of them


def search(
    loaded: LoadedModel,
    prompt: Prompt,
    *,
    settings: DecodeConfig | None = None,
    config: SearchConfig | None = None,
    seed: int = 0,
    restrictions: Restrictions = UNRESTRICTED,
) -> SearchResult:
    """Search for an answer to one prompt. A seed gives the same noise as in `generate_tokens`.

    The budget is per beam. Temperature and length come from `config`, and those of `settings` are ignored. Likelihoods
    are normalised over the allowed tokens.
    Raises `InputError` as `generate_tokens` does, and for more candidates than tokens in the vocabulary, for top-k or
    top-p (they would change the likelihood that is searched), and for stop strings (they cannot end a beam).
    """
    settings = loaded.defaults if settings is None else settings
    given = {"guidance"} if settings.guidance != loaded.defaults.guidance else set[str]()  # it needs a label
    config = SearchConfig() if config is None else config
    check_search(settings, config, loaded.model.llm, path_config(loaded.model), longest=len(prompt.ids))
    require(not restrictions.stops, f"a search takes no stop strings, got {restrictions.stops}: cut its answer instead")
    require(not restrictions.has_penalties, "a search takes no penalties and no logit_bias: leave them out")
    asked = dataclasses.replace(settings, max_new_tokens=config.max_new_tokens, temperature=config.temperature)
    request = Request([prompt], asked, seed, restrictions=restrictions, asked=given)
    lanes, [answer] = open_lanes(loaded.decoder, request)
    options = lanes.options(answer, rows=config.beams)
    capacity = answer_slots(config.max_new_tokens)
    beams = start_beams(lanes.read([answer]), beams=config.beams, capacity=capacity)
    scoring = Scoring.from_config(config, loaded.stop_ids, options.sampling)
    draws = sample_bucket(settings.draws)
    chosen: dict[str, Any] = {"candidates": config.candidates, "draws": draws, "label": options.labels}
    for _ in range(capacity // CHUNK):
        beams = extend(lanes.model, beams, settings=options.settings, scoring=scoring, steps=CHUNK, **chosen)
        if beams.state.broken.any():
            raise InputError("logits of the search were not numbers: check the weights, or use float32")
        if beams.state.done.all():
            break
    best = _read_beams(beams, scoring, loaded.stop_ids)
    scores, key = jnp.float32([beam.score for beam in best]), jax.random.fold_in(jax.random.key(seed), 1)
    place = diffusion.sample_token(key, scores, jnp.float32(config.final_temperature))
    return SearchResult(answer=best[int(place)].ids, beams=best)


def check_search(
    settings: DecodeConfig, config: SearchConfig, llm: LLM, path: PathConfig | None, *, longest: int
) -> None:
    """Raise `InputError` if the search is impossible, or needs too much memory after a prompt of `longest` tokens.

    `llm` may have declared weights, without values.
    """
    size, top_k, top_p = llm.architecture.vocab_size, settings.top_k, settings.top_p
    problem = f"search.candidates {config.candidates} exceed the {size} tokens of the model"
    require(config.candidates <= size, f"{problem}: take at most {size}")
    rule = "a search compares likelihoods over all tokens: set top_k to 0 and top_p to 1"
    require(top_k == 0 and top_p == 1, f"{rule}, got {top_k} and {top_p}")
    settings = dataclasses.replace(settings, max_new_tokens=config.max_new_tokens)
    sizes = {"rows": config.beams, "longest": longest, "candidates": config.candidates}
    check_decoding_memory(llm, path, settings, **sizes, remedy="--beams, --candidates or --max_new_tokens")


def _read_beams(beams: Beams, scoring: Scoring, stop_ids: Sequence[int]) -> list[Beam]:
    """The beams, best first, without empty slots."""
    scores = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
    columns = jax.device_get((beams.tokens, beams.lengths, scores, beams.log_likelihood, beams.repeats))
    answers = []
    for tokens, length, score, likelihood, repeats in zip(*columns, strict=True):
        if np.isfinite(likelihood):
            ids = tokens[:length].tolist()
            is_ended = ids[-1] in stop_ids
            answers.append(Beam(ids[:-1] if is_ended else ids, float(score), float(likelihood), int(repeats), is_ended))
    return sorted(answers, key=lambda beam: beam.score, reverse=True)
