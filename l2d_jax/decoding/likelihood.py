"""Likelihoods of answers, estimated by several noise samples per token.

The logits of a token depend on its noise. The model's probability of the token is the mean over that noise, and the
mean over a few noise samples is an unbiased estimate. The noise of different tokens is independent, so the product over
the tokens of an answer is unbiased too. The logarithm of the product is biased: it is too low by about half of its
squared standard error.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value
from l2d_jax.decoding.buckets import Programs, pad
from l2d_jax.decoding.generation import broken_logits
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.requests import Request, check_asked, check_prompts, class_labels, path_config
from l2d_jax.decoding.sampler import check_tokens, token_keys
from l2d_jax.distributed import processes, sharding
from l2d_jax.errors import require
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import map_logits

CHUNK = 1024  # number of pairs of position and noise sample whose logits are in memory at once
SHORTEST_ANSWER = 8  # answers are padded to at least this length: an option is often a single token


class Likelihood(NamedTuple):
    """How likely an answer is under the model; all logarithms are natural."""

    tokens: Float[np.ndarray, " n"]  # log-probability of each token, given all tokens before it
    token_errors: Float[np.ndarray, " n"]  # standard error of each log-probability
    total: float  # log-likelihood of the answer
    error: float  # standard error of `total`
    likeliest: Int[np.ndarray, " n"]  # the most probable token at each place of the answer


def score_answers(
    model: Model, request: Request, answers: Sequence[Sequence[int]], *, draws: int = 8
) -> list[Likelihood]:
    """Log-likelihoods of answers, in nats.

    The probability of a token is the mean over `draws` ODEs, given the true tokens before it. There is one answer per
    prompt, as token ids; include the stop token if it should count. The last token of an answer is not fed to the model
    and takes no position. At a budget of 1 all draws are equal, so only one is computed.
    Raises `InputError` as `generation.decode_lanes` does, for fewer than 2 draws, for an answer without tokens or with
    unknown tokens, and if logits are NaN.
    """
    require(draws >= 2, f"a standard error takes at least 2 draws, got {draws}")
    contexts = [prompt.ids for prompt in request.prompts]
    rule = "each prompt takes one answer of at least one token"
    require(len(contexts) == len(answers) and all(answers), f"{rule}, got {len(answers)} for {len(contexts)}")
    limit = model.llm.architecture.max_position_embeddings
    for context, answer in zip(contexts, answers, strict=True):
        problem = f"a prompt of {len(context)} tokens and {len(answer)} new ones exceed the {limit} positions"
        require(len(context) + len(answer) - 1 <= limit, f"{problem} of the model: shorten one of them")
    check_prompts(contexts, model.llm.architecture, new_tokens=0)
    check_tokens([*contexts, *answers], model.llm.architecture.vocab_size)
    ids, _ = pad([[*context, *answer[:-1]] for context, answer in zip(contexts, answers, strict=True)])
    targets, _ = pad(answers, shortest=SHORTEST_ANSWER)
    places = np.arange(targets.shape[1])
    starts, counts = (np.array([len(text) for text in texts])[:, None] for texts in (contexts, answers))
    queries = np.where(places < counts, starts - 1 + places, 0).astype(np.int32)
    sampled = _sample(model, request, ids, sharding.spread(queries), targets[:, :, None], draws=draws)
    log_probs, likeliest = sampled.log_probs[..., 0], sampled.likeliest[..., 0]
    scores = [_average(log_probs[:, i, :n], likeliest[i, :n]) for i, n in enumerate(map(len, answers))]
    if broken := [i for i, score in enumerate(scores) if np.isnan(score.total)]:
        raise broken_logits(broken)
    return scores


class ScoredPiece(NamedTuple):
    """Tokens of a text, with the most likely tokens in their places, as natural logarithms."""

    log_probs: Float[np.ndarray, " n"]
    errors: Float[np.ndarray, " n"]  # standard error of each log-probability
    likeliest: Int[np.ndarray, "n top"]
    likeliest_log_probs: Float[np.ndarray, "n top"]
    evaluations: int  # of the path


def score_in_pieces(
    model: Model, request: Request, answer: Sequence[int], *, draws: int, piece: int, top: int
) -> Iterator[ScoredPiece]:
    """Score one answer, `piece` tokens at a time, with the `top` most likely tokens; otherwise as `score_answers`."""
    [prompt] = request.prompts
    ids, _ = pad([[*prompt.ids, *answer[:-1]]])
    for first in range(0, len(answer), piece):
        part = answer[first : first + piece]
        targets, _ = pad([part], length=piece)
        places = np.arange(first, first + piece)
        queries = np.where(places < len(answer), len(prompt.ids) - 1 + places, 0)[None].astype(np.int32)
        at = sharding.spread(queries)
        sampled = _sample(model, request, ids, at, targets[:, :, None], draws=draws, first=first, top=top)
        rows = (sampled.likeliest, sampled.likeliest_log_probs, sampled.taken)
        likeliest, values, taken = (array[0, : len(part)] for array in rows)
        scored = _average(sampled.log_probs[:, 0, : len(part), 0], likeliest[:, 0])
        if np.isnan(scored.total):
            raise broken_logits([prompt.number])
        yield ScoredPiece(scored.tokens, scored.token_errors, likeliest, values, int(taken.sum()))


def rank(
    model: Model, request: Request, options: Sequence[Sequence[int]], *, draws: int = 8
) -> list[Float[np.ndarray, " J"]]:
    """Log-probabilities of a few candidate next tokens of each prompt, in one pass over each prompt.

    They are logarithms of the mean probability over `draws`. At a budget of 1 all draws are equal, so only one is
    computed. NaN logits give NaN.
    Raises `InputError` as `generation.decode_lanes` does.
    """
    contexts = [prompt.ids for prompt in request.prompts]
    check_prompts(contexts, model.llm.architecture, new_tokens=1)
    ids, lengths = pad(contexts)
    width = max(map(len, options))
    tokens = sharding.spread(np.array([[*few, *[0] * (width - len(few))] for few in options], np.int32)[:, None])
    log_probs = _sample(model, request, ids, (lengths - 1)[:, None], tokens, draws=draws).log_probs
    with np.errstate(invalid="ignore"):  # NaN stays NaN
        mean = np.logaddexp.reduce(log_probs[:, :, 0], axis=0) - np.log(len(log_probs))
    return [row[: len(few)] for row, few in zip(mean, options, strict=True)]


class _Sampled(NamedTuple):
    """Distributions at a few places of a text, on the host."""

    log_probs: Float[np.ndarray, "draws B M J"]  # of the targets, under each noise sample
    likeliest: Int[np.ndarray, "B M top"]  # the tokens with the highest mean probability
    likeliest_log_probs: Float[np.ndarray, "B M top"]
    taken: Int[np.ndarray, "B M"]  # evaluations of the path, for all noise samples


class _Noise(NamedTuple):
    """What determines the noise of each token."""

    keys: Key[Array, " draws"]
    numbers: Int[Array, " B"]  # numbers of the prompts
    places: Int[Array, " M"]  # places of the tokens in the answer


def _sample(
    model: Model,
    request: Request,
    ids: Int[Array, "B T"],
    queries: Array,
    targets: Int[Array, "B M J"],
    *,
    draws: int,
    first: int = 0,
    top: int = 1,
) -> _Sampled:
    """Call `_log_probs` from token `first` of the answer on, and fetch the results; the targets' are in float64.

    Raises `InputError` for options that do not fit the model.
    """
    budget, refinement = request.settings.budget, Refinement.prepare(model, request.settings)
    if request.settings.must_be_parallel:  # not with "auto": with this many positions, extra rows cost time
        refinement = refinement.side_by_side([Grid(budget, request.settings.end)])
    check_value(request.seed, ranges.KeySeed, "seed")
    path, has_label = path_config(model), any(prompt.label is not None for prompt in request.prompts)
    labels = class_labels(path, request.prompts)
    check_asked(request.asked, [request.settings], path, has_label=has_label)
    keys = jax.random.split(jax.random.key(request.seed), 1 if budget == 1 else draws)
    numbers = jnp.array([prompt.number for prompt in request.prompts])
    model = model.reading(refines=budget > 1)
    places = first + jnp.arange(queries.shape[1], dtype=jnp.int32)
    noise = _Noise(keys, numbers, places)
    results = _log_probs(model, refinement, ids, queries, targets, noise, labels, top=top)
    log_probs, *others = map(processes.gather_array, results)
    return _Sampled(log_probs.astype(np.float64), *others)


@partial(Programs, static=["top"])
def _log_probs(
    model: Model,
    settings: Refinement,
    ids: Int[Array, "B T"],
    queries: Int[Array, "B M"],
    targets: Int[Array, "B M J"],
    noise: _Noise,
    labels: Int[Array, " B"] | None,
    *,
    top: int,
) -> tuple[Float[Array, "draws B M J"], Int[Array, "B M top"], Float[Array, "B M top"], Int[Array, "B M"]]:
    """The log-probability of every target under every noise sample, and the other fields of `_Sampled`."""
    hidden, cache = model.llm(ids, jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape))
    read = (hidden, model.llm.lookup(ids))
    hidden, inputs = (jnp.take_along_axis(array, queries[..., None], axis=1) for array in read)
    spread = None if labels is None else jnp.broadcast_to(labels[:, None], queries.shape)
    context = Context(hidden=hidden, cache=cache, positions=queries, labels=spread, inputs=inputs)
    width = 1 if model.path is None else model.path.config.width

    def refine_once(key: Key[Array, ""]) -> tuple[Float[Array, "B M D"], Int[Array, "B M"]]:
        sequences = jax.vmap(jax.random.fold_in, (None, 0))(key, noise.numbers)
        noise_keys, velocity_keys, _ = jax.vmap(token_keys, (None, 0), out_axes=1)(sequences, noise.places[:, None])
        start = jax.vmap(jax.vmap(lambda noise_key: jax.random.normal(noise_key, (width,), jnp.float32)))(noise_keys)
        hidden, cost = refine(model, context, start, settings=settings, keys=velocity_keys)
        return hidden, cost.evaluations

    refined, taken = jax.lax.map(refine_once, noise.keys)
    chunk, reader = max(CHUNK // len(noise.keys), 1), partial(_read_logits, top=top)
    hidden = jnp.moveaxis(refined, 0, 2)
    log_probs, likeliest, values = map_logits(model.llm, hidden, reader, targets, chunk=chunk)
    return jnp.moveaxis(log_probs, 2, 0), likeliest, values, taken.sum(axis=0)


def _read_logits(
    logits: Float[Array, "n draws V"], tokens: Int[Array, "n J"], *, top: int
) -> tuple[Float[Array, "n draws J"], Int[Array, "n top"], Float[Array, "n top"]]:
    """The log-probabilities of `tokens`, and the tokens with the highest mean probability with theirs."""
    log_probs = jax.nn.log_softmax(logits)
    mean = jax.nn.logsumexp(log_probs, axis=1) - jnp.log(logits.shape[1])
    if top == 1:
        likeliest, values = jnp.argmax(mean, axis=-1, keepdims=True), mean.max(axis=-1, keepdims=True)
    else:
        values, likeliest = jax.lax.top_k(mean, min(top, mean.shape[-1]))
    return jnp.take_along_axis(log_probs, tokens[:, None], axis=-1), likeliest.astype(jnp.int32), values


def _average(log_probs: Float[np.ndarray, "draws n"], likeliest: Int[np.ndarray, " n"]) -> Likelihood:
    """The likelihood of an answer from the mean probability of each of its tokens."""
    highest = log_probs.max(axis=0)
    probs = np.exp(log_probs - highest)  # relative to the highest, to avoid underflow
    mean = probs.mean(axis=0)
    tokens = highest + np.log(mean)
    deviation = probs.std(axis=0, ddof=1) if len(probs) > 1 else np.zeros_like(mean)
    errors = deviation / np.sqrt(len(probs)) / mean  # of the logarithm, to first order
    return Likelihood(tokens, errors, float(tokens.sum()), float(np.sqrt(np.square(errors).sum())), likeliest)
