"""A joint pass computes what the LM and the path compute one after the other, for every way to hold their weights."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.decoding.refinement.condition_table import build_table
from l2d_jax.model.context import Context
from l2d_jax.model.joint_pass import DiffusionRows, joint_pass
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.marks import slow

KINDS: dict[str, dict[str, Any]] = {
    "updates": {},
    "updates, a path that reads": {"start": "anchored", "reader": "path"},
    "copies": {"layers": "dense"},
    "copies that read": {"layers": "dense", "start": "anchored", "reader": "path"},
}


@jax.jit
def _apart(model: Model, tokens: Any, rows: DiffusionRows, cache: Any, labels: Any) -> tuple[Any, Any, Any]:
    """The LM's token, then the path at both of its positions."""
    assert model.path is not None
    positions = jnp.array([[6], [6]], jnp.int32)
    hidden, new = model.llm(tokens, positions, cache)
    context = Context(jnp.zeros((*rows.x.shape[:2], 32)), cache.extend(new), rows.positions, labels, inputs=rows.inputs)
    path = dataclasses.replace(model.path, config=dataclasses.replace(model.path.config))
    found = path(model.llm, rows.x, rows.t, context)
    return hidden, found, new.k


@pytest.mark.parametrize("kind", ["updates, a path that reads", "copies", *slow("updates", "copies that read")])
@pytest.mark.parametrize("family", ["llama", pytest.param("qwen", marks=pytest.mark.slow)])
@pytest.mark.parametrize("is_merged", [False, *slow(True)])
def test_one_pass_is_two(kind: str, family: str, is_merged: bool) -> None:
    model = tiny.model(family, **KINDS[kind])
    model = (model.merged() if is_merged else model).reading(refines=True)
    assert model.path is not None
    prompt = tiny.tokens(2, 6)
    _, read = jax.jit(lambda m, t, p: m.llm(t, p))(model, prompt, tiny.positions(prompt))
    cache = type(read).empty(model.llm.architecture, 2, 4, dtype=jnp.float32).beside(read)
    tokens = jnp.array([[3], [70]], jnp.int32)
    positions = jnp.array([[5, 5, 6]] * 2, jnp.int32)
    t = jnp.array([[0.25, 1.0, 0.0], [0.5, 0.25, 0.0]])
    x = 8 * jax.random.normal(jax.random.key(0), (2, 3, 16))
    inputs = jnp.concatenate([model.llm.lookup(prompt[:, -1:])] * 2 + [model.llm.lookup(tokens)], axis=1)
    hidden, correction, k = _apart(model, tokens, DiffusionRows(x, t, positions, inputs, None), cache, None)
    weight = model.path.merge_weight(t)
    for conditions in (None, build_table(model.llm, model.path, jnp.array([0.0, 0.25, 0.5, 1.0])).at(t, None)):
        rows = DiffusionRows(x, t, positions, inputs, conditions)
        found = jax.jit(joint_pass)(model, tokens, jnp.array([[6], [6]], jnp.int32), rows, cache)
        np.testing.assert_allclose(found.hidden, hidden, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(weight * found.features, correction, rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(found.new.k, k, rtol=1e-4, atol=1e-5)
