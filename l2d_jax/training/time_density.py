"""At which times t training corrupts its tokens: densities of t as inverse CDFs of uniform draws.

Notable: `warped` learns its density from the loss, which then falls linearly in the warped time (CDCD, Dieleman et
al. 2022, section 3.3; the L2D paper leaves it to future work). CDCD fits the curve of the loss by gradient descent;
here it is a running mean in bins, which needs no rate of learning. Bins are equal in the signal's share of x_t,
t / (t + sigma (1 - t)): with sigma = 64, bins that are equal in t would put all that the loss does into the last one.
As there, no density here is weighted back to the uniform one: where it is denser, the loss counts for more.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from l2d_jax.config.schema import TrainConfig

BINS = 32  # of the signal's share
DECAY = 0.995  # of the running mean, per optimizer step
FLOOR = 0.1  # share of the warped density that is equal in all bins, so that each is looked at again
SLACK = 0.01  # nats; a fall of the loss by less than about this leaves the density as it starts

GOLDEN = np.uint32(2654435769)  # 2^32 / golden ratio

TimeSampler = Callable[[Float[Array, "B M"], Float[Array, "B M"]], Float[Array, "B M"]]  # (uniform draws, weights) -> t


class LossByTime(NamedTuple):
    """Sums over what was drawn in each bin of the signal's share; a running mean of such sums over steps."""

    losses: Float[Array, " bins"]  # times their weights
    weights: Float[Array, " bins"]  # in all 1 per step, so that their running mean rises from 0 to 1


def initial_loss_by_time(config: TrainConfig) -> LossByTime | None:
    """Before the first step; None for a density that learns nothing."""
    if config.time_density != "warped":
        return None
    return LossByTime(jnp.zeros(BINS), jnp.zeros(BINS))


def uniform_times(uniform: Float[Array, "B M"], weights: Float[Array, "B M"]) -> Float[Array, "B M"]:  # noqa: ARG001 (as `TimeSampler`)
    """Independent and uniform times."""
    return uniform


def time_sampler(config: TrainConfig, seen: LossByTime | None, *, sigma: float) -> TimeSampler:
    """The config's way from uniform draws and the positions' weights to times; `seen` is what `warped` has learnt."""
    quantiles: dict[str, Callable[[Array], Array]] = {
        "uniform": lambda uniform: uniform,
        "cosmap": cosmap_times,
        "logit_normal": partial(
            logit_normal_times, mean=config.logit_normal_mean, deviation=config.logit_normal_deviation
        ),
    }
    if seen is not None:
        quantiles["warped"] = partial(warped_times, probabilities=density(seen, sigma=sigma), sigma=sigma)
    quantile = quantiles[config.time_density]

    def times(uniform: Float[Array, "B M"], weights: Float[Array, "B M"]) -> Float[Array, "B M"]:
        return quantile(stratify(uniform, weights) if config.stratified_times else uniform)

    return times


def cosmap_times(uniform: Float[Array, "*B"]) -> Float[Array, "*B"]:
    """Of density 2 / (pi (1 - 2 t + 2 t^2)) (Esser et al. 2024, section 3.1): highest, 4 / pi, at t = 1/2.

    1 - 1 / (tan(pi u / 2) + 1), the release's `cosmap`, without its infinity; the release draws so in training alone.
    """
    angle = (jnp.pi / 2) * uniform
    return jnp.sin(angle) / (jnp.sin(angle) + jnp.cos(angle))


def logit_normal_times(uniform: Float[Array, "*B"], *, mean: float, deviation: float) -> Float[Array, "*B"]:
    """With log(t / (1 - t)) normal (Esser et al. 2024, section 3.1); here a positive mean is towards the data."""
    return jax.nn.sigmoid(mean + deviation * jax.scipy.special.ndtri(uniform))


def stratify(uniform: Float[Array, "B M"], weights: Float[Array, "B M"]) -> Float[Array, "B M"]:
    """Uniform draws that cover [0, 1) evenly, in each sequence and in all of the batch; each alone is still uniform.

    From one weighted position to the next, t goes on by the golden ratio, modulo 1, from a random beginning: any n of
    them in a row have gaps of about 1 / n, whatever n is, so that neither answers nor packed rows need to be counted.
    Equal strata in the order of the positions would tie t to the place in the answer, on which the loss depends too;
    that makes the loss of long answers vary more than independent times do. No diffusion token sees another, so the
    dependence changes no gradient's mean. Positions without weight take no part. The sum is exact, of 32-bit integers.
    """
    counted = weights > 0
    in_row = jnp.cumsum(counted, axis=1, dtype=jnp.uint32)
    of_rows = jnp.cumsum(in_row[:, -1], dtype=jnp.uint32) - in_row[:, -1]
    begin = (uniform[0, 0] * 2**23).astype(jnp.uint32) << 9
    turns = begin + GOLDEN * (of_rows[:, None] + in_row)
    return (turns >> 9).astype(jnp.float32) * 2.0**-23


