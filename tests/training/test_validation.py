"""Validation: the report against the loss and the plain model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import Config
from l2d_jax.model.context import read_context
from l2d_jax.training import objective
from l2d_jax.training.held_out import validation
from l2d_jax.training.objective import Corruption
from tests.support import tiny


@pytest.mark.slow
def test_the_report(mesh: Any) -> None:
    """Two batches, the second with a row of padding; a budget of one is the language model."""
    model = tiny.model()
    assert model.path is not None
    first, second = tiny.batch(examples=2, seed=0), tiny.batch(examples=2, seed=1)
    second = second._replace(weights=second.weights.at[1].set(0.0))
    raw = {"model": {"name": "unused"}, "validation": {"time_bins": 2, "budgets": (1, 3)}, "decode": {"budget": 3}}
    config = Config.from_dict(raw)
    report = validation.validate(model, [first, second], config)

    weights, losses, greedy, expected = [], [], [], []
    for number, batch in enumerate((first, second)):
        context = read_context(model.llm, batch)
        draws = objective.sample_corruption(
            jax.random.fold_in(jax.random.key(config.train.seed), number), batch, model.path
        )
        for index in range(2):
            moved = Corruption(t=(index + draws.t) / 2, noise=draws.noise, labels=None)
            logits = model.llm.logits(objective.correct(model.path, model.llm, context, batch, moved))
            losses.append(
                jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch.targets[..., None], -1)[..., 0]
            )
        logits = model.llm.logits(context.hidden)
        greedy.append(jnp.argmax(logits, axis=-1) == batch.targets)
        expected.append(jnp.take_along_axis(jax.nn.softmax(logits), batch.targets[..., None], -1)[..., 0])
        weights.append(batch.weights)

    def mean(values: list[jax.Array]) -> float:
        return float(np.average(np.concatenate(values), weights=np.concatenate(weights)))

    by_bin = [mean(losses[0::2]), mean(losses[1::2])]
    np.testing.assert_allclose(report["validation/loss_by_t"], by_bin, rtol=1e-4)
    np.testing.assert_allclose(report["validation/loss"], np.mean(by_bin), rtol=1e-4)
    np.testing.assert_allclose(report["validation/perplexity"], np.exp(np.mean(by_bin)), rtol=1e-3)
    np.testing.assert_allclose(report["validation/greedy@1"], mean(greedy), atol=1e-6)
    np.testing.assert_allclose(report["validation/expected@1"], mean(expected), rtol=1e-4)
    assert report["validation/expected@1_gain"] == (0.0, 0.0, 0.0)
    gain = report["validation/expected@3"] - report["validation/expected@1"]
    mean_gain, low, high = report["validation/expected@3_gain"]
    np.testing.assert_allclose(mean_gain, gain, atol=1e-6)
    assert low <= mean_gain <= high
    low, high = report["validation/expected@3_interval"]
    assert low <= report["validation/expected@3"] <= high
    again = validation.validate(model, [first, second], config, budgets=(3,))
    assert again["validation/expected@3"] == report["validation/expected@3"]  # the same noise, whatever the budgets
