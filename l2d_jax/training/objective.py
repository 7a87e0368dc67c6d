"""One training loss from a batch and a key (paper section 3.2, algorithm 1).

Notable: the path runs at the answer's positions alone (`Batch.queries`), since no diffusion token sees another; the
frozen pass leaves nothing but keys and values; logits exist for one chunk of positions at a time. Several draws per
context share that pass: their positions stand side by side in one evaluation of the path, so that a sharded model
gathers each weight once however many there are. What more draws cost in memory, smaller micro-batches give back.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from l2d_jax.data.batch import Batch
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context, read_context, token_positions
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.model.lm_head import target_losses
from l2d_jax.training.time_density import Times, as_drawn

Reduction = Literal["example", "token", "sum"]


class Draws(NamedTuple):
    """What the loss draws at random, per predicted position."""

    t: Float[Array, "B M"]
    noise: Float[Array, "B M C"]  # of unit variance
    labels: Int[Array, "B M"] | None  # after class dropout


class Terms(NamedTuple):
    """Position by position, what a loss is the sum of: `losses` times `shares`."""

    t: Float[Array, "B M"]
    losses: Float[Array, "B M"]
    shares: Float[Array, "B M"]


def draw(key: Key[Array, ""] | Array, batch: Batch, path: DiffusionPath) -> Draws:
    """One independent t and x_0 per position, and the class dropout, per position too."""
    config = path.config
    key_t, key_noise, key_drop = jax.random.split(key, 3)
    shape = batch.targets.shape
    labels = None
    if config.classes:
        dropped = jax.random.bernoulli(key_drop, config.class_dropout, shape)
        labels = jnp.where(dropped, config.classes, batch.classes.reshape(shape[0], -1))
    noise = jax.random.normal(key_noise, (*shape, config.width), jnp.float32)
    return Draws(t=jax.random.uniform(key_t, shape, jnp.float32), noise=noise, labels=labels)


def draw_each(
    key: Key[Array, ""] | Array, batch: Batch, path: DiffusionPath, *, draws_per_context: int, times: Times = as_drawn
) -> tuple[Batch, Draws]:
    """The batch with each query repeated, and for each copy what `draw` gives for a key of its own.

    `times` makes the times of those that are drawn, of all copies together.
    """
    if draws_per_context == 1:
        draws = draw(key, batch, path)
    else:
        keys = jax.random.split(key, draws_per_context)
        draws = jax.vmap(lambda key: draw(key, batch, path), out_axes=2)(keys)
        draws = jax.tree.map(lambda a: a.reshape(len(a), -1, *a.shape[3:]), draws)
        batch = batch.repeat(draws_per_context)
    return batch, draws._replace(t=times(draws.t, batch.weights))


def correct(
    path: DiffusionPath,
    llm: LLM,
    context: Context,
    batch: Batch,
    draws: Draws,
    *,
    remat: Callable[..., Any] | None = None,
) -> Float[Array, "B M D"]:
    """Hidden states corrected by one evaluation of the path at the drawn t, on corrupted true tokens."""
    noise = path.config.sigma * draws.noise
    x = diffusion.interpolate(path.embed(llm.lookup(batch.targets)), noise, draws.t)
    context = context._replace(labels=draws.labels)
    if batch.queries is None:  # a kernel that need not be told the positions is faster
        context = context._replace(positions=None)
    return context.hidden + path(llm, x, draws.t, context, remat=remat)


def shares(
    weights: Float[Array, "*B M"], reduction: Reduction, *, segments: Int[Array, "*B M"] | None = None
) -> Float[Array, "*B M"]:
    """What each position counts for in the loss, which is the sum of them all times their cross-entropies.

    For the mean over tokens, the mean over examples of each example's token mean (those of weight zero do not count),
    or the sum with the weights as they are. An example is a row, or the positions of a row that have one number in
    `segments`, from 0 to M. Over leading axes, the shares are those of one large batch.
    """
    if reduction == "sum":
        return weights
    if reduction == "token":
        return weights / jnp.maximum(jnp.sum(weights), 1)
    if segments is None:
        counts = own = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        count = partial(jax.ops.segment_sum, num_segments=weights.shape[-1] + 1)
        counts = jnp.vectorize(count, signature="(m),(m)->(s)")(weights, segments)
        own = jnp.take_along_axis(counts, segments, axis=-1)
    return weights / jnp.maximum(own, 1) / jnp.maximum(jnp.sum(counts > 0), 1)


def average(
    values: Float[Array, "B M"],
    weights: Float[Array, "B M"],
    reduction: Reduction,
    *,
    segments: Int[Array, "B M"] | None = None,
) -> Float[Array, ""]:
    """The values reduced to one, as `shares` says."""
    return jnp.sum(values * shares(weights, reduction, segments=segments))


def diffusion_loss(  # noqa: PLR0913 (what is drawn, how it counts, and how it is computed)
    path: DiffusionPath,
    llm: LLM,
    batch: Batch,
    key: Key[Array, ""] | Array,
    *,
    reduction: Reduction = "example",
    draws_per_context: int = 1,
    times: Times = as_drawn,
    chunk: int = 1024,
    remat: Callable[..., Any] | None = None,
) -> tuple[Float[Array, ""], Terms]:
    """Cross-entropy of the answers, in nats (equation 5), and the terms of that sum; differentiable in `path`.

    With several draws per context, the mean of as many losses of one draw, whose keys are split off `key`.
    """
    batch, draws = draw_each(key, batch, path, draws_per_context=draws_per_context, times=times)
    context = read_context(llm, batch)
    hidden = correct(path, llm, context, batch, draws, remat=remat)
    losses = target_losses(llm, hidden, batch.targets, chunk=chunk)
    counts = shares(batch.weights, reduction, segments=batch.query_segments)
    return jnp.sum(losses * counts), Terms(t=draws.t, losses=losses, shares=counts)


def finetuning_loss(
    llm: LLM,
    batch: Batch,
    *,
    reduction: Reduction = "example",
    chunk: int = 1024,
    remat: Callable[..., Any] | None = None,
    losses: Callable[..., Float[Array, "B M"]] = target_losses,
) -> Float[Array, ""]:
    """Cross-entropy of the answers, in nats; differentiable in what `losses` is, and in the layers.

    Args:
      llm: the language model, an adapter included.
      batch: examples; several queries a token are for a path alone.
      reduction: of the positions, as `average` takes it.
      chunk: positions whose logits each device holds at a time.
      remat: wraps the block for rematerialisation.
      losses: `target_losses` where the output head is frozen, `target_losses_of_all` where it is trained.
    """
    hidden, _ = llm(batch.tokens, token_positions(batch), segments=batch.segments, remat=remat)
    if batch.queries is not None:
        hidden = jnp.take_along_axis(hidden, batch.queries[..., None], axis=1)
    values = losses(llm, hidden, batch.targets, chunk=chunk)
    return average(values, batch.weights, reduction, segments=batch.query_segments)
