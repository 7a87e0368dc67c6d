"""Wall-clock times, and what the machine can do at best: the rates that speeds are compared with."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

REPEATS = 3  # of a piece of work, of which the median counts


def median(work: Callable[[], object]) -> float:
    """Median wall-clock seconds of a piece of work."""
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return sorted(times)[REPEATS // 2]


def matmul_rate() -> float:
    """Floating-point operations per second of a float32 matrix product of 2048 x 2048."""
    size = 2048
    x = jnp.ones((size, size))
    product = jax.jit(jnp.matmul)
    jax.block_until_ready(product(x, x))
    return 2 * size**3 / median(lambda: jax.block_until_ready(product(x, x)))


def read_rate() -> float:
    """Bytes per second at which all devices together sum a float32 array of 256 MiB."""
    x = jnp.ones(2**26)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(x))
    return x.nbytes / median(lambda: jax.block_until_ready(total(x)))
