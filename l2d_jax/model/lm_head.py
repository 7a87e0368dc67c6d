"""The LM head, applied to a few positions at a time: the logits of a whole batch never exist."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.distributed.sharding import axis_size
from l2d_jax.model.llm import LLM


def map_logits(
    llm: LLM, hidden: Float[Array, "B M *draws D"], function: Callable[..., Any], *arrays: Array, chunk: int = 1024
) -> Any:
    """Apply `function(logits, *arrays)` at every position without holding all logits in memory.

    The function maps float32 logits [n, *draws, V] and the slices [n, ...] of `arrays`, each [B, M, ...], to arrays
    [n, ...]. Each device holds the logits of `chunk` positions at a time, but at least one position per sequence.
    """
    llm = llm.with_whole_head()
    return _in_chunks(lambda h, *slices: function(llm.logits(h), *slices), (hidden, *arrays), chunk=chunk)


def target_losses(
    llm: LLM, hidden: Float[Array, "B M D"], targets: Int[Array, "B M"], *, chunk: int = 1024
) -> Float[Array, "B M"]:
    """Cross-entropy of each target, in nats; differentiable with respect to `hidden`.

    The gradient of each position is computed together with its loss and scaled later, so the backward pass does not
    compute the logits again.
    """
    return _target_losses(hidden, llm.with_whole_head(), targets, chunk)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _target_losses(hidden: Array, llm: LLM, targets: Array, chunk: int) -> Array:
    losses: Array = _in_chunks(lambda h, at: negative_log_likelihood(llm.logits(h), at), (hidden, targets), chunk=chunk)
    return losses


def _losses_and_gradient(hidden: Array, llm: LLM, targets: Array, chunk: int) -> tuple[Array, Array]:
    def at(hidden: Array, targets: Array) -> tuple[Array, Array]:
        values, pull = jax.vjp(lambda h: negative_log_likelihood(llm.logits(h), targets), hidden)
        return values, pull(jnp.ones_like(values))[0]

    losses, gradient = _in_chunks(at, (hidden, targets), chunk=chunk)
    return losses, gradient


def _scaled_gradient(_chunk: int, gradient: Array, cotangent: Array) -> tuple[Array, None, None]:
    return (cotangent[..., None] * gradient).astype(gradient.dtype), None, None


_target_losses.defvjp(_losses_and_gradient, _scaled_gradient)


def target_losses_with_trained_head(
    llm: LLM, hidden: Float[Array, "B M D"], targets: Int[Array, "B M"], *, chunk: int = 1024
) -> Float[Array, "B M"]:
    """`target_losses` that are also differentiable with respect to the final norm and the LM head.

    The backward pass computes the logits of each chunk again, because the head's gradient is a sum over all positions
    with weights that the forward pass does not know yet. Each chunk gathers the head, so that this sum stays sharded,
    in the dtype of the weights.
    """

    @jax.checkpoint
    def at(hidden: Array, targets: Array) -> Array:
        return negative_log_likelihood(llm.with_whole_head().logits(hidden), targets)

    values: Array = _in_chunks(at, (hidden, targets), chunk=chunk)
    return values


def _in_chunks(function: Callable[..., Any], arrays: tuple[Array, ...], *, chunk: int) -> Any:
    """Apply `function` to flat slices [n, ...] of arrays [B, M, ...]: a few columns of each device's rows at a time."""
    batch, length = arrays[0].shape[:2]
    parts = axis_size("context") if length % axis_size("context") == 0 else 1
    rows = -(-batch // (axis_size("data") * axis_size("fsdp")))  # per device
    columns = length // parts
    width = min(max(chunk // rows, 1), columns)
    pad = -columns % width
    pieces = (columns + pad) // width

    def split(a: Array) -> Array:
        rest = a.shape[2:]
        a = jnp.pad(a.reshape(batch, parts, columns, *rest), [(0, 0), (0, 0), (0, pad)] + [(0, 0)] * len(rest))
        return jnp.moveaxis(a.reshape(batch, parts, pieces, width, *rest), 2, 0).reshape(pieces, -1, *rest)

    def join(a: Array) -> Array:
        rest = a.shape[2:]
        a = jnp.moveaxis(a.reshape(pieces, batch, parts, width, *rest), 0, 2)
        return a.reshape(batch, parts, columns + pad, *rest)[:, :, :columns].reshape(batch, length, *rest)

    slices = jax.tree.map(split, arrays)
    if pieces == 1:
        result = jax.tree.map(lambda a: a[None], function(*(a[0] for a in slices)))
    else:
        result = jax.lax.map(lambda piece: function(*piece), slices)
    return jax.tree.map(join, result)


def negative_log_likelihood(logits: Float[Array, "n V"], targets: Int[Array, " n"]) -> Float[Array, " n"]:
    """Cross-entropy of each target, in nats."""
    return jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
