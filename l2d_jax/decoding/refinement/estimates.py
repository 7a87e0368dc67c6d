"""Evaluations of the path at (t, x): corrected hidden states, and the estimates of x_1 from their logits."""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.condition_table import ConditionTable
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import map_logits


def corrected_hidden(
    model: Model,
    context: Context,
    x: Float[Array, "B M C"],
    t: Float[Array, "#B #M"],
    *,
    table: ConditionTable | None = None,
) -> Float[Array, "G B M D"]:
    """Corrected hidden states, at a shared time or one per position. G is 1, or 2 with labels: class, then null class.

    With a table, times must be those of its grids.
    """
    assert model.path is not None
    path = model.path

    def branch(labels: Array | None) -> Array:
        conditions = None if table is None else table.at(t, labels)
        return context.hidden + path(model.llm, x, t, context._replace(labels=labels), conditions=conditions)

    if context.labels is None:
        return branch(None)[None]
    null = jnp.full_like(context.labels, path.config.classes)
    return jax.vmap(branch)(jnp.stack([context.labels, null]))


def estimate(
    model: Model,
    hidden: Float[Array, "B M D"],
    *,
    temperature: Float[Array, "#B #M"],
    keys: Key[Array, "B M"],
    kind: Literal["sample", "expectation"],
    allowed: Bool[Array, "B V"] | None = None,
) -> Float[Array, "B M C"]:
    """The estimate of x_1 from the logits: the vector of a sampled token, or the mean over the (allowed) vocabulary.

    It is NaN where the hidden state is NaN, which an arg max would hide.
    """

    def mean(logits: Array, temperature: Array, *masks: Array) -> Array:
        logits = _restrict(logits, *masks)
        assert model.table is not None
        mean = jax.nn.softmax(logits / jnp.maximum(temperature, 1e-6)[:, None]) @ model.table
        return jnp.where(temperature[:, None] > 0, mean, model.table[diffusion.arg_max(logits)])

    if kind == "sample":
        tokens = estimated_tokens(model, hidden, temperature=temperature, keys=keys, allowed=allowed)
        estimates = model.vectors(tokens)
    else:
        temperature = jnp.broadcast_to(temperature, hidden.shape[:2])
        estimates = map_logits(model.llm, hidden, mean, temperature, *_masks(allowed, hidden))
    return jnp.where(jnp.isnan(hidden[..., :1]), jnp.nan, estimates)


def estimated_tokens(
    model: Model,
    hidden: Float[Array, "B M D"],
    *,
    temperature: Float[Array, "#B #M"],
    keys: Key[Array, "B M"],
    allowed: Bool[Array, "B V"] | None = None,
) -> Int[Array, "B M"]:
    """Sample (allowed) tokens as estimates; at temperature 0 the arg max."""

    def sample(logits: Array, key_data: Array, temperature: Array, *masks: Array) -> Array:
        return diffusion.sample_rows(jax.random.wrap_key_data(key_data), _restrict(logits, *masks), temperature)

    temperature = jnp.broadcast_to(temperature, hidden.shape[:2])
    masks = _masks(allowed, hidden)
    return map_logits(model.llm, hidden, sample, jax.random.key_data(keys), temperature, *masks).astype(jnp.int32)


def _masks(allowed: Bool[Array, "B V"] | None, hidden: Float[Array, "B M D"]) -> tuple[Array, ...]:
    """The mask of each position, if there are masks."""
    if allowed is None:
        return ()
    return (jnp.broadcast_to(allowed[:, None], (*hidden.shape[:2], allowed.shape[1])),)


def _restrict(logits: Array, allowed: Array | None = None) -> Array:
    return logits if allowed is None else jnp.where(allowed, logits, -jnp.inf)


def evaluation_keys(keys: Key[Array, "B M"], t: Float[Array, "B M"]) -> Key[Array, "B M"]:
    """Fold the bits of the times of evaluations into keys."""
    return jax.vmap(jax.vmap(jax.random.fold_in))(keys, jax.lax.bitcast_convert_type(t, jnp.uint32))


def make_target(
    model: Model,
    context: Context,
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
) -> integrate.Target:
    """Make the function of (t, x) that estimates x_1, towards which the solver integrates; guided if there are labels.

    t is shared, or one per sequence.
    """

    def target(t: Array, x: Array) -> Array:
        batch, length, _ = x.shape
        hidden = corrected_hidden(model, context, x, t.reshape(-1, 1), table=settings.table)
        branches = hidden.shape[0]
        folded = evaluation_keys(keys, jnp.broadcast_to(t.reshape(-1, 1), keys.shape))
        temperature = jnp.broadcast_to(settings.temperature(t.reshape(-1, 1)), (branches, batch, 1))
        estimates = estimate(
            model,
            hidden.reshape(branches * batch, length, -1),
            temperature=temperature.reshape(-1, 1),
            keys=jnp.tile(folded, (branches, 1)),
            kind=settings.velocity,
            allowed=None if settings.allowed is None else jnp.tile(settings.allowed, (branches, 1)),
        ).reshape(branches, batch, length, -1)
        if branches == 1:
            return estimates[0]
        return diffusion.guide(estimates[0], estimates[1], settings.guidance[:, None, None])

    return jax.jit(target)  # a solver calls it at several places of a program; this traces it once
