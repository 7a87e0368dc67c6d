"""Low-rank updates of the language model's layers: the pytree that LoRA finetuning trains (Hu et al. 2021).

It is separate from the model's weights. A model with an adapter adds the updates in its products; `merge_adapter` adds
them to the weights, once.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers

from l2d_jax.config.schema import LoraConfig
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.axes import MATRICES, axis_sizes
from l2d_jax.model.layers import Lora
from l2d_jax.model.quantization import from_bits


@nnx.dataclass
class LLMAdapter(nnx.Module):
    """Stacked updates of all decoder blocks; None for a matrix that is not adapted."""

    q: Lora | None = nnx.data()
    k: Lora | None = nnx.data()
    v: Lora | None = nnx.data()
    o: Lora | None = nnx.data()
    gate: Lora | None = nnx.data()
    up: Lora | None = nnx.data()
    down: Lora | None = nnx.data()
    config: LoraConfig = nnx.static()

    @classmethod
    def declare(cls, config: LoraConfig, architecture: Architecture) -> "LLMAdapter":
        """Declare the module with float32 `Weight`s, initialised as in PEFT: A within 1 / sqrt(inputs), B zero."""
        sizes = axis_sizes(architecture) | {"rank": config.rank}

        def update(name: str) -> Lora:
            inputs = tuple(range(1, 1 + len(MATRICES[name][0])))
            init = initializers.variance_scaling(1 / 3, "fan_in", "uniform", inputs, out_axis=-1, batch_axis=0)
            return Lora.declare(name, sizes, init)

        adapted = {name.removesuffix("_proj") for name in config.modules}
        return cls(**{name: update(name) if name in adapted else None for name in MATRICES}, config=config)

    @property
    def scale(self) -> float:
        """The factor alpha / rank by which the product of the two matrices is scaled."""
        return self.config.alpha / self.config.rank

    def updates(self) -> dict[str, Lora]:
        """The updates that exist, keyed by matrix name."""
        return {name: lora for name in MATRICES if (lora := getattr(self, name)) is not None}


def merge_adapter(layers: Any, adapter: LLMAdapter) -> Any:
    """Add the updates to decoder layers, in float32, rounded once to each weight's dtype, on the weight's devices."""

    def add(part: tuple[jax.Array, Lora]) -> jax.Array:
        weight, lora = part
        product = jnp.tensordot(lora.a, lora.b, 1, precision="highest")
        return (from_bits(weight).astype(jnp.float32) + adapter.scale * product).astype(from_bits(weight).dtype)

    changed = {}
    for name, lora in adapter.updates().items():  # layer by layer, so that only one layer is in float32 at a time
        weight = getattr(layers, name)
        changed[name] = jax.jit(partial(jax.lax.map, add), out_shardings=weight.sharding)((weight, lora))
    return dataclasses.replace(layers, **changed)
