"""The loss of the baselines, which train the language model itself: next-token cross-entropy on answers.

The same batches, reductions and chunks of logits as for a diffusion path (`objective`), and no noise.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.llm import LLM
from l2d_jax.objective import (
    Batch,
    Reduction,
    average,
    in_chunks,
    negative_log_likelihood,
    target_losses,
    token_positions,
)


def loss(
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


def target_losses_of_all(
    llm: LLM, hidden: Float[Array, "B M D"], targets: Int[Array, "B M"], *, chunk: int = 1024
) -> Float[Array, "B M"]:
    """`target_losses` that are differentiable in the final norm and the output head, too.

    The backward pass makes the logits of a chunk again: their gradient in the head is a sum over all positions, whose
    weights are not known yet. The head is gathered in each chunk, so that this sum is kept in the type of the weights,
    and in shards.
    """

    @jax.checkpoint
    def at(hidden: Array, targets: Array) -> Array:
        return negative_log_likelihood(llm.with_whole_head().logits(hidden), targets)

    values: Array = in_chunks(at, (hidden, targets), chunk=chunk)
    return values
