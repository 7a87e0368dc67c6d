"""The training losses of a batch: `diffusion_loss` for a path (paper section 3.2, algorithm 1), and `finetuning_loss`.

Both are the cross-entropy of the answers, in nats. `finetuning_loss` trains the language model itself, with or without
an adapter, for the baselines. Notable: the path runs only at positions of answers (`Batch.queries`), because diffusion
tokens do not see each other. The frozen pass stores only keys and values. Logits exist for one chunk of positions at a
time. Several noise samples per context share the frozen pass and one evaluation of the path, so a sharded model gathers
each weight once, whatever the number of samples. Smaller micro-batches compensate for the memory of more samples.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.data.batch import Batch
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context, read_context, token_positions
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.model.lm_head import map_logits, target_losses

Reduction = Literal["example", "token", "sum"]
Remat: TypeAlias = Callable[..., Any] | None  # wraps a block for rematerialisation; None: save everything


@dataclass(frozen=True)
class LossOptions:
    """How a loss is reduced to one number, and how it is computed."""

    reduction: Reduction = "example"  # argument of `loss_weights`
    chunk: int = 1024  # positions whose logits each device holds at a time
    remat: Remat = None


PLAIN = LossOptions()


class Corruption(NamedTuple):
    """The random values of the loss for each predicted position."""

    t: Float[Array, "B M"]
    noise: Float[Array, "B M C"]  # with unit variance
    labels: Int[Array, "B M"] | None  # after class dropout


def cosmap_times(uniform: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """The release's `cosmap`: times with density 2 / (pi (1 - 2 t + 2 t^2)) (Esser et al. 2024, section 3.1)."""
    angle = (jnp.pi / 2) * uniform
    return jnp.sin(angle) / (jnp.sin(angle) + jnp.cos(angle))


TimeSampler = Callable[[Float[Array, "B M"]], Float[Array, "B M"]]  # from uniform samples to t
TIMES: dict[str, TimeSampler] = {"uniform": lambda samples: samples, "cosmap": cosmap_times}  # keys: `time_density`


def diffusion_loss(
    path: DiffusionPath,
    llm: LLM,
    batch: Batch,
    key: Array,
    *,
    draws_per_context: int = 1,
    own_estimates: float = 0.0,
    times: TimeSampler = TIMES["uniform"],
    options: LossOptions = PLAIN,
) -> tuple[Float[Array, ""], Float[Array, "B M"]]:
    """Cross-entropy of the answers in nats (equation 5), and that of each position; differentiable w.r.t. `path`.

    Args:
      path: the diffusion path.
      llm: the frozen language model.
      batch: rows, with the positions that have a loss.
      key: for times, noise and class dropout.
      draws_per_context: noise samples per position; the loss is the mean over them.
      own_estimates: at this share of each row's positions, chosen at random, x_t shows the token that the path
        estimates at t = 0, as in decoding, instead of the true token.
      times: maps uniform samples to t.
      options: how the loss is reduced and computed.

    If the targets have worked steps (`config.data.working`), `next_steps` says what x_t shows and what the target is.
    """
    llm = jax.lax.stop_gradient(llm)
    batch, corruption = sample_corruptions(key, batch, path, draws_per_context=draws_per_context, times=times)
    context = path_context(path, llm, batch, remat=options.remat)
    shown, batch, t = next_steps(batch, corruption.t)
    corruption = corruption._replace(t=t)
    if own_estimates > 0:
        order = jnp.argsort(jax.random.uniform(jax.random.fold_in(key, 1), shown.shape), axis=1)
        chosen = jnp.sort(order[:, : max(round(own_estimates * shown.shape[1]), 1)], axis=1)
        own = first_estimates(path, llm, context, batch, corruption, chosen, chunk=options.chunk)
        shown = jnp.put_along_axis(shown, chosen, own, axis=1, inplace=False)
    hidden = correct(path, llm, context, batch._replace(targets=shown), corruption, remat=options.remat)
    losses = target_losses(llm, hidden, batch.targets, chunk=options.chunk)
    return jnp.sum(losses * loss_weights(batch.weights, options.reduction, segments=batch.query_segments)), losses


def next_steps(batch: Batch, t: Float[Array, "B M"]) -> tuple[Int[Array, "B M"], Batch, Float[Array, "B M"]]:
    """The tokens that x_t shows, the batch with the targets at t, and t. Without worked steps, nothing changes.

    With S worked steps, t becomes k / S. The target is step k, counted from 0, and at t = 1 the answer. x_t shows step
    k - 1, as in decoding with the solver `restart` in S intervals.
    """
    if batch.working is None:
        return batch.targets, batch, t
    states = jnp.concatenate([batch.working, batch.targets[..., None]], axis=-1)
    last = states.shape[-1] - 1
    step = jnp.minimum(jnp.floor(t * (last + 1)).astype(jnp.int32), last)[..., None]
    shown, target = (jnp.take_along_axis(states, at, axis=-1)[..., 0] for at in (jnp.maximum(step - 1, 0), step))
    return shown, batch._replace(targets=target), step[..., 0] / last


