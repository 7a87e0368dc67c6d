"""A merged model whose matrices and updates lie apart, as on GPUs, is the model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.model import l2d
from tests.support import tiny


def test_updates_lie_apart_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = tiny.model(), DecodeConfig(budget=3, max_new_tokens=4, parallel="on")
    request = Request(number_prompts([[5, 17, 3], [60, 2]]), settings)
    wanted = generate_tokens(model.merged(), request)
    monkeypatch.setattr(l2d, "platform", lambda: "gpu")
    apart = model.merged()
    assert apart.updating is not None
    assert isinstance(apart.llm.layers.up, list)
    for name in ("q", "o", "gate", "up", "down"):
        updates, stacked = getattr(apart.updating.layers, name), getattr(model.path.layers, name)
        rebuilt = jax.tree.map(lambda *factors: jnp.stack(factors), *updates)
        np.testing.assert_array_equal(rebuilt.a, stacked.a)
        np.testing.assert_array_equal(rebuilt.b, stacked.b)
    assert generate_tokens(apart, request) == wanted
