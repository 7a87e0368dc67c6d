"""Starts JAX as every program wants it: the compilation cache, the other processes, and the device mesh."""

import os

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed import processes
from l2d_jax.distributed.cluster import find_cluster
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.files import cache_folder


def start_jax(config: MeshConfig) -> Mesh:
    """Turn on the compilation cache, join the other processes, make and set the mesh; raises `InputError`."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    cluster = None if jax.distributed.is_initialized() else find_cluster(os.environ)
    if cluster is not None:
        processes.join(cluster)
    mesh = make_mesh(config)
    jax.set_mesh(mesh)
    return mesh
