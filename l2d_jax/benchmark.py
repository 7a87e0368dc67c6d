"""Measures speed on this machine: `python -m l2d_jax.benchmark train --config configs/smollm2_135m.py`.

Random weights of the config's architecture and random tokens, so that nothing is downloaded; every position carries a
loss. The rate of a float32 matrix product, taken in the same run, says what the machine could do.
"""

import json
import resource
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from l2d_jax import accounting, command_line, models, runtime, sharding
from l2d_jax.config import Config
from l2d_jax.llm import LLM
from l2d_jax.objective import Batch
from l2d_jax.optim import optimizer
from l2d_jax.step import TrainState, check_batch, make_step, micro_batches, optimizer_shardings

REPEATS = 3  # timed steps, of which the median counts


def main() -> None:
    """Parse the command line, measure, and print the figures."""
    parser = command_line.Parser(prog="python -m l2d_jax.benchmark", description=__doc__)
    parser.add_argument("work", choices=["train"], help="what to measure")
    parser.add_argument("--config", default="configs/smollm2_135m.py", help=command_line.CONFIG_HELP)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options, config = parser.parse_with_config()
    figures = training(config, runtime.start(config.mesh))
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        print(f"{name:<36} {value:>12,.2f}")


def training(config: Config, mesh: Mesh) -> dict[str, float]:
    """Tokens per second of the compiled training step, and what share of the machine's matrix-product rate that is."""
    check_batch(config.train, mesh)
    architecture = models.read_architecture(config.model)
    declared = LLM.declare(architecture, dtype=jnp.dtype(config.model.dtype))
    llm = sharding.initialize(declared, jax.random.key(0), mesh)
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
    flops = sum(accounting.flops_per_token(architecture, config.path).values()) * tokens / seconds
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
    width = config.data.answer_length or length
    arrays: dict[str, Any] = {
        "tokens": rng.integers(vocab_size, size=(rows, length), dtype=np.int32),
        "queries": np.tile(np.arange(length - width, length, dtype=np.int32), (rows, 1)),
        "targets": rng.integers(vocab_size, size=(rows, width), dtype=np.int32),
        "weights": np.ones((rows, width), np.float32),
        "classes": np.zeros(rows, np.int32),
    }
    return Batch(**arrays)


def matmul_rate() -> float:
    """Floating-point operations per second of a float32 matrix product of 2048 x 2048."""
    size = 2048
    x = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    return 2 * size**3 / median(lambda: jax.block_until_ready(product(x, x)))


def median(work: Callable[[], object]) -> float:
    """Median wall-clock seconds of a piece of work."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]


if __name__ == "__main__":
    command_line.run(main)
