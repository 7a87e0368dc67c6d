"""A scan that can end early, so that one program serves several numbers of steps."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int


def bounded_scan(
    step: Callable[[Any, None], tuple[Any, Any]], carry: Any, *, length: int, limit: Int[Array, ""] | None
) -> tuple[Any, Any]:
    """`jax.lax.scan` over `length` steps, of which only the first `limit` run; the outputs of the others are zeros."""
    if limit is None:
        return jax.lax.scan(step, carry, None, length=length)
    outputs = jax.tree.map(
        lambda output: jnp.zeros((length, *output.shape), output.dtype),
        jax.eval_shape(step, carry, None)[1],
    )

    def body(number: Int[Array, ""], carried: tuple[Any, Any]) -> tuple[Any, Any]:
        carry, outputs = carried
        carry, new = step(carry, None)
        return carry, jax.tree.map(lambda rows, row: rows.at[number].set(row), outputs, new)

    return jax.lax.fori_loop(0, limit, body, (carry, outputs))
