"""What an exported folder holds and computes, by this project and by transformers."""

import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.loading import load
from l2d_jax.parity.recording import logits_at, read


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def logits(folder, *, seed=0):
    """Of the LM, and of one evaluation of the path where there is one."""
    model = load(folder, dtype="float32").model
    rng = np.random.default_rng(seed)
    ids = rng.integers(96, size=(2, 9))
    context = read(model.llm, ids)
    base = model.llm.logits(context.hidden)
    if model.path is None:
        return base, None
    x = jnp.asarray(rng.normal(size=(2, 9, model.path.config.width)), jnp.float32)
    return base, logits_at(model, context, 10 * x, 0.6)


def transformers_logits(model, *, seed=0):
    """The logits of a model of `transformers`."""
    torch = pytest.importorskip("torch")
    ids = np.random.default_rng(seed).integers(96, size=(2, 9))
    with torch.no_grad():
        return model.eval()(torch.from_numpy(ids)).logits.numpy()
