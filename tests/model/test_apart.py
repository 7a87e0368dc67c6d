"""A merged model whose matrices and updates lie apart, as on GPUs, is the model."""

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.model import l2d
from tests.support import tiny


@pytest.mark.slow  # test_lora.py compares the arrays, and the products of bfloat16
def test_an_answer_is_the_same_where_matrices_and_updates_lie_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    model, settings = tiny.model(), DecodeConfig(budget=3, max_new_tokens=4, parallel="on")
    request = Request(number_prompts([[5, 17, 3], [60, 2]]), settings)
    wanted = generate_tokens(model.merged(), request)
    monkeypatch.setattr(l2d, "platform", lambda: "gpu")
    apart = model.merged()
    assert apart.updating is not None
    assert isinstance(apart.updating.layers.up, list)
    assert generate_tokens(apart, request) == wanted
