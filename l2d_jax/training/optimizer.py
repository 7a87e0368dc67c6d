"""AdamW and its learning rate. Only trained weights have moments and updates; a frozen model has none."""

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from l2d_jax.config.schema import OptimConfig

RATES = 4096  # number of learning rates computed at once


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """The learning rate of each step: a warmup to the peak rate, then a linear decay towards the final rate.

    `config.warmup` is the form of the rise, over W = `warmup_steps`; steps are counted from 0.

    - "linear": (step + 1) / W of the peak rate. The final rate is reached at `steps`.
    - "logarithmic": the schedule of the authors' release, see `_released_rate`.

    A warmup that is not shorter than the run is shortened.
    """
    warmup = min(config.warmup_steps, steps - 1)
    if config.warmup == "logarithmic":
        return partial(_released_rate, config, steps, max(warmup, 2))
    decay = optax.linear_schedule(config.peak_rate, config.final_rate, max(steps - warmup, 1))
    # The rate of the first step is peak / warmup and not zero: a step with rate zero would be wasted.
    rise = optax.linear_schedule(config.peak_rate / max(warmup, 1), config.peak_rate, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def _released_rate(config: OptimConfig, steps: int, warmup: int, step: Any) -> Any:
    """The rate of a step in the release: final + (peak - final) * share.

    With W = `warmup` and S = `steps`, the share is 0 for step 0, log(step) / log(W) for steps 1 to W, and
    (S + 1 - step) / (S - W) after them. Its last step is therefore 2 / (S - W) of the way above the final rate.

    Source: SakanaAI/L2D 456871e, `pipeline/util.py`, `build_lr_scheduler`, type "warmup_decay", which is DeepSpeed's
    `WarmupDecayLR` (0.16.0, `deepspeed/runtime/lr_schedules.py`) with its default `warmup_type`, "log". DeepSpeed sets
    the rate after each step, so that the rates come one step later than its formula has them.
    """
    count = jnp.asarray(step)
    rise = jnp.log(jnp.maximum(count, 1).astype(jnp.float32)) / math.log(warmup)
    fall = jnp.maximum(steps + 1 - count, 0).astype(jnp.float32) / max(steps - warmup, 1)
    return config.final_rate + (config.peak_rate - config.final_rate) * jnp.where(count <= warmup, rise, fall)


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
