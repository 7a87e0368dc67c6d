"""Measures held-out answers: the loss (of a path by t), and teacher-forced accuracy against the budget.

Teacher-forced means that every answer position is refined with the true tokens before it, from noise that is the same
at all budgets. "Expected" accuracy is the probability of the true token; "greedy" accuracy: whether it is the arg max.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, Key

from l2d_jax.config.schema import Config
from l2d_jax.data.batch import Batch
from l2d_jax.data.examples import Examples
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.sampler import entropy
from l2d_jax.distributed import processes, sharding
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.l2d import Model
from l2d_jax.model.lm_head import map_logits, negative_log_likelihood
from l2d_jax.statistics import BootstrapSums
from l2d_jax.training.held_out.corrections import token_values
from l2d_jax.training.objective import correct, next_steps, sample_corruption

MEASURES = ("loss", "expected", "greedy")  # at every setting


_context = jax.jit(read_context)


@partial(jax.jit, static_argnames=("chunk", "bins"))
def _loss_by_bin(
    model: Model, context: Context, batch: Batch, key: Array, *, chunk: int, bins: int
) -> Float[Array, "bins B M"]:
    """The loss of every position at one t in each of `bins` equal bins."""
    path = model.path
    assert path is not None
    sampled = sample_corruption(key, batch, path)

    def at(index: Array) -> Array:
        shown, stepped, t = next_steps(batch, (index + sampled.t) / bins)
        hidden = correct(path, model.llm, context, batch._replace(targets=shown), sampled._replace(t=t))
        return map_logits(model.llm, hidden, negative_log_likelihood, stepped.targets, chunk=chunk)

    return jax.lax.map(at, jnp.arange(bins, dtype=jnp.float32))


@partial(jax.jit, static_argnames="chunk")
def _scores(
    model: Model, context: Context, batch: Batch, settings: Refinement, keys: Key[Array, " B"], *, chunk: int
) -> dict[str, Float[Array, "B M"]]:
    shape, width = batch.targets.shape, 1 if model.path is None else model.path.config.width
    noise_keys, velocity_keys = jax.vmap(jax.random.split, out_axes=1)(keys)
    noise = jax.vmap(lambda key: jax.random.normal(key, (shape[1], width)))(noise_keys)
    position_keys = jax.vmap(lambda key: jax.random.split(key, shape[1]))(velocity_keys)
    hidden, _ = refine(model, context, noise, settings=settings, keys=position_keys)

    def read(logits: Float[Array, "n V"], targets: Int[Array, " n"]) -> dict[str, Array]:
        loss = negative_log_likelihood(logits, targets)
        is_right = (diffusion.arg_max(logits) == targets).astype(jnp.float32)
        return {"loss": loss, "expected": jnp.exp(-loss), "greedy": is_right, "entropy": entropy(logits)}

    return map_logits(model.llm, hidden, read, batch.targets, chunk=chunk)


def teacher_forced_sums(
    model: Model, batches: Iterable[Batch], config: Config, settings: Mapping[str, Refinement], *, corrections: bool
) -> BootstrapSums:
    """Sums of loss, expected and greedy accuracy at each of the named settings.

    Their names are `loss@name` and so on for all `MEASURES`. A path also has `loss0`, `loss1`, ..., for one evaluation
    in each bin of t, and their mean `loss`. With `corrections` there are also the values of `token_values`.
    """
    chunk, bins = config.train.loss_chunk, config.validation.time_bins
    sums, key = BootstrapSums(), jax.random.key(config.train.seed)
    reading = model.reading(refines=True)
    for number, batch in enumerate(batches):
        batch_key = jax.random.fold_in(key, number)
        read = _context(reading.llm, batch)
        plain = read if reading.llm is model.llm else _context(model.llm, batch)
        values: dict[str, Any] = {}
        if model.path is not None:
            losses = processes.gather_array(_loss_by_bin(model, read, batch, batch_key, chunk=chunk, bins=bins))
            values = {f"loss{i}": losses[i] for i in range(bins)} | {"loss": losses.mean(axis=0)}
        keys, weights = jax.random.split(batch_key, len(batch.tokens)), processes.gather_array(batch.weights)
        scores = {}
        for name, setting in settings.items():
            scored = _scores(model, read if setting.steps > 0 else plain, batch, setting, keys, chunk=chunk)
            scores[name] = {kind: processes.gather_array(value) for kind, value in scored.items()}
            values |= {f"{kind}@{name}": scores[name][kind] for kind in MEASURES}
        if corrections and model.path is not None:
            values |= token_values(scores, weights)
        sums.add(weights, values)
    return sums


def validate(
    model: Model, batches: Iterable[Batch], config: Config, *, budgets: Sequence[int] | None = None
) -> dict[str, Any]:
    """Loss, perplexity, loss by bin of t, and the measures at each budget, with 95 % intervals over examples.

    Keys: `validation/loss` (nats; for a path, the mean over t of one evaluation), `validation/perplexity`, for a path
    `validation/loss_by_t`, and for each budget n `validation/{loss,expected,greedy}@n` with `…_interval`. `…_gain` is
    the paired difference from the smallest budget, with its interval. Without a path the only budget is 1.
    """
    budgets = config.validation.budgets if budgets is None else budgets
    budgets = budgets if model.path is not None else (1,)
    settings = {str(budget): Refinement.from_config(config.decode, budget=budget) for budget in budgets}
    if config.decode.must_be_parallel:  # not with "auto": with this many positions, extra rows cost time
        settings = {name: one.side_by_side([Grid(int(name), config.decode.end)]) for name, one in settings.items()}
    sums = teacher_forced_sums(model, batches, config, settings, corrections=False)
    loss = sums.mean("loss@1" if model.path is None else "loss")[0]
    report: dict[str, Any] = {"validation/loss": loss, "validation/perplexity": float(np.exp(loss))}
    if model.path is not None:
        report["validation/loss_by_t"] = [sums.mean(f"loss{i}")[0] for i in range(config.validation.time_bins)]
    for name in (f"{kind}@{budget}" for budget in budgets for kind in MEASURES):
        mean, *interval = sums.mean(name)
        report |= {f"validation/{name}": mean, f"validation/{name}_interval": interval}
        report[f"validation/{name}_gain"] = sums.mean(name, minus=f"{name.partition('@')[0]}@{min(budgets)}")
    return report


def placed_in_order(examples: Examples, batch_size: int, mesh: Mesh) -> Iterator[Batch]:
    """Yield each example once, in batches on the mesh, padded with empty rows so that the mesh divides them."""
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    held = sharding.rows_on_devices(mesh, -(-batch_size // shards) * shards)
    place = partial(jax.make_array_from_process_local_data, sharding.batch_sharding(mesh))
    return (jax.tree.map(place, batch) for batch in examples.in_order(batch_size, rows=held))
