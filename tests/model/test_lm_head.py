"""Logits of some positions at a time."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.model import lm_head
from tests.support import tiny


def test_map_logits_keeps_the_order_of_positions_and_never_holds_all_logits() -> None:
    llm, hidden = tiny.llm(), jax.random.normal(jax.random.key(0), (3, 5, 32))
    extra = jnp.arange(30, dtype=jnp.float32).reshape(3, 5, 2)

    def function(logits: jax.Array, extra: jax.Array) -> dict[str, jax.Array]:
        return {"best": jnp.argmax(logits, axis=-1), "extra": extra}

    def run(hidden: jax.Array, extra: jax.Array) -> Any:
        return lm_head.map_logits(llm, hidden, function, extra, chunk=4)

    found = jax.jit(run)(hidden, extra)
    np.testing.assert_array_equal(found["best"], jnp.argmax(llm.logits(hidden), axis=-1))
    np.testing.assert_array_equal(found["extra"], extra)
    text = str(jax.make_jaxpr(run)(hidden, extra))
    assert "f32[3,96]" in text  # one position of each of the three
    assert "f32[15,96]" not in text
    assert "f32[16,96]" not in text
    assert "f32[5,3,96]" not in text