def first_estimates(
    path: DiffusionPath,
    llm: LLM,
    context: Context,
    batch: Batch,
    corruption: Corruption,
    chosen: Int[Array, "B k"],
    *,
    chunk: int,
) -> Int[Array, "B k"]:
    """The tokens that the path estimates at the chosen positions from noise alone, at t = 0, without a gradient."""

    def choose(array: Array) -> Array:
        return jnp.take_along_axis(array, chosen.reshape(*chosen.shape, *[1] * (array.ndim - 2)), axis=1)

    path, context = jax.lax.stop_gradient((path, context))
    fields = {name: value for name, value in context._asdict().items() if name != "cache"}
    fields, corruption, targets = jax.tree.map(choose, (fields, corruption, batch.targets))
    context, batch = context._replace(**fields), batch._replace(queries=chosen, targets=targets)
    hidden = correct(path, llm, context, batch, corruption._replace(t=jnp.zeros_like(corruption.t)))
    tokens: Array = map_logits(llm, hidden, diffusion.arg_max, chunk=chunk)
    return tokens


def path_context(path: DiffusionPath, llm: LLM, batch: Batch, *, remat: Remat = None) -> Context:
    """The context that the path reads; no gradient enters the frozen model."""
    reader = path.reader(jax.lax.stop_gradient(llm))
    return read_context(reader, batch, remat=None if path.config.reader == "lm" else remat)


def finetuning_loss(
    llm: LLM, batch: Batch, *, losses: Callable[..., Float[Array, "B M"]] = target_losses, options: LossOptions = PLAIN
) -> Float[Array, ""]:
    """Cross-entropy of the answers, in nats; differentiable with respect to the layers.

    The batch has one query per token; several are only for a path. `losses` is `target_losses` if the LM head is
    frozen, and `target_losses_with_trained_head` if it is trained.
    """
    hidden, _ = llm(batch.tokens, token_positions(batch), segments=batch.segments, remat=options.remat)
    if batch.queries is not None:
        hidden = jnp.take_along_axis(hidden, batch.queries[..., None], axis=1)
    values = losses(llm, hidden, batch.targets, chunk=options.chunk)
    return jnp.sum(values * loss_weights(batch.weights, options.reduction, segments=batch.query_segments))


def sample_corruption(key: Array, batch: Batch, path: DiffusionPath) -> Corruption:
    """Sample t, the noise and the class dropout, independently at each position."""
    config = path.config
    key_t, key_noise, key_drop = jax.random.split(key, 3)
    shape = batch.targets.shape
    labels = None
    if config.classes:
        dropped = jax.random.bernoulli(key_drop, config.class_dropout, shape)
        labels = jnp.where(dropped, config.classes, batch.classes.reshape(shape[0], -1))
    noise = jax.random.normal(key_noise, (*shape, config.width), jnp.float32)
    return Corruption(t=jax.random.uniform(key_t, shape, jnp.float32), noise=noise, labels=labels)


def sample_corruptions(
    key: Array, batch: Batch, path: DiffusionPath, *, draws_per_context: int, times: TimeSampler = TIMES["uniform"]
) -> tuple[Batch, Corruption]:
    """Repeat each query of the batch, and corrupt each copy by `sample_corruption` with a different key."""
    if draws_per_context == 1:
        corruption = sample_corruption(key, batch, path)
    else:
        keys = jax.random.split(key, draws_per_context)
        corruption = jax.vmap(lambda key: sample_corruption(key, batch, path), out_axes=2)(keys)
        corruption = jax.tree.map(lambda a: a.reshape(len(a), -1, *a.shape[3:]), corruption)
        batch = batch.repeat(draws_per_context)
    return batch, corruption._replace(t=times(corruption.t))


def correct(
    path: DiffusionPath, llm: LLM, context: Context, batch: Batch, corruption: Corruption, *, remat: Remat = None
) -> Float[Array, "B M D"]:
    """Hidden states, corrected by one evaluation of the path on the batch's targets, corrupted at the sampled t."""
    x = diffusion.interpolate(path.embed(llm.rows(batch.targets)), path.config.sigma * corruption.noise, corruption.t)
    context = context._replace(labels=corruption.labels)
    if batch.queries is None:  # attention has a faster kernel for queries in order
        context = context._replace(positions=None)
    return context.hidden + path(llm, x, corruption.t, context, remat=remat)


def loss_weights(
    weights: Float[Array, "*B M"], reduction: Reduction, *, segments: Int[Array, "*B M"] | None = None
) -> Float[Array, "*B M"]:
    """The weight of each position; the loss is the sum over positions of weight times cross-entropy.

    `reduction` "token" gives the mean over tokens. "example" gives the mean over examples of each example's token mean;
    examples of weight zero do not count. "sum" uses `weights` as they are. An example is a row or, with `segments`, the
    positions of a row that have the same number, from 0 to M. Leading axes are treated as one large batch.
    """
    if reduction == "sum":
        return weights
    if reduction == "token":
        return weights / jnp.maximum(jnp.sum(weights), 1)
    if segments is None:
        counts = per_position = jnp.sum(weights, axis=-1, keepdims=True)
    else:
        count = partial(jax.ops.segment_sum, num_segments=weights.shape[-1] + 1)
        counts = jnp.vectorize(count, signature="(m),(m)->(s)")(weights, segments)
        per_position = jnp.take_along_axis(counts, segments, axis=-1)
    return weights / jnp.maximum(per_position, 1) / jnp.maximum(jnp.sum(counts > 0), 1)
