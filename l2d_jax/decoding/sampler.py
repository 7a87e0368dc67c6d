"""Samples the next token from its logits: penalties, bias, masks, temperature, top-k and top-p.

Penalties and bias are applied first, as in vLLM. The rest follows the order of transformers: the mask, the temperature,
top-k, then top-p among the tokens that top-k keeps. A temperature of 0 is the arg max, which neither top-k nor top-p
changes.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key, UInt

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.errors import require
from l2d_jax.model import diffusion

BIASES = 1024  # largest number of tokens with a bias in a request
NO_TOKEN = 2**31 - 1  # an id beyond every vocabulary
LIKELIEST = 20  # number of alternatives reported with their log-probabilities for each token
CUT = "top_k_and_top_p"  # scope of what runs only with one of them
DIGIT = 2  # bits of the threshold that `cut` finds per pass over the vocabulary


class Penalized(NamedTuple):
    """The penalties of one answer, and its tokens so far."""

    frequency: float | int
    presence: float | int
    bias: Mapping[int, float | int]
    said: Sequence[int]


@nnx.dataclass
class Penalties(nnx.Module):
    """Penalties and biases of each sequence, which change its logits before sampling; as OpenAI defines them."""

    frequency: Float[Array, " B"] = nnx.data()  # subtracted from a token's logit for each occurrence in the answer
    presence: Float[Array, " B"] = nnx.data()  # subtracted once from the logit of a token that occurs in the answer
    biased: Int[Array, "B K"] = nnx.data()  # tokens with a bias; beyond the vocabulary: none
    bias: Float[Array, "B K"] = nnx.data()  # added to their logits
    said: Int[Array, "B n"] = nnx.data()  # the tokens of the answers so far; beyond the vocabulary: none

    @classmethod
    def stack(cls, rows: Sequence[Penalized], *, length: int) -> "Penalties":
        """Stack the penalties of all sequences; their answers have at most `length` tokens so far."""
        biased, said = (np.full((len(rows), n), NO_TOKEN, np.int32) for n in (BIASES, length))
        bias = np.zeros(biased.shape, np.float32)
        for row, (_, _, values, tokens) in enumerate(rows):
            biased[row, : len(values)], bias[row, : len(values)] = list(values), list(values.values())
            said[row, : len(tokens)] = tokens
        frequency, presence = (jnp.array(column, jnp.float32) for column in list(zip(*rows, strict=True))[:2])
        return cls(frequency, presence, jnp.asarray(biased), jnp.asarray(bias), jnp.asarray(said))

    def apply(self, logits: Float[Array, "B V"], counts: Int[Array, "B V"]) -> Float[Array, "B V"]:
        """Apply penalties and bias to the logits; `counts` is how often each token occurs in each answer."""
        penalty = counts * self.frequency[:, None] + (counts > 0) * self.presence[:, None]
        return (logits - penalty).at[jnp.arange(len(logits))[:, None], self.biased].add(self.bias, mode="drop")


@nnx.dataclass
class SamplingOptions(nnx.Module):
    """How to sample, for each sequence or for all; arguments of a compiled program."""

    temperature: Float[Array, "#B"] = nnx.data()  # 0: arg max
    top_k: Int[Array, "#B"] = nnx.data()  # sample from this many of the likeliest tokens; 0: from all
    top_p: Float[Array, "#B"] = nnx.data()  # sample from the likeliest tokens that together reach this probability
    gate: Float[Array, "#B"] = nnx.data()  # entropy of the LM alone, in nats, below which the ODE is skipped; 0: never
    allowed: Bool[Array, "#B V"] | None = nnx.data(default=None)  # tokens that may be sampled; None: all
    penalties: Penalties | None = nnx.data(default=None)  # None: no sequence has any
    draws: Int[Array, "#B"] | None = nnx.data(default=None)  # number of noise samples to average; None: all
    is_scored: bool = nnx.static(default=False)  # whether tokens come with log-probabilities

    @classmethod
    def from_config(cls, config: DecodeConfig) -> "SamplingOptions":
        """The same options for all sequences."""
        return cls(
            temperature=jnp.float32([config.temperature]),
            top_k=jnp.int32([config.top_k]),
            top_p=jnp.float32([config.top_p]),
            gate=jnp.float32([config.gate]),
            draws=jnp.int32([config.draws]) if config.draws > 1 else None,
        )

    def start_counts(self, vocab_size: int) -> Int[Array, "B V"] | None:
        """How often each token occurs in each answer so far; None without penalties."""
        if self.penalties is None:
            return None
        return _add_tokens(jnp.zeros((len(self.penalties.said), vocab_size), jnp.int32), self.penalties.said)

    def count(self, counts: Int[Array, "B V"] | None, token: Int[Array, " B"]) -> Int[Array, "B V"] | None:
        """The counts after one more token of each answer."""
        return None if counts is None else _add_tokens(counts, token[:, None])


def _add_tokens(counts: Int[Array, "B V"], tokens: Int[Array, "B n"]) -> Int[Array, "B V"]:
    return counts.at[jnp.arange(len(counts))[:, None], tokens].add(1, mode="drop")


def sample_tokens(
    keys: Key[Array, " B"],
    logits: Float[Array, "B V"],
    sampling: SamplingOptions,
    *,
    counts: Int[Array, "B V"] | None = None,
) -> Int[Array, " B"]:
    """Sample a token for each sequence. With penalties, `counts` is how often each token occurs in each answer."""
    if sampling.penalties is not None:
        assert counts is not None
        logits = sampling.penalties.apply(logits, counts)
    if sampling.allowed is not None:
        logits = jnp.where(sampling.allowed, logits, -jnp.inf)
    options = (sampling.temperature, sampling.top_k, sampling.top_p)
    temperature, top_k, top_p = (jnp.broadcast_to(option, logits.shape[:1]) for option in options)
    is_cut = ((top_k > 0) | (top_p < 1)) & (temperature > 0)  # otherwise `cut` is skipped
    with jax.named_scope(CUT):
        logits = jax.lax.cond(is_cut.any(), lambda: cut(logits, temperature, top_k, top_p), lambda: logits)
    return diffusion.sample_rows(keys, logits, temperature).astype(jnp.int32)


def skipped(config: DecodeConfig) -> tuple[str, ...]:
    """The scopes whose work these options skip."""
    is_sampled, is_cut = config.temperature > 0, config.top_k > 0 or config.top_p < 1
    scopes = {diffusion.SAMPLE: is_sampled or config.velocity_temperature > 0, CUT: is_sampled and is_cut}
    return tuple(scope for scope, is_used in scopes.items() if not is_used)


def token_keys(keys: Key[Array, " B"], number: Int[Array, "#B"]) -> tuple[Array, Array, Array]:
    """The keys of a token: for its noise, for tokens sampled in the velocity, and for the final sample.

    `number` is the place of the token in its answer, from 0.
    """
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(number, keys.shape))
    noise, velocity, final = jax.vmap(partial(jax.random.split, num=3), out_axes=1)(folded)
    return noise, velocity, final


@jax.jit
def answer_keys(seeds: UInt[Array, " B"], numbers: Int[Array, " B"], copies: Int[Array, " B"]) -> Key[Array, " B"]:
    """The key of each answer, from its seed, the number of its prompt and its number among that prompt's answers."""

    def key(seed: Array, number: Array, copy: Array) -> Array:
        first = jax.random.fold_in(jax.random.key(seed), number)
        return jnp.where(copy == 0, first, jax.random.fold_in(first, copy))

    return jax.vmap(key)(seeds, numbers, copies)


