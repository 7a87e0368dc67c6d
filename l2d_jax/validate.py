"""What a model is worth on held-out answers: its loss (a path's by t), and teacher-forced accuracy against the budget.

Teacher-forced: every answer position is refined from noise with the true tokens before it. "Expected" accuracy is the
probability of the true token under untempered sampling, "greedy" whether it is the arg max. All budgets use the same
noise.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from l2d_jax import hosts
from l2d_jax.config import Config
from l2d_jax.llm import LLM
from l2d_jax.objective import Batch, Context, Draws, correct, draw, negative_log_likelihood, over_logits, read_context
from l2d_jax.refine import Model, Refinement, refine

RESAMPLES = 1000  # of the bootstrap over examples


class Tally:
    """Per-example sums of several measures, for means over tokens with bootstrap intervals over examples."""

    def __init__(self) -> None:
        self._sums: dict[str, list[np.ndarray]] = {}
        self._counts: list[np.ndarray] = []

    def add(self, weights: np.ndarray, values: dict[str, Any]) -> None:
        """Add a batch: `weights` and each value of shape [B, M]; rows of weight zero are padding."""
        real = weights.sum(axis=1) > 0
        self._counts.append(weights.sum(axis=1)[real])
        for name, value in values.items():
            sums = (np.asarray(value, np.float64) * weights).sum(axis=1)[real]
            self._sums.setdefault(name, []).append(sums)

    def mean(self, name: str, *, minus: str | None = None) -> tuple[float, float, float]:
        """Mean over tokens with the bounds of its 95 % interval; `minus` names a measure to subtract in pairs."""
        counts = np.concatenate(self._counts)
        sums = np.concatenate(self._sums[name])
        if minus is not None:
            sums = sums - np.concatenate(self._sums[minus])
        picks = np.random.default_rng(0).integers(len(counts), size=(RESAMPLES, len(counts)))
        means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
        low, high = np.quantile(means, [0.025, 0.975])
        return float(sums.sum() / counts.sum()), float(low), float(high)


@jax.jit
def _context(model: Model, batch: Batch) -> Context:
    return read_context(model.llm, batch)


@partial(jax.jit, static_argnames=("chunk", "bins"))
def _loss_by_bin(
    model: Model, context: Context, batch: Batch, key: Array, *, chunk: int, bins: int
) -> Float[Array, "bins B M"]:
    """Every position's loss at one t in each of the equal bins."""
    assert model.path is not None
    draws = draw(key, batch, model.path)
    path = model.path

    def at(index: Array) -> Array:
        t = (index + draws.t) / bins
        hidden = correct(path, model.llm, context, batch, Draws(t=t, noise=draws.noise, labels=draws.labels))
        return over_logits(model.llm, hidden, negative_log_likelihood, batch.targets, chunk=chunk)

    return jax.lax.map(at, jnp.arange(bins, dtype=jnp.float32))


@partial(jax.jit, static_argnames="chunk")
def _scores(
    model: Model, context: Context, batch: Batch, settings: Refinement, keys: Key[Array, " B"], *, chunk: int
) -> dict[str, Float[Array, "B M"]]:
    assert model.path is not None
    shape, width = batch.targets.shape, model.path.config.width
    noise_keys, velocity_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    noise = jax.vmap(lambda key: jax.random.normal(key, (shape[1], width)))(noise_keys)
    hidden = refine(
        model,
        context,
        noise,
        settings=settings,
        keys=jax.vmap(lambda key: jax.random.split(key, shape[1]))(velocity_keys),
    )

    return over_logits(model.llm, hidden, _accuracy, batch.targets, chunk=chunk)


def _accuracy(logits: Float[Array, "n V"], targets: Int[Array, " n"]) -> dict[str, Array]:
    return {
        "expected": jnp.exp(-negative_log_likelihood(logits, targets)),
        "greedy": (jnp.argmax(logits, axis=-1) == targets).astype(jnp.float32),
    }


@partial(jax.jit, static_argnames="chunk")
def _plain_scores(llm: LLM, batch: Batch, *, chunk: int) -> dict[str, Float[Array, "B M"]]:
    def read(logits: Float[Array, "n V"], targets: Int[Array, " n"]) -> dict[str, Array]:
        return {"loss": negative_log_likelihood(logits, targets)} | _accuracy(logits, targets)

    return over_logits(llm, read_context(llm, batch).hidden, read, batch.targets, chunk=chunk)


def validate_plain(llm: LLM, batches: Iterable[Batch], config: Config) -> dict[str, Any]:
    """The loss and the accuracy of a language model alone, by the keys of `validate` at a budget of 1."""
    tally = Tally()
    for batch in batches:
        values = _plain_scores(llm, batch, chunk=config.train.loss_chunk)
        named = {name if name == "loss" else f"{name}@1": hosts.gather(value) for name, value in values.items()}
        tally.add(hosts.gather(batch.weights), named)
    return _losses(tally) | _accuracies(tally, (1,))


def validate(
    model: Model, batches: Iterable[Batch], config: Config, *, budgets: Sequence[int] | None = None
) -> dict[str, Any]:
    """Loss, perplexity and loss by t bin, and accuracy at each budget with 95 % intervals over examples.

    Keys: `validation/loss` (nats), `validation/perplexity`, `validation/loss_by_t`, and for a budget n
    `validation/{expected,greedy}@n` with `…_interval`; `…_gain` is the paired difference to the smallest budget, with
    the bounds of its interval.
    """
    budgets = config.validation.budgets if budgets is None else budgets
    chunk, bins = config.train.loss_chunk, config.validation.time_bins
    settings = {budget: Refinement.from_config(config.decode, budget=budget) for budget in budgets}
    tally = Tally()
    key = jax.random.key(config.train.seed)
    for number, batch in enumerate(batches):
        batch_key = jax.random.fold_in(key, number)
        context = _context(model, batch)
        losses = hosts.gather(_loss_by_bin(model, context, batch, batch_key, chunk=chunk, bins=bins))
        values = {f"loss{i}": losses[i] for i in range(bins)} | {"loss": losses.mean(axis=0)}
        keys = jax.random.split(batch_key, len(batch.tokens))
        for budget, setting in settings.items():
            scores = _scores(model, context, batch, setting, keys, chunk=chunk)
            values |= {f"{name}@{budget}": hosts.gather(value) for name, value in scores.items()}
        tally.add(hosts.gather(batch.weights), values)
    by_t = {"validation/loss_by_t": [tally.mean(f"loss{i}")[0] for i in range(bins)]}
    return _losses(tally) | by_t | _accuracies(tally, budgets)


def _losses(tally: Tally) -> dict[str, Any]:
    loss = tally.mean("loss")[0]
    return {"validation/loss": loss, "validation/perplexity": float(np.exp(loss))}


def _accuracies(tally: Tally, budgets: Sequence[int]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for budget in budgets:
        for name in ("expected", "greedy"):
            mean, *interval = tally.mean(f"{name}@{budget}")
            report[f"validation/{name}@{budget}"] = mean
            report[f"validation/{name}@{budget}_interval"] = interval
            report[f"validation/{name}@{budget}_gain"] = tally.mean(f"{name}@{budget}", minus=f"{name}@{min(budgets)}")
    return report
