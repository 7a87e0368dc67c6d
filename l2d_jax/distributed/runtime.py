"""Starts JAX for a program: the compilation cache, the other processes, and the device mesh."""

import os

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed import processes
from l2d_jax.distributed.cluster import find_cluster
from l2d_jax.distributed.sharding import decoding_mesh, make_mesh
from l2d_jax.files import cache_folder

FIXED_PROGRAMS = "--xla_gpu_deterministic_ops=true"  # no atomic sums, and no choice of kernels by their measured time


def start_jax(config: MeshConfig) -> Mesh:
    """Turn on the compilation cache, join the other processes, make and set the mesh; raises `InputError`."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    if not jax.distributed.is_initialized() and (cluster := find_cluster(os.environ)) is not None:
        processes.join(cluster)
    return _set_mesh(config)


def fix_programs() -> None:
    """Before `start_jax`: let GPUs compute the same bits after each start, by programs that no measurement selects."""
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FIXED_PROGRAMS}".strip()


def start_decoding(config: MeshConfig, *, rows: int, kv_heads: int) -> Mesh:
    """After `start_jax`: make and set the mesh for decoding `rows` sequences of a model with `kv_heads` key heads."""
    return _set_mesh(decoding_mesh(config, rows=rows, kv_heads=kv_heads, devices=jax.device_count()))


def _set_mesh(config: MeshConfig) -> Mesh:
    mesh = make_mesh(config)
    jax.set_mesh(mesh)
    return mesh
