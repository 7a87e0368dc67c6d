"""Starts JAX as every program wants it: the compilation cache and the device mesh."""

import os
from pathlib import Path

import jax
from jax.sharding import Mesh

from l2d_jax.config import MeshConfig
from l2d_jax.sharding import make_mesh


def start(config: MeshConfig) -> Mesh:
    """Turn on the persistent compilation cache and make the mesh; raises `InputError` if the sizes do not fit."""
    if not jax.config.values["jax_compilation_cache_dir"]:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(Path(root) / "l2d_jax" / "compiled"))
    return make_mesh(config)
