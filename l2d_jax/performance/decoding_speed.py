"""Measures decoding, and compares it with the rate at which the machine reads memory.

Weights and prompts are random, in the config's architecture. An evaluation of the path has to read the path's layers,
which are the LM's with their LoRA, and the LM head; its time is the slope of the time per token over the budget.
"""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.decoding import decode
from l2d_jax.decoding.buckets import sample_bucket
from l2d_jax.decoding.refine import Refinement
from l2d_jax.decoding.requests import check_decoding_memory
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.model.axes import ADAPTED
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.performance.timing import read_rate, turns
from l2d_jax.weights import base_model, model_folder


def measure_decoding(
    config: Config, mesh: Mesh, *, batches: Sequence[int], budgets: Sequence[int], prompt: int, new: int
) -> dict[str, Any]:
    """Tokens per second at each batch size and budget, and each batch size's time per evaluation.

    `prompt` and `new` are tokens: those of each prompt, whose prefill is not timed, and those to generate, which are
    timed. The slope needs two budgets at least. The result has `rows` for each batch size and budget, `batches` for
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
        times = [seconds / new for seconds in turns(*(decoder(model, config, budget=b, **shape) for b in budgets))]
        for budget, seconds in zip(budgets, times, strict=True):
            speed = {"tokens per second": batch / seconds, "seconds per token": seconds}
            rows.append({"batch": batch, "budget": budget, **speed})
        slope = float(np.polyfit(budgets, times, 1)[0])
        slopes.append({"batch": batch, "seconds per evaluation": slope, "share of the read rate": read / slope / rate})
    rates = {"bytes per evaluation": read, "read rate": rate, "read rate of": method}
    return {"rows": rows, "batches": slopes, **rates}


def random_model(config: Config, mesh: Mesh) -> Model:
    """A model with random weights, in every leaf of the path, since a path at its initial values does nothing."""
    architecture = base_model.read_architecture(config.model)
    llm = base_model.BaseFiles(architecture, None, (), None).load(dtype=config.model.dtype, mesh=mesh)
    path = model_folder.new_path(config.path, llm, mesh, seed=1)
    noise = jax.jit(lambda tree: jax.tree.map(lambda a: a + 0.01 * jax.random.normal(jax.random.key(2), a.shape), tree))
    return Model.build(llm, noise(path))


def bytes_per_evaluation(model: Model) -> int:
    """Bytes of the weights that one evaluation reads: the path's layers without their modulation, and the LM head."""
    assert model.path is not None
    path, base = ([getattr(layers, name) for name in ADAPTED] for layers in (model.path.layers, model.llm.layers))
    head = model.llm.embed if model.llm.head is None else model.llm.head
    parts = (path, head) if model.path.adapter is None else (path, base, head)
    return sum(leaf.nbytes for leaf in jax.tree.leaves(parts))


def decoder(model: Model, config: Config, *, batch: int, budget: int, prompt: int, new: int) -> Callable[[], float]:
    """A compiled function that generates the new tokens of all sequences; it returns the seconds after the prefill."""
    settings = Refinement.prepare(model, dataclasses.replace(config.decode, budget=budget))
    model = model.reading(refines=budget > 1)
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(model.llm.architecture.vocab_size, size=(batch, prompt)), jnp.int32)
    keys = jax.random.split(jax.random.key(0), batch)
    options: dict[str, Any] = {"settings": settings, "sampling": SamplingOptions.from_config(config.decode)}
    options |= {
        "stop_ids": jnp.array([-1], jnp.int32),
        "steps": new,
        "noise_samples": sample_bucket(config.decode.draws),
    }

    def generate() -> float:
        state = decode.prefill(model.llm, tokens, jnp.full(batch, prompt, jnp.int32), keys, capacity=new)
        jax.block_until_ready(state)
        began = time.perf_counter()
        jax.block_until_ready(decode.token_decoder()(model, state, **options)[1])
        return time.perf_counter() - began

    generate()  # compiles
    return generate
