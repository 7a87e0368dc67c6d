"""Token search: the paper's beam search over tokens, of which the authors released nothing.

Every step samples completions of each beam and keeps the best of all; the answer is drawn from the last ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import decode
from l2d_jax.decoding.beams import Beams, Scoring, SearchConfig, extend, start
from l2d_jax.decoding.buckets import pad
from l2d_jax.decoding.generation import CHUNK, FREE, Loaded, Restrictions, check_classes, check_prompts, check_settings
from l2d_jax.decoding.refine import tabulate
from l2d_jax.decoding.sampler import allow
from l2d_jax.errors import InputError
from l2d_jax.model import diffusion
from l2d_jax.model.architecture import Architecture


class Beam(NamedTuple):
    """One answer of a search."""

    ids: list[int]  # without the end token
    score: float
    log_likelihood: float  # in nats, of the end token too
    repeats: int
    is_ended: bool  # by an end token; otherwise by its length


class Found(NamedTuple):
    """What a search has found."""

    answer: list[int]  # token ids without the end token
    beams: list[Beam]  # the best first; the answer is one of them


def search(
    loaded: Loaded,
    prompt: Sequence[int],
    *,
    settings: DecodeConfig | None = None,
    config: SearchConfig | None = None,
    seed: int = 0,
    label: int | None = None,
    restrictions: Restrictions = FREE,
) -> Found:
    """Search an answer to one prompt of token ids.

    Args:
      loaded: from `load`.
      prompt: token ids.
      settings: budget of each beam, solver, velocity, draws and gate; None: the model's own. Its final temperature and
        length are not used: those of the search are.
      config: of the search; None: the defaults.
      seed: of the noise and the draws; the noise is that of the first sequence of `generate`.
      label: class for guidance.
      restrictions: tokens that may or may not be drawn; likelihoods are those among the tokens that may.

    Raises:
      InputError: as `generate` does; for more candidates than tokens; for top-k or top-p, which would change the
        likelihood that is searched; and for stop strings, which end no beam.
    """
    settings = loaded.defaults if settings is None else settings
    config = SearchConfig() if config is None else config
    model = loaded.model
    architecture = model.llm.architecture
    check_search(settings, config, architecture=architecture)
    refinement = check_settings(settings, has_path=model.path is not None)
    check_prompts([prompt], dataclasses.replace(settings, max_new_tokens=config.max_new_tokens), architecture)
    labels = None if label is None else [label]
    check_classes(model, labels, prompts=1)
    if restrictions.stops:
        raise InputError(f"a search knows no stop strings, got {restrictions.stops}: cut its answer instead")
    mask = allow(architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
    key, chunks = jax.random.key(seed), -(-config.max_new_tokens // CHUNK)
    ids, lengths = pad([prompt])
    state = decode.prefill(model.llm, ids, lengths, jax.random.fold_in(key, 0)[None], room=chunks * CHUNK)
    beams = start(state, beams=config.beams, room=chunks * CHUNK)
    refinement = tabulate(model, refinement, budget=settings.budget)
    scoring = Scoring.from_config(config, ends=loaded.ends, gate=settings.gate, allowed=mask)
    for _ in range(chunks):
        beams = extend(
            model,
            beams,
            settings=refinement,
            scoring=scoring,
            candidates=config.candidates,
            steps=CHUNK,
            draws=settings.draws,
            label=None if label is None else jnp.int32([label]),
        )
        if beams.state.broken.any():
            raise InputError("logits of the search were not numbers: check the weights, or use float32")
        if beams.state.done.all():
            break
    found = _read(beams, scoring, loaded.ends)
    scores = jnp.float32([beam.score for beam in found])
    drawn = diffusion.sample(jax.random.fold_in(key, 1), scores, jnp.float32(config.final_temperature))
    return Found(answer=found[int(drawn)].ids, beams=found)


def check_search(settings: DecodeConfig, config: SearchConfig, *, architecture: Architecture) -> None:
    """Raise `InputError` for what a search of this model cannot do."""
    if config.candidates > architecture.vocab_size:
        raise InputError(
            f"search.candidates {config.candidates} exceed the {architecture.vocab_size} tokens of the model: "
            f"take at most {architecture.vocab_size}"
        )
    if settings.top_k > 0 or settings.top_p < 1:
        raise InputError(
            f"a search compares likelihoods over all tokens: set top_k to 0 and top_p to 1, got {settings.top_k} and "
            f"{settings.top_p}"
        )


def _read(beams: Beams, scoring: Scoring, ends: Sequence[int]) -> list[Beam]:
    """The beams that are there, the best first."""
    scores = scoring.score(beams.log_likelihood, beams.repeats, beams.lengths)
    columns = jax.device_get((beams.tokens, beams.lengths, scores, beams.log_likelihood, beams.repeats))
    found = []
    for tokens, length, score, likelihood, repeats in zip(*columns, strict=True):
        if np.isfinite(likelihood):
            ids = tokens[:length].tolist()
            is_ended = ids[-1] in ends
            found.append(Beam(ids[:-1] if is_ended else ids, float(score), float(likelihood), int(repeats), is_ended))
    return sorted(found, key=lambda beam: beam.score, reverse=True)
