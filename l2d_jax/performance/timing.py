"""Wall-clock times, and the machine's best rates, which speeds are compared with."""

from collections.abc import Callable
from functools import partial
from timeit import timeit
from typing import Any

import jax
import jax.numpy as jnp

REPEATS = 5  # runs of a piece of work, whose median counts
PRODUCTS = 10  # in turn, of which a piece of work consists


def medians(*works: Callable[[], object]) -> list[float]:
    """Median wall-clock seconds of pieces of work, by `turns`."""
    return turns(*(partial(timeit, work, number=1) for work in works))


def turns(*works: Callable[[], float]) -> list[float]:
    """Medians of the seconds that works return, which take turns so that a shared machine slows them alike."""
    rounds = [[work() for work in works] for _ in range(REPEATS)]
    return [sorted(seconds)[REPEATS // 2] for seconds in zip(*rounds, strict=True)]


def matrix_products(size: int | None = None, *, dtype: Any = jnp.float32) -> tuple[Callable[[], object], int]:
    """A function that multiplies matrices, `size` x `size`, in turn, and its floating-point operations.

    By default they are as large as a device of this kind needs to be at its best.
    """
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(jnp.matmul)

    def multiply() -> None:
        jax.block_until_ready([product(x, x) for _ in range(PRODUCTS)])

    multiply()  # compiles
    return multiply, PRODUCTS * 2 * size**3


def read_rate() -> float:
    """Bytes per second at which all devices together sum a float32 array of 256 MiB."""
    x = jnp.ones(2**26)
    total = jax.jit(jnp.sum)
    jax.block_until_ready(total(x))
    return x.nbytes / medians(lambda: jax.block_until_ready(total(x)))[0]
