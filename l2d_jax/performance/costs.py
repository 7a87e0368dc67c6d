"""The costs of a config, computed from shapes: trainable parameters, memory per device, FLOPs per token.

`train --dry_run` and `train --variants` print the tables.
"""

import numpy as np
from jax.sharding import Mesh

from l2d_jax.config.config_file import find_variants, read_config
from l2d_jax.config.schema import Config, PathConfig
from l2d_jax.distributed.memory import parameters
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import ADAPTED, MATRICES
from l2d_jax.model.diffusion_path import DiffusionPath, matrices
from l2d_jax.model.llm import LLM
from l2d_jax.training.memory import step_memory
from l2d_jax.training.methods import method_of
from l2d_jax.weights import base_model

READ = ("frozen pass", "forward", "backward")  # parts that run on every token; the others run only on predicted tokens


def trainable_parameters(config: Config, architecture: Architecture) -> int:
    """The exact number of values that training changes."""
    return parameters(method_of(config).declare(architecture))


def flops_per_token(architecture: Architecture, config: PathConfig, *, draws_per_context: int = 1) -> dict[str, int]:
    """Useful floating-point operations of training a path on one token: matrix products, without recomputation.

    A product with n weights takes 2n operations forward, 2n backward for its input, and 2n more if weights are trained.
    """
    layers, path = LLM.declare(architecture, dtype=np.float32).layers, DiffusionPath.declare(config, architecture)
    shared = parameters([getattr(layers, name) for name in ADAPTED])
    whole = shared + parameters((layers.k, layers.v))
    trained = parameters(path) - parameters((path.classes, path.layers.k, path.layers.v))
    frozen = shared if config.layers == "lora" else 0
    reading = {"frozen pass": 2 * whole}
    if config.reader == "path":
        changes = parameters([getattr(path.layers, name) for name in matrices(config)])
        kept = whole if config.layers == "lora" else 0
        reading = {"forward": 2 * (kept + changes), "backward": 2 * kept + 4 * changes}
    return {
        **reading,
        "path forward": draws_per_context * 2 * (frozen + trained),
        "path backward": draws_per_context * (2 * frozen + 4 * trained),
        "output head": draws_per_context * 4 * architecture.vocab_size * architecture.hidden_size,
    }


def flops_of_training(config: Config, architecture: Architecture) -> dict[str, int]:
    """Useful operations of training on one token with the config's method: a path, LoRA or all weights."""
    if config.train.method == "l2d":
        parts = flops_per_token(architecture, config.path, draws_per_context=config.train.draws_per_context)
        estimate = parts["path forward"] + parts["output head"] // 2
        share = config.train.own_estimates
        return parts | ({"first estimates": round(share * estimate)} if share else {})
    layers = LLM.declare(architecture, dtype=np.float32).layers
    products = parameters([getattr(layers, name) for name in MATRICES])
    head = architecture.vocab_size * architecture.hidden_size
    if config.train.method == "full":
        return {"forward": 2 * products, "backward": 4 * products, "output head": 6 * head}
    lora = trainable_parameters(config, architecture)
    return {"forward": 2 * (products + lora), "backward": 2 * products + 4 * lora, "output head": 4 * head}


def flops_per_step(config: Config, architecture: Architecture) -> dict[str, int]:
    """Useful operations of an optimizer step by part: `READ` for all tokens, the others for predicted tokens."""
    parts = flops_of_training(config, architecture)
    tokens = config.train.batch_size * config.data.max_length
    predicted = config.train.batch_size * (config.data.answer_length or config.data.max_length)
    return {name: count * (tokens if name in READ else predicted) for name, count in parts.items()}


def flops_per_decoded_token(config: Config, architecture: Architecture) -> int:
    """Useful operations of decoding one token with the config's budget, as `decoding_flops` counts them."""
    llm = LLM.declare(architecture, dtype=np.float32)
    path = DiffusionPath.declare(config.path, architecture) if config.train.method == "l2d" else None
    return decoding_flops(llm, path, budget=config.decode.budget, draws=config.decode.draws)[1]


def decoding_flops(llm: LLM, path: DiffusionPath | None, *, budget: int, draws: int = 1) -> tuple[int, int]:
    """Useful operations of reading a prompt token, and of decoding an answer token; the model may be declared.

    A decoded token takes one pass of the model that reads the context, and the path and the LM head once per
    evaluation. The conditions (modulation, merge weights) come from a table and count as free. A budget of 1 is the LM
    alone.
    """
    head = 2 * llm.architecture.vocab_size * llm.architecture.hidden_size
    reading = 2 * (parameters([getattr(llm.layers, name) for name in MATRICES]) + parameters(llm.adapter))
    if budget == 1 or path is None:
        return reading, reading + head
    is_low_rank, layers = path.config.layers == "lora", path.layers
    if path.config.reader == "path":
        changes = 2 * parameters([getattr(layers, name) for name in matrices(path.config)])
        reading = changes + (reading if is_low_rank else 0)
    own = [getattr(layers, name) for name in ADAPTED] + [path.translation]
    shared = [getattr(llm.layers, name) for name in ADAPTED] if is_low_rank else []
    return reading, reading + draws * budget * (2 * parameters((own, shared)) + head)


def cost_table(config: Config, architecture: Architecture, mesh: Mesh) -> str:
    """Parameters, memory per device and FLOPs per token of a config, as `--dry_run` prints them."""
    memory = step_memory(config, architecture, mesh)
    flops = flops_of_training(config, architecture)
    rows = [
        ("frozen parameters", f"{parameters(method_of(config).declare_frozen(architecture)):,}"),
        ("trainable parameters", f"{trainable_parameters(config, architecture):,}"),
        *((f"memory per device: {name}", f"{size / 2**30:.2f} GiB") for name, size in memory.items()),
        ("memory per device: sum, activations not counted", f"{sum(memory.values()) / 2**30:.2f} GiB"),
        *((f"FLOPs per token: {name}", f"{count:.3e}") for name, count in flops.items()),
        ("FLOPs per token: sum", f"{sum(flops.values()):.3e}"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value:>16}" for name, value in rows)


def variant_table(reference: str) -> str:
    """A line for `FILE.py` or `FILE.py:variants`, and a line for each variant that can be added to it.

    Raises `InputError` as `read_config` does. If a variant contradicts the reference, its line gives the reason.
    """
    rows = [("variant", "trained", ""), ("-", _trained(reference), f"{reference} as it is")]
    included = reference.partition(":")[2].split(",")
    for name, says in find_variants(reference).items():
        if name in included:
            continue
        try:
            rows.append((name, _trained(f"{reference}{',' if ':' in reference else ':'}{name}"), says))
        except InputError as error:
            rows.append((name, "refused", str(error)))
    width, digits = (max(len(row[column]) for row in rows) for column in (0, 1))
    return "\n".join(f"{name:<{width}}  {count:>{digits}}  {what}".rstrip() for name, count, what in rows)


def _trained(reference: str) -> str:
    """The number of trainable parameters of a config as text, from shapes alone."""
    config = read_config(reference)
    return f"{trainable_parameters(config, base_model.read_architecture(config.model)):,}"
