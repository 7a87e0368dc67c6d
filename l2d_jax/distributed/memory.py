"""The memory of the devices, and a check that refuses what cannot fit into it, before anything is allocated.

Needs are computed from shapes, without what a compiler may avoid. So what is refused really cannot run, but what passes
may still not fit.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from l2d_jax.distributed import sharding
from l2d_jax.errors import InputError

LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")  # memory limits of a container


def bytes_per_device(declared: Any, mesh: Mesh) -> int:
    """Bytes of a declared tree on the device with the largest share."""
    pairs = zip(jax.tree.leaves(declared), jax.tree.leaves(sharding.shardings(declared, mesh)), strict=True)
    return sum(math.prod(placed.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize for leaf, placed in pairs)


def parameters(tree: Any) -> int:
    """The exact number of values in a declared or real tree."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def tree_bytes(tree: Any) -> int:
    """Bytes of a declared or real tree, counted once, however it is sharded."""
    return sum(math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def device_bytes() -> int | None:
    """The memory of all devices of all processes, or None if a device does not report it; starts JAX's backend."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":  # the memory of this machine, or the limit of this container
        limits = [Path(name).read_text().strip() for name in LIMITS if Path(name).is_file()]
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min([there, *(int(limit) for limit in limits if limit.isdigit())]) * jax.process_count()
    limit = (device.memory_stats() or {}).get("bytes_limit")
    return None if limit is None else int(limit) * jax.device_count()


def require_memory(needs: Mapping[str, int], remedy: str) -> None:
    """Raise `InputError`, with the largest `needs` and the `remedy`, if the needs, in bytes, exceed the memory."""
    needed, there = sum(needs.values()), device_bytes()
    if there is not None and needed > there:
        largest = sorted(needs.items(), key=lambda need: -need[1])[:2]
        parts = ", ".join(f"{size / 2**30:,.1f} GiB of {name}" for name, size in largest)
        problem = f"this needs {needed / 2**30:,.1f} GiB of memory ({parts})"
        raise InputError(f"{problem}, and the devices have {there / 2**30:,.1f} GiB: lower {remedy}")
