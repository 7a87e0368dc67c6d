"""What a config costs, from shapes alone: trainable parameters, memory per device, FLOPs per token."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from l2d_jax import sharding
from l2d_jax.architecture import Architecture
from l2d_jax.config import Config, PathConfig
from l2d_jax.diffusion_path import DiffusionPath
from l2d_jax.llm import LLM


def parameters(declared: Any) -> int:
    """Number of values of a declared or real tree; exact."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(declared))


def trainable_parameters(config: Config, architecture: Architecture) -> int:
    """Number of values that training changes; exact."""
    return parameters(DiffusionPath.declare(config.path, architecture))


def bytes_per_device(declared: Any, mesh: Mesh) -> int:
    """Bytes that the fullest device holds of a declared tree."""
    placements = jax.tree.leaves(sharding.shardings(declared, mesh))
    return sum(
        math.prod(placement.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf, placement in zip(jax.tree.leaves(declared), placements, strict=True)
    )


def flops_per_token(architecture: Architecture, config: PathConfig, *, draws_per_context: int = 1) -> dict[str, int]:
    """Useful floating-point operations of training on one token: matrix products alone, nothing recomputed.

    A product with n weights takes 2n forward; backward, 2n for the input and 2n more for a trained weight.
    """
    a = architecture
    llm = LLM.declare(a, dtype=np.float32)
    shared = {name: parameters(getattr(llm.layers, name)) for name in ("q", "o", "gate", "up", "down")}
    keys = parameters((llm.layers.k, llm.layers.v))
    head = a.vocab_size * a.hidden_size
    path = DiffusionPath.declare(config, a)
    trained = parameters(path) - parameters(path.classes)
    frozen = sum(shared.values()) if config.layers == "lora" else 0
    return {
        "frozen pass": 2 * (sum(shared.values()) + keys),
        "path forward": draws_per_context * 2 * (frozen + trained),
        "path backward": draws_per_context * (2 * frozen + 4 * trained),
        "output head": draws_per_context * 4 * head,
    }


def flops_per_step(config: Config, architecture: Architecture) -> dict[str, int]:
    """Useful operations of an optimizer step by part: the frozen pass over all tokens, the rest over predicted ones."""
    parts = flops_per_token(architecture, config.path, draws_per_context=config.train.draws_per_context)
    tokens = config.train.batch_size * config.data.max_length
    predicted = config.train.batch_size * (config.data.answer_length or config.data.max_length)
    return {name: count * (tokens if name == "frozen pass" else predicted) for name, count in parts.items()}


def flops_per_decoded_token(config: Config, architecture: Architecture) -> int:
    """Useful operations of a token of the answer: the frozen pass once; the path and the head once per evaluation.

    Conditions come from a table. A budget of 1 is the LM alone.
    """
    parts = flops_per_token(architecture, config.path)
    path = DiffusionPath.declare(config.path, architecture)
    tabulated = parameters((path.layers.modulation, path.time, path.merge, path.vocabulary))
    head = parts["output head"] // 2
    evaluations = config.decode.draws * config.decode.budget
    if config.decode.budget == 1:
        return parts["frozen pass"] + head
    return parts["frozen pass"] + evaluations * (parts["path forward"] - 2 * tabulated + head)


def summary(config: Config, architecture: Architecture, mesh: Mesh) -> str:
    """The table that `--dry_run` prints."""
    llm = LLM.declare(architecture, dtype=config.model.dtype)
    path = DiffusionPath.declare(config.path, architecture)
    frozen, trained = bytes_per_device(llm, mesh), bytes_per_device(path, mesh)
    micro = config.train.batch_size // config.train.accumulation / (mesh.shape["data"] * mesh.shape["fsdp"])
    kv_width = 2 * architecture.num_hidden_layers * architecture.num_key_value_heads * architecture.head_dim
    cache = int(micro * config.data.max_length * kv_width * np.dtype(llm.embed.dtype).itemsize)
    memory = {
        f"frozen weights ({config.model.dtype})": frozen,
        "path (float32)": trained,
        "its gradient and Adam moments": 3 * trained,
        "keys and values of a micro-batch": cache,
    }
    flops = flops_per_token(architecture, config.path, draws_per_context=config.train.draws_per_context)
    rows = [
        ("frozen parameters", f"{parameters(llm):,}"),
        ("trainable parameters", f"{parameters(path):,}"),
        *((f"memory per device: {name}", f"{size / 2**30:.2f} GiB") for name, size in memory.items()),
        ("memory per device: sum, activations not counted", f"{sum(memory.values()) / 2**30:.2f} GiB"),
        *((f"FLOPs per token: {name}", f"{count:.3e}") for name, count in flops.items()),
        ("FLOPs per token: sum", f"{sum(flops.values()):.3e}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>16}" for name, value in rows)
