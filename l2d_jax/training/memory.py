"""The memory that a training step needs, computed from shapes."""

import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.distributed.memory import bytes_per_device, require_memory
from l2d_jax.model.architecture import Architecture
from l2d_jax.training.methods import method_of


def step_memory(config: Config, architecture: Architecture, mesh: Mesh) -> dict[str, int]:
    """Bytes per device for weights, gradient, moments, and keys and values; activations are not counted."""
    method = method_of(config)
    frozen, trained = method.declare_frozen(architecture), method.declare(architecture)
    size = bytes_per_device(trained, mesh)
    memory = {f"{method.says} (float32)": size, "its gradient and Adam moments": 3 * size}
    if frozen is not None:
        memory = {f"frozen weights ({config.model.dtype})": bytes_per_device(frozen, mesh)} | memory
    if frozen is not None and config.train.method == "l2d":
        kv_width = 2 * architecture.num_hidden_layers * architecture.num_key_value_heads * architecture.head_dim
        cache = _micro(config, mesh) * config.data.max_length * kv_width * np.dtype(frozen.embed.dtype).itemsize
        memory["keys and values of a micro-batch"] = int(cache)
    return memory


def check_training_memory(config: Config, architecture: Architecture, mesh: Mesh) -> None:
    """Raise `InputError` if a step or a validation cannot fit into the memory of the devices."""
    data, train, validation = config.data, config.train, config.validation
    shards, answer = mesh.shape["data"] * mesh.shape["fsdp"], data.answer_length or data.max_length
    # The LM head holds the logits of a chunk and their gradient; each block keeps its input for the backward pass.
    chunk = min(train.loss_chunk, _micro(config, mesh) * answer * train.draws_per_context)
    hidden = 2 * _micro(config, mesh) * answer * train.draws_per_context * architecture.hidden_size
    needs = step_memory(config, architecture, mesh) | {
        "logits": int(2 * 4 * chunk * architecture.vocab_size),
        "activations": int(hidden * architecture.num_hidden_layers),
        "tokens of a batch": 4 * train.batch_size * (data.max_length + 2 * answer) // shards,
        "losses of a validation": 4 * validation.batch_size * answer * validation.time_bins // shards,
    }
    remedy = "config.train.batch_size, loss_chunk, config.data.max_length or the sizes of config.path"
    require_memory({name: size * mesh.size for name, size in needs.items()}, remedy)


def _micro(config: Config, mesh: Mesh) -> float:
    """Rows of a micro-batch per device."""
    return config.train.batch_size // config.train.micro_batches / (mesh.shape["data"] * mesh.shape["fsdp"])
