"""How fast the compiled training step is, as a share of the machine's matrix-product rate.

Random weights of the config's architecture and random tokens; every position carries a loss.
"""

import resource
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from l2d_jax import accounting, models
from l2d_jax.config import Config
from l2d_jax.objective import Batch
from l2d_jax.optim import optimizer
from l2d_jax.step import TrainState, check_batch, make_step, micro_batches, optimizer_shardings
from l2d_jax.timing import matmul_rate, median


def training(config: Config, mesh: Mesh) -> dict[str, float]:
    """Tokens per second of the compiled training step, and what share of the machine's matrix-product rate that is."""
    check_batch(config.train, mesh)
    architecture = models.read_architecture(config.model)
    llm = models.random_base(architecture, mesh, dtype=config.model.dtype)
    path = models.new_path(config.path, llm, mesh, seed=1)
    adam = optimizer(config.optim, config.optim.peak_rate)
    moments = jax.jit(adam.init, out_shardings=optimizer_shardings(adam, path, mesh))(path)
    state = TrainState(path=path, optimizer=moments)
    step = make_step(adam, config.train, state, mesh)
    batch = micro_batches(random_batch(config, architecture.vocab_size), config.train.accumulation, mesh)

    def run() -> None:
        nonlocal state
        state, results = step(state, llm, batch, jax.random.key(2))
        float(results["loss"])

    run()  # compiles
    seconds = median(run)
    tokens = config.train.batch_size * config.data.max_length
    counts = accounting.flops_per_token(architecture, config.path, draws_per_context=config.train.draws_per_context)
    flops = sum(counts.values()) * tokens / seconds
    peak = matmul_rate()
    return {
        "tokens per second": tokens / seconds,
        "seconds per step": seconds,
        "useful GFLOP/s": flops / 1e9,
        "float32 matrix product, GFLOP/s": peak / 1e9,
        "share of the matrix product's rate": flops / peak,
        "peak memory of the process, GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def random_batch(config: Config, vocab_size: int) -> Batch:
    """Full rows of random tokens, in the config's shape, as NumPy arrays like those of the data loader."""
    rng = np.random.default_rng(0)
    rows, length = config.train.batch_size, config.data.max_length
    width, is_packed = config.data.answer_length or length, config.data.packing
    arrays: dict[str, Any] = {
        "tokens": rng.integers(vocab_size, size=(rows, length), dtype=np.int32),
        "queries": None if width == length else np.tile(np.arange(length - width, length, dtype=np.int32), (rows, 1)),
        "targets": rng.integers(vocab_size, size=(rows, width), dtype=np.int32),
        "weights": np.ones((rows, width), np.float32),
        "classes": np.zeros((rows, width) if is_packed else rows, np.int32),
        "segments": np.ones((rows, length), np.int32) if is_packed else None,
    }
    return Batch(**arrays)
