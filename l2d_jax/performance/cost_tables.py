"""Tables of what configs cost, as `train --dry_run` and `train --variants` print them."""

import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.config_file import find_variants, read_config
from l2d_jax.config.schema import Config
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.performance.costs import bytes_per_device, flops_of_training, parameters, trainable_parameters
from l2d_jax.training.methods import method_of
from l2d_jax.weights import model_folder


def cost_table(config: Config, architecture: Architecture, mesh: Mesh) -> str:
    """Parameters, memory per device and FLOPs per token of a config, as `--dry_run` prints them."""
    method = method_of(config)
    frozen, trained = method.declare_frozen(architecture), method.declare(architecture)
    size = bytes_per_device(trained, mesh)
    memory = {f"{method.says} (float32)": size, "its gradient and Adam moments": 3 * size}
    if frozen is not None:
        memory = {f"frozen weights ({config.model.dtype})": bytes_per_device(frozen, mesh)} | memory
    if frozen is not None and config.train.method == "l2d":
        micro = config.train.batch_size // config.train.accumulation / (mesh.shape["data"] * mesh.shape["fsdp"])
        kv_width = 2 * architecture.num_hidden_layers * architecture.num_key_value_heads * architecture.head_dim
        cache = micro * config.data.max_length * kv_width * np.dtype(frozen.embed.dtype).itemsize
        memory["keys and values of a micro-batch"] = int(cache)
    flops = flops_of_training(config, architecture)
    rows = [
        ("frozen parameters", f"{0 if frozen is None else parameters(frozen):,}"),
        ("trainable parameters", f"{parameters(trained):,}"),
        *((f"memory per device: {name}", f"{size / 2**30:.2f} GiB") for name, size in memory.items()),
        ("memory per device: sum, activations not counted", f"{sum(memory.values()) / 2**30:.2f} GiB"),
        *((f"FLOPs per token: {name}", f"{count:.3e}") for name, count in flops.items()),
        ("FLOPs per token: sum", f"{sum(flops.values()):.3e}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>16}" for name, value in rows)


def variant_table(reference: str) -> str:
    """A line for `FILE.py` or `FILE.py:variants` as it is, and a line for each variant that can be added to it.

    Raises `InputError` as `read_config` does; the line of a variant that contradicts the reference gives the reason.
    """
    rows = [("-", _trained(reference), f"{reference} as it is")]
    included = reference.partition(":")[2].split(",")
    for name, variant in find_variants(reference).items():
        if name in included:
            continue
        try:
            count = _trained(f"{reference}{',' if ':' in reference else ':'}{name}")
            rows.append((name, count, (variant.__doc__ or "").partition("\n")[0]))
        except InputError as error:
            rows.append((name, "refused", str(error)))
    rows.insert(0, ("variant", "trained", ""))
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{width}}  {count:>{digits}}  {what}".rstrip() for name, count, what in rows)


def _trained(reference: str) -> str:
    """The number of trainable parameters of a config as text, from shapes alone."""
    config = read_config(reference)
    return f"{trainable_parameters(config, model_folder.read_architecture(config.model)):,}"