def observe(
    t: Float[Array, "B M"], losses: Float[Array, "B M"], weights: Float[Array, "B M"], *, sigma: float
) -> LossByTime:
    """What a batch adds: the sums of its losses and weights by bin."""
    # Not a scatter: on GPUs its sums depend on the order of the threads, and a run would not repeat itself.
    bins = jnp.clip((BINS * signal_share(t, sigma)).astype(jnp.int32), 0, BINS - 1)
    inside = bins == jnp.arange(BINS)[:, None, None]
    return LossByTime(*(jnp.sum(jnp.where(inside, a, 0.0), axis=(1, 2)) for a in (losses * weights, weights)))


def running_mean(seen: LossByTime | None, new: LossByTime | None) -> LossByTime | None:
    """The running mean after one more step, where there is one."""
    after: LossByTime | None = jax.tree.map(lambda old, now: DECAY * old + (1 - DECAY) * now, seen, new)
    return after


def density(seen: LossByTime, *, sigma: float) -> Float[Array, " bins"]:
    """The probability of each bin: as t were uniform at first, then more and more the fall of the loss in it."""
    start = jnp.diff(time_of_share(jnp.linspace(0.0, 1.0, BINS + 1), sigma))
    curve = jnp.pad(_falling(seen), 1, mode="reflect", reflect_type="odd")  # goes on straight at both ends
    fall = (curve[:-2] - curve[2:]) / 2
    learnt = (fall + SLACK * start) / (jnp.sum(fall) + SLACK)
    trust = jnp.sum(seen.weights)
    return FLOOR / BINS + (1 - FLOOR) * (start + trust * (learnt - start))


def density_record(seen: LossByTime | None, *, sigma: float) -> dict[str, list[float]]:
    """For the log: `train/time_density`, the density by bin of the signal's share, where it is learnt."""
    if seen is None:
        return {}
    return {"train/time_density": np.asarray(jax.jit(partial(density, sigma=sigma))(seen)).tolist()}


def warped_times(
    uniform: Float[Array, "*B"], *, probabilities: Float[Array, " bins"], sigma: float
) -> Float[Array, "*B"]:
    """Of these probabilities by bin of the signal's share, which is uniform inside each bin."""
    reached = jnp.concatenate([jnp.zeros(1), jnp.cumsum(probabilities)])
    share = jnp.interp(uniform * reached[-1], reached, jnp.linspace(0.0, 1.0, BINS + 1))
    return time_of_share(share, sigma)


def signal_share(t: Float[Array, "*B"], sigma: float) -> Float[Array, "*B"]:
    """Of the data in x_t, by standard deviation: t / (t + sigma (1 - t))."""
    return t / (t + sigma * (1 - t))


def time_of_share(share: Float[Array, "*B"], sigma: float) -> Float[Array, "*B"]:
    """The inverse of `signal_share`."""
    return sigma * share / (sigma * share + (1 - share))


def _falling(seen: LossByTime) -> Float[Array, " bins"]:
    """The curve nearest to the bins' mean losses, by weighted squares, that never rises with t.

    By the formula for such fits: the lowest over beginnings, up to the bin, of the highest over ends, from the bin on,
    of the mean in between.
    """
    overall = jnp.sum(seen.losses) / jnp.maximum(jnp.sum(seen.weights), 1e-6)
    weights = seen.weights + 1e-6  # a bin that nothing has fallen into yet lies between its neighbours
    losses = seen.losses + 1e-6 * overall
    k = jnp.arange(BINS)
    inside = (k[:, None, None] <= k) & (k <= k[:, None])  # of beginning, end, bin
    sums, counts = (jnp.sum(jnp.where(inside, a, 0.0), axis=-1) for a in (losses, weights))
    means = jnp.where(k[:, None] <= k, sums / jnp.where(counts > 0, counts, 1.0), -jnp.inf)
    highest = jax.lax.cummax(means, axis=1, reverse=True)
    return jnp.min(jnp.where(k[:, None] <= k, highest, jnp.inf), axis=0)
