"""Wall-clock times, and the machine's best rates, with which speeds are compared."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from timeit import timeit
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import monitoring
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from l2d_jax.distributed.memory import device_bytes
from l2d_jax.model.few_rows import can_read, few_rows_logits

REPEATS = 5  # runs of each piece of work; the median counts
PRODUCTS = 10  # matrix products per run
ARRAYS, WIDTH, PASSES = 4, 4096, 4  # reading: number of arrays, their columns, and how often each is read


def medians(*works: Callable[[], object]) -> list[float]:
    """Median wall-clock seconds of pieces of work, which run in turns."""
    return turns(*(partial(timeit, work, number=1) for work in works))


def turns(*works: Callable[[], float]) -> list[float]:
    """Medians of the seconds that `works` return. They run in turns, so that a shared machine slows all alike."""
    rounds = [[work() for work in works] for _ in range(REPEATS)]
    return [sorted(seconds)[REPEATS // 2] for seconds in zip(*rounds, strict=True)]


@contextmanager
def run_seconds() -> Iterator[list[float]]:
    """Wall-clock seconds of the block, without tracing and compilation; known when it ends."""
    spans: list[tuple[float, float]] = []

    def add(event: str, start_time: float, end_time: float, **_: str | int) -> None:
        if event.startswith("/jax/core/compile/"):
            spans.append((start_time, end_time))

    monitoring.register_event_time_span_listener(add)
    found: list[float] = []
    began = time.perf_counter()
    try:
        yield found
    finally:
        monitoring.unregister_event_time_span_listener(add)
        seconds, until = time.perf_counter() - began, 0.0
        for start, end in sorted(spans):  # programs call programs: a span may contain others
            seconds -= max(0.0, end - max(start, until))
            until = max(until, end)
        found.append(seconds)


def matrix_products(size: int | None = None, *, dtype: Any = jnp.float32) -> tuple[Callable[[], object], int]:
    """A function that multiplies `size` x `size` matrices, and its number of floating-point operations.

    By default they are large enough for a device of this kind to reach its best rate.
    """
    size = size or (2048 if jax.default_backend() == "cpu" else 8192)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(jnp.matmul)

    def multiply() -> None:
        jax.block_until_ready([product(x, x) for _ in range(PRODUCTS)])

    multiply()  # compiles
    return multiply, PRODUCTS * 2 * size**3


class ReadRate(NamedTuple):
    """The rate at which all devices together read their memory, and how it was measured."""

    rate: float  # bytes per second
    method: str


def read_rate(mesh: Mesh | None = None) -> ReadRate:
    """The best rate of programs that only read float32 arrays, which are sharded over the mesh.

    The arrays are much larger than any cache, and a program reads them several times, so that its start does not count.
    """
    size = _readable_bytes()
    shape = (max(1, size // (ARRAYS * WIDTH * 4 * jax.device_count())) * jax.device_count(), WIDTH)
    placed = None if mesh is None else NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    make = jax.jit(lambda: jnp.ones(shape), out_shardings=placed)
    arrays = [make() for _ in range(ARRAYS)]
    ways: dict[str, Any] = {"sums": lambda a, x: (a + x[0]).sum(), "products": lambda a, x: (a @ x).max()}
    if can_read(arrays[0]):
        ways["products by few_rows"] = lambda a, x: few_rows_logits(x[None], a).max()
    read = PASSES * sum(array.nbytes for array in arrays)
    seconds = {name: min(_read_times(way, arrays)) for name, way in ways.items()}
    best = min(seconds, key=lambda name: seconds[name])
    return ReadRate(read / seconds[best], f"{best} of {ARRAYS} arrays of {arrays[0].nbytes / 2**30:.2f} GiB")


def _read_times(way: Callable[[Array, Array], Array], arrays: list[Array]) -> list[float]:
    """Seconds of several runs of a program that reads all arrays `PASSES` times."""

    def program(arrays: list[Array], x: Array) -> Array:
        def read(x: Array, _: None) -> tuple[Array, None]:
            for array in arrays:  # each read depends on the one before; otherwise XLA would read the arrays once
                x = x + 1e-30 * way(array, x)
            return x, None

        return jax.lax.scan(read, x, None, length=PASSES)[0]

    compiled, x = jax.jit(program), jnp.ones(WIDTH)

    def run() -> None:
        jax.block_until_ready(compiled(arrays, x))

    run()  # compiles
    return [timeit(run, number=1) for _ in range(REPEATS)]


def _readable_bytes() -> int:
    """Bytes to read on all devices: several GiB, at most an eighth of free memory, and at most 1 GiB on CPUs."""
    device, there = jax.local_devices()[0], device_bytes() or 2**33
    if device.platform == "cpu":
        return min(2**30, there // 8)
    taken = (device.memory_stats() or {}).get("bytes_in_use", 0) * jax.device_count()
    return min(2**32 * jax.device_count(), (there - taken) // 8)
