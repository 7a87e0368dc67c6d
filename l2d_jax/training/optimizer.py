"""AdamW and its learning rate, for the trained weights: a frozen model has no moments and no updates."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from l2d_jax.config.schema import OptimConfig

RATES = 4096  # learning rates that are computed together


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Linear warmup from zero to the peak rate, then linear decay to the final rate at `steps`."""
    warmup = min(config.warmup_steps, steps - 1)
    decay = optax.linear_schedule(config.peak_rate, config.final_rate, max(steps - warmup, 1))
    # The rate of the first step is peak / warmup, not zero: a step that does nothing is a wasted one.
    rise = optax.linear_schedule(config.peak_rate / max(warmup, 1), config.peak_rate, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def on_host(rate: optax.Schedule, *, start: int) -> Callable[[int], float]:
    """A schedule's values in host memory, where none waits for the step under way; the first from `start` at once."""

    @lru_cache(maxsize=2)
    def values(chunk: int) -> np.ndarray:
        return np.asarray(jax.vmap(rate)(jnp.arange(chunk * RATES, (chunk + 1) * RATES)))

    values(start // RATES)
    return lambda step: float(values(step // RATES)[step % RATES])


def optimizer(config: OptimConfig, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Clipping by the global norm, then AdamW with weight decay on everything but biases and the weights of norms."""
    adam: dict[str, Any] = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    adamw = optax.adamw(rate, **adam, weight_decay=config.weight_decay, mask=decayed)
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def decayed(params: Any) -> Any:
    """True for every leaf but biases and the weights of norms."""
    names = jax.tree_util.tree_map_with_path(lambda path, _: jax.tree_util.keystr(path[-1:], simple=True), params)
    return jax.tree.map(lambda name: "bias" not in name and "norm" not in name, names)
