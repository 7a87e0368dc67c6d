"""The table of logical axes of a block's weights, which declarations and the gathering of a layer both read."""

from collections.abc import Mapping
from typing import Any, TypeAlias

import jax.numpy as jnp
from jaxtyping import Array, Num

from l2d_jax.distributed.sharding import Initializer, Weight
from l2d_jax.model.architecture import Architecture

Apart: TypeAlias = list[Num[Array, "..."]]  # one array per layer: see `Model.apart`

EMBEDDING_AXES = ("vocab", "embed")
HEAD_AXES = ("head_vocab", "hidden")

MATRICES = {  # name: (input axes, which a product sums over; output axes)
    "q": (("attention_embed",), ("heads", "head_dim")),
    "k": (("attention_embed",), ("kv_heads", "head_dim")),
    "v": (("attention_embed",), ("kv_heads", "head_dim")),
    "o": (("heads", "head_dim"), ("attention_embed",)),
    "gate": (("embed",), ("mlp",)),
    "up": (("embed",), ("mlp",)),
    "down": (("mlp",), ("embed",)),
}

ADAPTED = ("q", "o", "gate", "up", "down")  # matrices that a diffusion path updates or copies
KEYS = ("k", "v")  # matrices that it also updates or copies if it reads the context

LAYER_AXES: dict[str, tuple[str, ...]] = {  # keys: path of the weight within a layer of the LM, an adapter or the path
    "attention_norm": ("embed",),
    "mlp_norm": ("embed",),
    "post_attention_norm": ("embed",),
    "post_mlp_norm": ("embed",),
    "q_norm": ("head_dim",),
    "k_norm": ("head_dim",),
    "q_bias": ("heads", "head_dim"),
    "k_bias": ("kv_heads", "head_dim"),
    "v_bias": ("kv_heads", "head_dim"),
    **{name: (*inputs, *outputs) for name, (inputs, outputs) in MATRICES.items()},
    **{f"{name}.a": (*inputs, "rank") for name, (inputs, _) in MATRICES.items()},
    **{f"{name}.b": ("rank", *outputs) for name, (_, outputs) in MATRICES.items()},
    **{f"{name}.row_a": ("gathered_batch", *inputs, "rank") for name, (inputs, _) in MATRICES.items()},
    **{f"{name}.row_b": ("gathered_batch", "rank", *outputs) for name, (_, outputs) in MATRICES.items()},
    "modulation.first.weight": ("condition", "condition"),
    "modulation.first.bias": ("condition",),
    "modulation.last.weight": ("condition", "parts", "embed"),
    "modulation.last.bias": ("parts", "embed"),
}


def axis_sizes(architecture: Architecture) -> dict[str, int]:
    """The size of each logical axis of the language model."""
    a = architecture
    sizes = dict.fromkeys(("vocab", "head_vocab"), a.vocab_size)
    sizes |= dict.fromkeys(("embed", "attention_embed", "hidden"), a.hidden_size)
    sizes |= {"heads": a.num_attention_heads, "kv_heads": a.num_key_value_heads, "head_dim": a.head_dim}
    return sizes | {"layers": a.num_hidden_layers, "mlp": a.intermediate_size}


def declare_weight(
    axes: tuple[str, ...], sizes: Mapping[str, int], init: Initializer, *, dtype: Any = jnp.float32
) -> Weight:
    """Declare a weight with these logical axes."""
    return Weight(tuple(sizes[axis] for axis in axes), axes, init, dtype)


def declare_stacked(name: str, sizes: Mapping[str, int], init: Initializer, *, dtype: Any = jnp.float32) -> Weight:
    """Declare one weight of all blocks, stacked; `name` is a key of `LAYER_AXES`."""
    return declare_weight(("layers", *LAYER_AXES[name]), sizes, init, dtype=dtype)
