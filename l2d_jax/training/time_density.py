"""At which times t training corrupts its tokens: densities of t, as inverse CDFs of uniform samples.

Notable: `warped` learns its density from the loss, which then falls linearly in the warped time (CDCD, Dieleman et
al. 2022, section 3.3). CDCD fits the curve of the loss by gradient descent; here it is a running mean in bins. These
are equal in the signal's share of x_t, t / (t + sigma (1 - t)): with sigma = 64, bins that are equal in t would put all
that the loss does into the last one. As in CDCD, the loss is not weighted back to the uniform density.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from l2d_jax.config.schema import TrainConfig

BINS = 32  # number of bins of the signal's share
DECAY = 0.995  # decay of the running mean, per optimizer step
FLOOR = 0.1  # part of the warped density that is equal in all bins, so that each bin keeps being sampled
SLACK = 0.01  # nats; a loss that falls by less than about this leaves the density at its start

TimeSampler = Callable[[Float[Array, "B M"]], Float[Array, "B M"]]  # from uniform samples to t


class LossByTime(NamedTuple):
    """Sums over the times in each bin of the signal's share, of one batch or as a running mean over steps."""

    losses: Float[Array, " bins"]  # each loss times its weight
    weights: Float[Array, " bins"]  # they sum to 1 in each step, so that the sum of the running mean rises from 0 to 1


def initial_loss_by_time(config: TrainConfig) -> LossByTime | None:
    """Initial statistics, or None unless the density is learnt."""
    if config.time_density != "warped":
        return None
    return LossByTime(jnp.zeros(BINS), jnp.zeros(BINS))


def uniform_times(uniform: Float[Array, "B M"]) -> Float[Array, "B M"]:
    """The samples as they are."""
    return uniform


def time_sampler(config: TrainConfig, loss_by_time: LossByTime | None, *, sigma: float) -> TimeSampler:
    """The function of the config that turns uniform samples into times; "warped" needs the `loss_by_time` so far."""
    mean, deviation = config.logit_normal_mean, config.logit_normal_deviation
    quantiles: dict[str, TimeSampler] = {
        "uniform": uniform_times,
        "cosmap": cosmap_times,
        # With a normal log(t / (1 - t)) (Esser et al. 2024, section 3.1); a positive mean is towards the data.
        "logit_normal": lambda uniform: jax.nn.sigmoid(mean + deviation * jax.scipy.special.ndtri(uniform)),
    }
    if loss_by_time is not None:
        quantiles["warped"] = partial(warped_times, probabilities=density(loss_by_time, sigma=sigma), sigma=sigma)
    return quantiles[config.time_density]


def cosmap_times(uniform: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """The release's `cosmap`, whose density is 2 / (pi (1 - 2 t + 2 t^2)) (Esser et al. 2024, section 3.1)."""
    angle = (jnp.pi / 2) * uniform
    return jnp.sin(angle) / (jnp.sin(angle) + jnp.cos(angle))


def observe(
    t: Float[Array, "B M"], losses: Float[Array, "B M"], weights: Float[Array, "B M"], *, sigma: float
) -> LossByTime:
    """The sums of a batch's losses and weights by bin."""
    # Not a scatter: on GPUs its sums depend on the order of the threads, and a run would not repeat itself.
    bins = jnp.clip((BINS * signal_share(t, sigma)).astype(jnp.int32), 0, BINS - 1)
    inside = bins == jnp.arange(BINS)[:, None, None]
    return LossByTime(*(jnp.sum(jnp.where(inside, a, 0.0), axis=(1, 2)) for a in (losses * weights, weights)))


def running_mean(old: LossByTime | None, new: LossByTime | None) -> LossByTime | None:
    """The running mean after one more step; None if the density is not learnt."""
    return jax.tree.map(lambda a, b: DECAY * a + (1 - DECAY) * b, old, new)


def density(loss_by_time: LossByTime, *, sigma: float) -> Float[Array, " bins"]:
    """The probability of each bin: that of a uniform t at first, then more and more the fall of the loss in the bin."""
    start = jnp.diff(time_of_share(jnp.linspace(0.0, 1.0, BINS + 1), sigma))
    # A straight continuation at both ends.
    curve = jnp.pad(_falling(loss_by_time), 1, mode="reflect", reflect_type="odd")
    fall = (curve[:-2] - curve[2:]) / 2
    learnt = (fall + SLACK * start) / (jnp.sum(fall) + SLACK)
    trust = jnp.sum(loss_by_time.weights)
    return FLOOR / BINS + (1 - FLOOR) * (start + trust * (learnt - start))


def density_record(loss_by_time: LossByTime | None, *, sigma: float) -> dict[str, list[float]]:
    """The record `train/time_density`: the density by bin of the signal's share, or nothing unless it is learnt."""
    if loss_by_time is None:
        return {}
    return {"train/time_density": np.asarray(jax.jit(partial(density, sigma=sigma))(loss_by_time)).tolist()}


def warped_times(
    uniform: Float[Array, "*B"], *, probabilities: Float[Array, " bins"], sigma: float
) -> Float[Array, "*B"]:
    """Times whose signal's share has these probabilities by bin, and is uniform inside each bin."""
    reached = jnp.concatenate([jnp.zeros(1), jnp.cumsum(probabilities)])
    share = jnp.interp(uniform * reached[-1], reached, jnp.linspace(0.0, 1.0, BINS + 1))
    return time_of_share(share, sigma)


def signal_share(t: Float[Array, "*B"], sigma: float) -> Float[Array, "*B"]:
    """The data's share of x_t, by standard deviation: t / (t + sigma (1 - t))."""
    return t / (t + sigma * (1 - t))


def time_of_share(share: Float[Array, "*B"], sigma: float) -> Float[Array, "*B"]:
    """The inverse of `signal_share`."""
    return sigma * share / (sigma * share + (1 - share))


def _falling(loss_by_time: LossByTime) -> Float[Array, " bins"]:
    """The curve that never rises with t and is nearest to the bins' mean losses in weighted least squares.

    Isotonic regression: minimum over first bins <= this one, of maximum over last bins >= it, of the mean in between.
    """
    overall = jnp.sum(loss_by_time.losses) / jnp.maximum(jnp.sum(loss_by_time.weights), 1e-6)
    weights = loss_by_time.weights + 1e-6  # an empty bin then lies between its neighbours
    losses = loss_by_time.losses + 1e-6 * overall
    k = jnp.arange(BINS)
    inside = (k[:, None, None] <= k) & (k <= k[:, None])  # axes: first bin, last bin, bin
    sums, counts = (jnp.sum(jnp.where(inside, a, 0.0), axis=-1) for a in (losses, weights))
    means = jnp.where(k[:, None] <= k, sums / jnp.where(counts > 0, counts, 1.0), -jnp.inf)
    highest = jax.lax.cummax(means, axis=1, reverse=True)
    return jnp.min(jnp.where(k[:, None] <= k, highest, jnp.inf), axis=0)
