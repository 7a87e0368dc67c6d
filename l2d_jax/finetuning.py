"""The loss of the baselines, which train the language model itself: next-token cross-entropy on answers.

The same batches, reductions and chunks of logits as for a diffusion path (`objective`), and no noise.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from l2d_jax.batches import Batch
from l2d_jax.context import token_positions
from l2d_jax.llm import LLM
from l2d_jax.objective import Reduction, average
from l2d_jax.readout import target_losses


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