def entropy(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """The entropy of the distribution at temperature 1, in nats."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def cut(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """Set the logits of tokens that top-k or top-p excludes to minus infinity; the most likely token always stays.

    Nothing is sorted: the largest excluded logit is found digit by digit, with sums over the vocabulary.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
    bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    keys = (bits ^ ((bits >> 31) | jnp.iinfo(jnp.int32).min)).astype(jnp.uint32)  # in the order of the logits

    def keep(weights: Array, limit: Array) -> Array:
        """For each token, whether all more likely tokens together weigh less than the limit."""

        def find_digit(number: Array, last: Array) -> Array:
            shift = jnp.uint32(32 - DIGIT) - DIGIT * number.astype(jnp.uint32)
            tried = last[:, None] | (jnp.arange(1, 2**DIGIT, dtype=jnp.uint32) << shift)
            likelier = jnp.sum(weights[:, None], axis=-1, where=keys[:, None] > tried[..., None])
            return last | ((likelier >= limit[:, None]).sum(axis=-1, dtype=jnp.uint32) << shift)

        last = jax.lax.fori_loop(0, 32 // DIGIT, find_digit, jnp.zeros(len(keys), jnp.uint32))
        return keys > last[:, None]

    is_kept = keep(jnp.ones_like(logits), jnp.where(top_k > 0, top_k, jnp.inf))
    probs = jax.nn.softmax(jnp.where(is_kept, scaled, -jnp.inf))
    return jnp.where(is_kept & keep(probs, jnp.where(top_p < 1, top_p, jnp.inf)), logits, -jnp.inf)


class Tokens(NamedTuple):
    """New tokens, their cost, and log-probabilities in nats at temperature 1, before any mask or penalty."""

    ids: Int[Array, "B steps"]
    evaluations: Int[Array, "B steps"]  # evaluations of the path; 0 for sequences that had ended
    passes: Int[Array, "B steps"]  # passes over the weights; 0 for sequences that had ended
    log_probs: Float[Array, "B steps"] | None  # of these tokens
    likeliest: Int[Array, "B steps LIKELIEST"] | None  # the most likely tokens
    likeliest_log_probs: Float[Array, "B steps LIKELIEST"] | None


def score_tokens(token: Int[Array, " B"], logits: Float[Array, "B V"]) -> tuple[Array, Array, Array]:
    """The last three fields of `Tokens`, for one token of each sequence."""
    log_probs = jax.nn.log_softmax(logits)
    values, likeliest = jax.lax.top_k(log_probs, min(LIKELIEST, log_probs.shape[1]))
    return jnp.take_along_axis(log_probs, token[:, None], axis=1)[:, 0], likeliest, values


def check_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Raise `InputError` for a token id that the model's vocabulary lacks."""
    unknown = next((token for ids in texts for token in ids if not 0 <= token < vocab_size), None)
    require(unknown is None, f"token {unknown} is not one of the {vocab_size} of the model: take ids of its tokenizer")


def allow(vocab_size: int, *, allowed: Any = None, banned: Any = ()) -> np.ndarray | None:
    """A mask of the `allowed` tokens (None: all) without the `banned` ones; None if that is every token.

    Raises `InputError` for a token beyond the vocabulary, and if no token remains.
    """
    check_tokens([() if allowed is None else allowed, banned], vocab_size)
    if allowed is None and not banned:
        return None
    mask = np.full(vocab_size, allowed is None)
    mask[[] if allowed is None else list(allowed)] = True
    mask[list(banned)] = False
    require(bool(mask.any()), "every token is banned: allow at least one")
    return mask
