"""Measures decoding, and compares it with the rate at which the machine reads memory.

Weights and prompts are random, in the config's architecture. An evaluation of the path reads the path's layers (the
LM's layers with LoRA) and the LM head. Its time is the slope of the time per token over the budget.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.buckets import sample_bucket
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.parallel.begin import read_and_enter
from l2d_jax.decoding.parallel.pace import Order, Pace, can_be_parallel
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.model.axes import ADAPTED
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.performance.timing import read_rate, turns
from l2d_jax.weights import base_model, model_folder


def measure_decoding(
    config: Config, mesh: Mesh, *, batches: Sequence[int], budgets: Sequence[int], prompt: int, new: int
) -> dict[str, Any]:
    """Measure tokens per second at each batch size, budget and order of evaluations, and the time of an evaluation.

    `prompt` is the number of tokens of each prompt, whose prefill is not timed; `new` is the number of tokens to
    generate. The slope needs at least two budgets. The result has `rows` for each batch size and budget, `batches` for
    each batch size, the read rate in bytes per second, and how it was measured.
    """
    llm = LLM.declare(base_model.read_architecture(config.model), dtype=config.model.dtype)
    settings, remedy = dataclasses.replace(config.decode, max_new_tokens=new), "--batches, --prompt or --new"
    check_decoding_memory(llm, config.path, settings, rows=max(batches), longest=prompt, remedy=remedy)
    model = random_model(config, mesh).merged()
    read, (rate, method) = bytes_per_evaluation(model), read_rate(mesh)
    rows, slopes = [], []
    for batch in batches:
        shape = {"batch": batch, "prompt": prompt, "new": new}
        kinds = [(budget, order) for budget in budgets for order in orders(config, budget)]
        runs = [decoder(model, config, budget=budget, order=order, **shape) for budget, order in kinds]
        times = dict(zip(kinds, turns(*(run.generate for run in runs)), strict=True))
        for kind, run in zip(kinds, runs, strict=True):
            budget, order = kind
            seconds, passes = times[kind] / run.tokens(), run.passes()
            speed = {"tokens per second": batch / seconds, "seconds per token": seconds, "passes per token": passes}
            rows.append({"batch": batch, "budget": budget, "order": order.value, **speed})
        plain = [times[budget, Order.SEQUENTIAL] / new for budget in budgets]
        slope = float(np.polyfit(budgets, plain, 1)[0])
        slopes.append({"batch": batch, "seconds per evaluation": slope, "share of the read rate": read / slope / rate})
    rates = {"bytes per evaluation": read, "read rate": rate, "read rate of": method}
    return {"rows": rows, "batches": slopes, **rates}


def random_model(config: Config, mesh: Mesh) -> Model:
    """A model with random weights also in the path, because a path with its initial values does nothing."""
    architecture = base_model.read_architecture(config.model)
    llm = base_model.BaseFiles(architecture, None, (), None).load(dtype=config.model.dtype, mesh=mesh)
    path = model_folder.new_path(config.path, llm, mesh, seed=1)
    noise = jax.jit(lambda tree: jax.tree.map(lambda a: a + 0.01 * jax.random.normal(jax.random.key(2), a.shape), tree))
    return Model.build(llm, noise(path))


def bytes_per_evaluation(model: Model) -> int:
    """Bytes of the weights that an evaluation reads: the path's layers without modulation, and the LM head."""
    assert model.path is not None
    path, base = ([getattr(layers, name) for name in ADAPTED] for layers in (model.path.layers, model.llm.layers))
    head = model.llm.embed if model.llm.head is None else model.llm.head
    parts = (path, head) if model.path.adapter is None else (path, base, head)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parts))


def orders(config: Config, budget: int) -> list[Order]:
    """The possible orders of evaluations for a budget, given the config's solver, velocity and `parallel`."""
    settings = dataclasses.replace(config.decode, budget=budget, parallel="auto")
    if config.decode.parallel == "off" or not can_be_parallel(settings):
        return [Order.SEQUENTIAL]
    return [one for one in Order if one is not Order.STREAM or settings.draws == 1]


class TimedDecoder(NamedTuple):
    """A compiled decoder: its seconds after the prefill, and what its last run decoded."""

    generate: Callable[[], float]
    tokens: Callable[[], float]  # mean number of tokens per sequence
    passes: Callable[[], float]  # passes over the weights per token


def decoder(
    model: Model, config: Config, *, batch: int, budget: int, prompt: int, new: int, order: Order = Order.SEQUENTIAL
) -> TimedDecoder:
    """Compile a function that generates `new` tokens for all sequences, or makes `new` passes of a stream."""
    chosen = dataclasses.replace(config.decode, budget=budget)
    settings = Refinement.prepare(model, chosen)
    model = model.reading(refines=budget > 1)
    if order is not Order.SEQUENTIAL:
        window = Pace(model, batch).window([chosen])
        settings = settings.side_by_side([Grid(budget, chosen.end)], window=window)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(model.llm.architecture.vocab_size, size=(batch, prompt)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    options: dict[str, Any] = {"settings": settings, "sampling": SamplingOptions.from_config(chosen)}
    options["stop_ids"] = jnp.array([-1], jnp.int32)
    last: dict[str, Any] = {}

    def generate() -> float:
        read = (tokens, jnp.full(batch, prompt, jnp.int32), keys)
        if order is Order.STREAM:
            stages = settings.stages
            assert stages is not None
            begun = {"settings": settings, "sampling": options["sampling"]}
            stream = read_and_enter(model, *read, capacity=new, size=stages.size, **begun)
            stream = jax.block_until_ready(stream)
            began = time.perf_counter()
            _, emitted = jax.block_until_ready(stream_decoder()(model, stream, passes=new, **options))
            taken = time.perf_counter() - began
            count = max(1, int(emitted.is_new.sum()))
            last.update(tokens=count / batch, passes=batch * new / count)
        else:
            state = jax.block_until_ready(prefill(model.llm, *read, capacity=new))
            began = time.perf_counter()
            samples = sample_bucket(config.decode.draws)
            run = token_decoder()(model, state, steps=new, noise_samples=samples, **options)[1]
            jax.block_until_ready(run)
            taken = time.perf_counter() - began
            last.update(tokens=float(new), passes=float(run.passes.mean()))
        return taken

    generate()  # compiles
    return TimedDecoder(generate, lambda: last["tokens"], lambda: last["passes"])
