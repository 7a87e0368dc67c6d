"""AdamW and its learning rate. Only trained weights have moments and updates; a frozen model has none."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from l2d_jax.config.schema import OptimConfig

RATES = 4096  # number of learning rates computed at once


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Linear warmup from zero to the peak rate, then linear decay to the final rate at `steps`."""
    warmup = min(config.warmup_steps, steps - 1)
    decay = optax.linear_schedule(config.peak_rate, config.final_rate, max(steps - warmup, 1))
    # The rate of the first step is peak / warmup and not zero: a step with rate zero would be wasted.
    rise = optax.linear_schedule(config.peak_rate / max(warmup, 1), config.peak_rate, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def on_host(rate: optax.Schedule, *, start: int) -> Callable[[int], float]:
    """The values of a schedule in host memory, so that reading one does not wait for the running step.

    Those from `start` on are computed at once.
    """

    @lru_cache(maxsize=2)
    def values(chunk: int) -> np.ndarray:
        return np.asarray(jax.vmap(rate)(jnp.arange(chunk * RATES, (chunk + 1) * RATES)))

    values(start // RATES)
    return lambda step: float(values(step // RATES)[step % RATES])


def optimizer(config: OptimConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW with weight decay on everything except biases and norm weights."""
    adam: dict[str, Any] = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    adamw = optax.adamw(rate, **adam, weight_decay=config.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
    """True for every leaf except biases and norm weights."""
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path[-1:], simple=True), params)
    return jax.tree.map(lambda name: "bias" not in name and "norm" not in name, names)
