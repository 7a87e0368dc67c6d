"""Measures the compiled training step, and compares it with the machine's matrix-product rate.

Weights and tokens are random, in the config's architecture; every position has a loss.
"""

import resource
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.data.batch import Batch, random_batch
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.model.lm_head import target_losses
from l2d_jax.performance import costs
from l2d_jax.performance.timing import matrix_products, medians
from l2d_jax.training.memory import check_training_memory
from l2d_jax.training.methods import method_of
from l2d_jax.training.objective import correct, sample_corruptions
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import REMAT, check_batch, init_state, make_step, micro_batches
from l2d_jax.weights import base_model


def measure_training(config: Config, mesh: Mesh) -> dict[str, Any]:
    """Measure tokens per second of the compiled step, seconds of its parts, and the machine's matrix-product rate."""
    check_batch(config.train, mesh)
    architecture = base_model.read_architecture(config.model)
    check_training_memory(config, architecture, mesh)
    method = method_of(config)
    trained, frozen = method.begin(base_model.BaseFiles(architecture, None, (), None), mesh)
    adam = optimizer(config.optim, config.optim.peak_rate)
    state = init_state(adam, trained, mesh)
    step = make_step(adam, config.train, state, mesh, objective=method.loss)
    batch = micro_batches(random_batch(config, architecture.vocab_size), config.train.micro_batches, mesh)
    parts = {}  # if the path reads the context, it cannot be separated from the frozen pass
    if frozen is not None and isinstance(trained, DiffusionPath) and trained.config.reader == "lm":
        found = _parts(config, trained, frozen, batch)
        parts = {name: config.train.micro_batches * seconds for name, seconds in found.items()}
    del trained  # steps donate it

    def run() -> None:
        nonlocal state
        state, results = step(state, frozen, batch, jax.random.key(2))
        float(results["loss"])

    run()  # compiles
    dtype = "float32" if config.model.dtype == "float32" else "bfloat16"  # of products
    multiply, operations = matrix_products(dtype=dtype)
    seconds, multiplying = medians(run, multiply)
    peak = operations / multiplying
    flops = costs.flops_per_step(config, architecture)
    tokens = config.train.batch_size * config.data.max_length
    rest = {"all else": {"seconds": seconds - sum(parts.values()), "FLOPs": 0}}
    return {
        "tokens per second": tokens / seconds,
        "seconds per step": seconds,
        "useful GFLOP/s": sum(flops.values()) / seconds / 1e9,
        "matrix product, GFLOP/s": peak / 1e9,
        "share of the matrix product's rate": sum(flops.values()) / seconds / peak,
        "peak memory of the process, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "parts": {name: {"seconds": took, "FLOPs": flops[name]} for name, took in parts.items()} | rest,
    }


def _parts(config: Config, path: DiffusionPath, llm: LLM, batch: Batch) -> dict[str, float]:
    """Seconds of the parts of a micro-batch, each compiled and run alone; keys are the names in `costs`."""
    micro, key = jax.tree.map(lambda array: array[0], batch), jax.random.key(3)
    micro, corruption = sample_corruptions(key, micro, path, draws_per_context=config.train.draws_per_context)

    def correct_alone(path: DiffusionPath, llm: LLM, context: Context, *, remat: Any = None) -> Any:
        return correct(path, llm, context, micro, corruption, remat=remat)

    def correct_and_pull(path: DiffusionPath, *read: Any) -> tuple[Any, Any]:
        hidden, pull = jax.vjp(lambda path: correct_alone(path, *read, remat=REMAT[config.train.remat]), path)
        return hidden, pull(hidden)

    def lose(hidden: Any, llm: LLM) -> tuple[Any, Any]:
        losses, pull = jax.vjp(lambda h: target_losses(llm, h, micro.targets, chunk=config.train.loss_chunk), hidden)
        return losses, pull(micro.weights)

    def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
        compiled = jax.jit(function)
        result = jax.block_until_ready(compiled(*arguments))
        return medians(lambda: jax.block_until_ready(compiled(*arguments)))[0], result

    frozen, context = timed(read_context, llm, micro)
    forward, hidden = timed(correct_alone, path, llm, context)
    both, _ = timed(correct_and_pull, path, llm, context)
    head, _ = timed(lose, hidden, llm)
    return {"frozen pass": frozen, "path forward": forward, "path backward": both - forward, "output head": head}
