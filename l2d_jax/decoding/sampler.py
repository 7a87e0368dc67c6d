"""Samples the next token from the answer's logits: temperature, top-k, top-p and masks of tokens.

The order is that of transformers: first the mask, then the temperature, then top-k, then top-p of the tokens that top-k
keeps. A temperature of 0 is the arg max, which neither top-k nor top-p changes.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.errors import require
from l2d_jax.model import diffusion

DIGIT = 2  # bits that a pass over the vocabulary finds


@nnx.dataclass
class SamplingOptions(nnx.Module):
    """How to sample, for each sequence or for all; arguments of one compiled program."""

    temperature: Float[Array, "#B"] = nnx.data()  # 0: arg max
    top_k: Int[Array, "#B"] = nnx.data()  # sample from this many of the likeliest tokens; 0: from all
    top_p: Float[Array, "#B"] = nnx.data()  # sample from the likeliest tokens that together reach this probability
    gate: Float[Array, "#B"] = nnx.data()  # entropy of the LM alone, in nats, below which the ODE is skipped; 0: never
    allowed: Bool[Array, "#B V"] | None = nnx.data(default=None)  # tokens that may be sampled; None: all
    is_scored: bool = nnx.static(default=False)  # whether tokens come with log-probabilities

    @classmethod
    def from_config(cls, config: DecodeConfig) -> "SamplingOptions":
        """The same options for all sequences."""
        floats = {name: jnp.float32([getattr(config, name)]) for name in ("temperature", "top_p", "gate")}
        return cls(top_k=jnp.int32([config.top_k]), **floats)


def sample_tokens(keys: Key[Array, " B"], logits: Float[Array, "B V"], sampling: SamplingOptions) -> Int[Array, " B"]:
    """Sample a token for each sequence."""
    if sampling.allowed is not None:
        logits = jnp.where(sampling.allowed, logits, -jnp.inf)
    options = (sampling.temperature, sampling.top_k, sampling.top_p)
    temperature, top_k, top_p = (jnp.broadcast_to(option, logits.shape[:1]) for option in options)
    is_cut = ((top_k > 0) | (top_p < 1)) & (temperature > 0)  # where it is not, nothing is searched for
    logits = jax.lax.cond(is_cut.any(), lambda: cut(logits, temperature, top_k, top_p), lambda: logits)
    return diffusion.sample_rows(keys, logits, temperature).astype(jnp.int32)


def token_keys(keys: Key[Array, " B"], number: Int[Array, "#B"]) -> tuple[Array, Array, Array]:
    """Keys for the noise, the velocity's sampled tokens and the token itself, which has this number, from 0."""
    folded = jax.vmap(jax.random.fold_in)(keys, jnp.broadcast_to(number, keys.shape))
    noise, velocity, final = jax.vmap(partial(jax.random.split, num=3), out_axes=1)(folded)
    return noise, velocity, final


def entropy(logits: Float[Array, "*B V"]) -> Float[Array, "*B"]:
    """The entropy of the distribution at temperature 1, in nats."""
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def cut(
    logits: Float[Array, "B V"], temperature: Float[Array, " B"], top_k: Int[Array, " B"], top_p: Float[Array, " B"]
) -> Float[Array, "B V"]:
    """The logits, with minus infinity where top-k or top-p excludes a token; the likeliest is never excluded.

    Nothing is sorted: the largest logit that is excluded is found digit by digit, by sums over the vocabulary.
    """
    scaled = logits / jnp.maximum(temperature, 1e-6)[:, None]
    bits = jax.lax.bitcast_convert_type(scaled, jnp.int32)
    keys = (bits ^ ((bits >> 31) | jnp.iinfo(jnp.int32).min)).astype(jnp.uint32)  # in the order of the logits

    def keep(weights: Array, limit: Array) -> Array:
        """Whether the likelier tokens weigh less than the limit."""

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


def check_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> None:
    """Raise `InputError` for a token id that the model's vocabulary lacks."""
    unknown = next((token for ids in texts for token in ids if not 0 <= token < vocab_size), None)
    require(unknown is None, f"token {unknown} is not one of the {vocab_size} of the model: take ids of its tokenizer")


def allow(vocab_size: int, *, allowed: Any = None, banned: Any = ()) -> np.ndarray | None:
    """The mask of the allowed tokens (None: all) less the banned ones; None if that is every token.

    Raises `InputError` for a token beyond the vocabulary, and if no token is left.
    """
    check_tokens([() if allowed is None else allowed, banned], vocab_size)
    if allowed is None and not banned:
        return None
    mask = np.full(vocab_size, allowed is None)
    mask[[] if allowed is None else list(allowed)] = True
    mask[list(banned)] = False
    require(bool(mask.any()), "every token is banned: allow at least one")
    return mask
