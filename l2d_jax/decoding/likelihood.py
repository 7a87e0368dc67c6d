"""Probabilities of given answers: what one run of the ODE does not say, and the mean over several does.

An answer's logits depend on the noise that it was refined from. The model's probability of a token is the mean over
that noise, which the mean of several draws estimates without bias; draws are independent from token to token, so that
the product over an answer's tokens is unbiased too. Its logarithm is not: it is low by about half its squared error.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.buckets import pad
from l2d_jax.decoding.generation import Loaded, check_classes, check_prompts, check_settings
from l2d_jax.decoding.refine import Refinement, refine, tabulate
from l2d_jax.decoding.sampler import token_keys
from l2d_jax.distributed import processes, sharding
from l2d_jax.errors import InputError
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import over_logits

CHUNK = 1024  # positions whose logits are held at a time, over all draws
SHORTEST_ANSWER = 8  # tokens that answers are padded to, or more: an option is often a single one


class Score(NamedTuple):
    """One answer under the model; all logarithms are natural."""

    tokens: Float[np.ndarray, " n"]  # log-probability of each token, given all before it
    token_errors: Float[np.ndarray, " n"]  # standard errors of those
    total: float  # log-likelihood of the answer
    error: float  # standard error of that
    likeliest: Int[np.ndarray, " n"]  # the token that has the highest probability at each place


def score(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig | None = None,
    draws: int = 8,
    labels: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Score]:
    """Log-likelihoods of answers, each token's by the mean over `draws` runs of the ODE with the true tokens before it.

    Args:
      loaded: from `load`.
      prompts: token ids.
      answers: token ids, one answer per prompt, with the end token if it is to count.
      settings: budget, solver and velocity; None: the model's own.
      draws: noise draws per token, at least 2 for standard errors; a budget of 1, where all are the same, takes one.
      labels: classes for guidance, one per prompt.
      numbers: of the pairs, which their noise depends on, as `generation.stream` takes them; None: 0, 1 and so on.
      seed: of the noise and the velocity's draws.

    Raises:
      InputError: as `generation.stream`, for fewer than 2 draws, and for an answer without tokens or with unknown ones.
        The last token of an answer is fed to no one, and takes no position.
    """
    settings = loaded.defaults if settings is None else settings
    model = loaded.model
    architecture = model.llm.architecture
    refinement = check_settings(settings, has_path=model.path is not None)
    if draws < 2:
        raise InputError(f"a standard error takes at least 2 draws, got {draws}")
    if len(prompts) != len(answers) or not all(answers):
        raise InputError(f"each prompt takes one answer of at least one token, got {len(answers)} for {len(prompts)}")
    _check_lengths(prompts, answers, limit=architecture.max_position_embeddings)
    unknown = [token for text in (*prompts, *answers) for token in text if not 0 <= token < architecture.vocab_size]
    if unknown:
        raise InputError(f"token {unknown[0]} is not one of the {architecture.vocab_size} of the model")
    check_classes(model, labels, prompts=len(prompts))
    ids, _ = pad([[*p, *a[:-1]] for p, a in zip(prompts, answers, strict=True)])
    targets, _ = pad(answers, shortest=SHORTEST_ANSWER)
    places = np.arange(targets.shape[1])
    starts, counts = (np.array([len(text) for text in texts])[:, None] for texts in (prompts, answers))
    queries = np.where(places < counts, starts - 1 + places, 0).astype(np.int32)
    found = _chances(
        model,
        tabulate(model, refinement, budget=settings.budget),
        ids,
        sharding.spread(queries),
        targets[:, :, None],
        jax.random.split(jax.random.key(seed), 1 if settings.budget == 1 else draws),
        jnp.arange(len(prompts)) if numbers is None else jnp.array(numbers),
        None if labels is None else jnp.asarray(labels, jnp.int32),
    )
    chances, likeliest = map(processes.gather_array, found)
    return [
        _summary(chances[:, i, : len(answer), 0].astype(np.float64), likeliest[i, : len(answer)])
        for i, answer in enumerate(answers)
    ]


def rank(
    loaded: Loaded,
    prompts: Sequence[Sequence[int]],
    options: Sequence[Sequence[int]],
    *,
    settings: DecodeConfig,
    draws: int = 8,
    labels: Sequence[int] | None = None,
    numbers: Sequence[int] | None = None,
    seed: int = 0,
) -> list[Float[np.ndarray, " J"]]:
    """Log-probabilities of a few next tokens of each prompt, by the mean over `draws`: one pass over each prompt.

    Args:
      loaded: from `load`.
      prompts: token ids.
      options: the tokens to rank, of each prompt.
      settings: budget, solver and velocity.
      draws: noise draws of each prompt; a budget of 1, where all are the same, takes one.
      labels: classes for guidance, one per prompt.
      numbers: of the prompts, which their noise depends on; None: 0, 1 and so on.
      seed: of the noise and the velocity's draws.

    Raises:
      InputError: as `generation.stream`.
    """
    model = loaded.model
    refinement = check_settings(settings, has_path=model.path is not None)
    check_prompts(prompts, replace(settings, max_new_tokens=1), model.llm.architecture)
    check_classes(model, labels, prompts=len(prompts))
    draws = 1 if settings.budget == 1 else draws
    ids, lengths = pad(prompts)
    width = max(map(len, options))
    tokens = np.array([[*own, *[0] * (width - len(own))] for own in options], np.int32)
    chances, _ = _chances(
        model,
        tabulate(model, refinement, budget=settings.budget),
        ids,
        (lengths - 1)[:, None],
        sharding.spread(tokens[:, None]),
        jax.random.split(jax.random.key(seed), draws),
        jnp.arange(len(prompts)) if numbers is None else jnp.array(numbers),
        None if labels is None else jnp.asarray(labels, jnp.int32),
    )
    mean = np.logaddexp.reduce(processes.gather_array(chances)[:, :, 0].astype(np.float64), axis=0) - np.log(draws)
    return [row[: len(own)] for row, own in zip(mean, options, strict=True)]


@jax.jit
def _chances(
    model: Model,
    settings: Refinement,
    ids: Int[Array, "B T"],
    queries: Int[Array, "B M"],
    targets: Int[Array, "B M J"],
    keys: Key[Array, " draws"],
    numbers: Int[Array, " B"],
    labels: Int[Array, " B"] | None,
) -> tuple[Float[Array, "draws B M J"], Int[Array, "B M"]]:
    """Log-probability of every target under every draw of noise, and the token of the highest mean probability.

    The frozen pass is shared, and no more logits are held at a time than those of so many positions under one draw.
    """
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    hidden, cache = model.llm(ids, positions)
    hidden = jnp.take_along_axis(hidden, queries[..., None], axis=1)
    spread = None if labels is None else jnp.broadcast_to(labels[:, None], queries.shape)
    context = Context(hidden=hidden, cache=cache, positions=queries, labels=spread)
    width = 1 if model.path is None else model.path.config.width

    def once(key: Any) -> Array:
        sequences = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
        places = jnp.arange(queries.shape[1])[:, None]
        noise_keys, velocity_keys, _ = jax.vmap(token_keys, (None, 0), out_axes=1)(sequences, places)
        noise = jax.vmap(jax.vmap(lambda own: jax.random.normal(own, (width,), jnp.float32)))(noise_keys)
        return refine(model, context, noise, settings=settings, keys=velocity_keys)

    refined = jnp.moveaxis(jax.lax.map(once, keys), 0, 2)
    chunk = max(CHUNK // len(keys), 1)
    chances, likeliest = over_logits(model.llm, refined, _read, targets, chunk=chunk)
    return jnp.moveaxis(chances, 2, 0), likeliest


def _read(
    logits: Float[Array, "n draws V"], tokens: Int[Array, "n J"]
) -> tuple[Float[Array, "n draws J"], Int[Array, " n"]]:
    """The tokens' log-probabilities, and the arg max of the mean probability of all tokens."""
    chances = jax.nn.log_softmax(logits)
    mean = jax.nn.logsumexp(chances, axis=1)
    return jnp.take_along_axis(chances, tokens[:, None], axis=-1), jnp.argmax(mean, axis=-1).astype(jnp.int32)


def _check_lengths(prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], *, limit: int) -> None:
    if not prompts or not all(prompts):
        raise InputError("a prompt is empty: give at least one token")
    for prompt, answer in zip(prompts, answers, strict=True):
        if len(prompt) + len(answer) - 1 > limit:
            raise InputError(
                f"a prompt of {len(prompt)} tokens and {len(answer)} new ones exceed the {limit} positions of the "
                "model: shorten one of them"
            )


def _summary(chances: Float[np.ndarray, "draws n"], likeliest: Int[np.ndarray, " n"]) -> Score:
    highest = chances.max(axis=0)
    shares = np.exp(chances - highest)
    mean = shares.mean(axis=0)
    tokens = highest + np.log(mean)
    deviation = shares.std(axis=0, ddof=1) if len(shares) > 1 else np.zeros_like(mean)
    errors = deviation / np.sqrt(len(shares)) / mean  # of the logarithm, to first order
    return Score(tokens, errors, float(tokens.sum()), float(np.sqrt(np.square(errors).sum())), likeliest)
