"""Low-rank updates of the language model's own layers: the tree that LoRA finetuning trains (Hu et al. 2021).

It stays a tree of its own. A model that has it adds the update to each product; `merge` adds it to the weights, once.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from l2d_jax.config.schema import LoraConfig
from l2d_jax.distributed.sharding import Weight
from l2d_jax.model.layers import Lora
from l2d_jax.model.quantization import CONTRACTED


@nnx.dataclass
class LLMAdapter(nnx.Module):
    """Updates of all decoder blocks, stacked; None for a layer that has none."""

    q: Lora | None = nnx.data()
    k: Lora | None = nnx.data()
    v: Lora | None = nnx.data()
    o: Lora | None = nnx.data()
    gate: Lora | None = nnx.data()
    up: Lora | None = nnx.data()
    down: Lora | None = nnx.data()
    config: LoraConfig = nnx.static()

    @classmethod
    def declare(cls, config: LoraConfig, layers: Any) -> "LLMAdapter":
        """The module with float32 `Weight`s for arrays, which start as PEFT's do, from the layers' declaration."""
        chosen = {name.removesuffix("_proj") for name in config.modules}
        loras = {name: _update(getattr(layers, name), name, config) if name in chosen else None for name in CONTRACTED}
        return cls(**loras, config=config)

    @property
    def scale(self) -> float:
        """What the product of the two matrices counts."""
        return self.config.alpha / self.config.rank

    def updates(self) -> dict[str, Lora]:
        """The updates that there are, by the name of the layer."""
        found = {name: getattr(self, name) for name in CONTRACTED}
        return {name: lora for name, lora in found.items() if lora is not None}


def _update(weight: Weight, name: str, config: LoraConfig) -> Lora:
    """The declaration of one layer's update: A uniform within 1 / sqrt(its inputs), B zero."""
    named = list(zip(weight.axes[1:], weight.shape[1:], strict=True))  # without the axis of layers
    inward = [pair for pair in named if pair[0] in CONTRACTED[name]]
    outward = [pair for pair in named if pair[0] not in CONTRACTED[name]]
    stack, rank = (weight.axes[0], weight.shape[0]), ("rank", config.rank)
    fan_in = tuple(range(1, 1 + len(inward)))
    uniform = initializers.variance_scaling(1 / 3, "fan_in", "uniform", in_axis=fan_in, out_axis=-1, batch_axis=0)

    def declare(axes: list[tuple[str, int]], init: Any) -> Weight:
        return Weight(tuple(size for _, size in axes), tuple(axis for axis, _ in axes), init)

    return Lora(a=declare([stack, *inward, rank], uniform), b=declare([stack, rank, *outward], initializers.zeros))


def merge(layers: Any, adapter: LLMAdapter) -> Any:
    """Decoder layers with their updates added, computed in float32 and rounded once to the type of each weight."""

    def add(weight: jax.Array, lora: Lora) -> jax.Array:
        product = jax.vmap(lambda a, b: jnp.tensordot(a, b, 1, precision="highest"))(lora.a, lora.b)
        return (weight.astype(jnp.float32) + adapter.scale * product).astype(weight.dtype)

    changed = {name: add(getattr(layers, name), lora) for name, lora in adapter.updates().items()}
    return dataclasses.replace(layers, **changed)
