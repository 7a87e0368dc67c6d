"""All evaluations of a token in parallel: guess the estimates, evaluate all rows in one pass, keep what is confirmed.

If the velocity is a token, the x of an evaluation follows from integers: the estimates before it. A pass evaluates a
window of rows with guesses instead of estimates. Rows up to the first wrong guess had the true x, so their estimates
are final, including that of the wrong one. What later rows found are the next guesses. The result is the sequential
answer, certified by equality of integers, in 1 pass plus one for each wrong guess. (Jacobi iteration: Song et al. 2020;
forecasts: Wiggers and Hoogeboom 2020.)
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from l2d_jax.decoding.refinement.estimates import corrected_hidden, estimated_tokens, evaluation_keys
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model


class Progress(NamedTuple):
    """The progress of the evaluations of each position; G is 2 with labels: class, then null class."""

    settled: Int[Array, "B M"]  # number of leading rows whose estimates are final
    tokens: Int[Array, "G B M n"]  # estimates; those beyond the settled ones are guesses
    hidden: Float[Array, "B M D"]  # hidden states of the answer, once all rows are settled
    passes: Int[Array, "B M"]


def refine_side_by_side(
    model: Model, context: Context, noise: Float[Array, "B M C"], *, settings: Refinement, keys: Key[Array, "B M"]
) -> tuple[Float[Array, "B M D"], Int[Array, "B M"]]:
    """Hidden states after the whole budget, as from `refine`, and the passes of the path for each position.

    `noise` is x_0 itself. The settings must have stages, and their velocity must be a token.
    """
    stages = settings.stages
    assert stages is not None
    count = jnp.broadcast_to(stages.count[:, None], noise.shape[:2])
    none = jnp.zeros(noise.shape[:2], jnp.int32)

    def refined() -> tuple[Array, Array]:
        start = begin_progress(model, context, settings=settings, keys=keys)
        step = make_pass(model, context, noise, count, keys, settings=settings)
        end = jax.lax.while_loop(lambda progress: (progress.settled < count).any(), step, start)
        return end.hidden, end.passes

    return jax.lax.cond((count > 0).any(), refined, lambda: (context.hidden, none))


def begin_progress(model: Model, context: Context, *, settings: Refinement, keys: Key[Array, "B M"]) -> Progress:
    """Start with the LM's token as every guess. If the path corrects nothing at t = 0, the first estimate is final."""
    stages, path = settings.stages, model.path
    assert stages is not None
    assert path is not None
    t, none = jnp.zeros(keys.shape, jnp.float32), jnp.zeros(keys.shape, jnp.int32)
    first = row_tokens(model, context.hidden[None], t, settings=settings, keys=keys)[0]
    branches = 1 if context.labels is None else 2
    guesses = jnp.broadcast_to(first[..., None], (branches, *first.shape, stages.size))
    settled = none if path.is_anchored else jnp.minimum(stages.count[:, None], 1) + none
    return Progress(settled, guesses, context.hidden, none)


def make_pass(
    model: Model,
    context: Context,
    noise: Float[Array, "B M C"],
    count: Int[Array, "B M"],
    keys: Key[Array, "B M"],
    *,
    settings: Refinement,
) -> Callable[[Progress], Progress]:
    """Make a pass over a window of rows of every position, starting at its first row that is not settled."""
    stages = settings.stages
    assert stages is not None
    width = min(settings.window, stages.size)
    columns = {name: column for name, column in context._asdict().items() if name != "cache"}
    wide = context._replace(**jax.tree.map(lambda a: jnp.repeat(a, width, axis=1), columns))
    wide_keys = jnp.repeat(keys, width, axis=1)

    def one_pass(progress: Progress) -> Progress:
        first = jnp.minimum(progress.settled, stages.size - width)
        rows = first[..., None] + jnp.arange(width)
        tokens = progress.tokens
        estimates = model.vectors(tokens.reshape(-1, tokens[0, 0].size)).reshape(*tokens.shape, -1)
        if len(estimates) > 1:
            mixed = diffusion.guide(estimates[0], estimates[1], settings.guidance[:, None, None, None])
        else:
            mixed = estimates[0]
        x, t = stages.x(rows, noise, mixed), stages.spread(stages.times, rows)
        x, t = x.reshape(*wide_keys.shape, -1), t.reshape(wide_keys.shape)
        hidden = corrected_hidden(model, wide, x, t, table=settings.table)
        found = row_tokens(model, hidden, t, settings=settings, keys=wide_keys).reshape(-1, *rows.shape)
        settled, tokens = settle(
            progress.settled, progress.tokens, found, first, count, most=settings.most_settled.reshape(-1, 1)
        )
        hidden = hidden[0].reshape(*rows.shape, -1)
        is_bad = (jnp.isnan(hidden[..., 0]) & (rows < settled[..., None])).any(axis=-1)
        last = jnp.clip(count - 1 - first, 0, width - 1)[..., None, None]
        end = jnp.where(is_bad[..., None], jnp.nan, jnp.take_along_axis(hidden, last, axis=2)[:, :, 0])
        settled = jnp.where(is_bad, count, settled)
        is_new = (progress.settled < count) & (settled == count)
        return Progress(
            settled,
            tokens,
            jnp.where(is_new[..., None], end, progress.hidden),
            progress.passes + (progress.settled < count),
        )

    return one_pass


def row_tokens(
    model: Model,
    hidden: Float[Array, "G B M D"],
    t: Float[Array, "B M"],
    *,
    settings: Refinement,
    keys: Key[Array, "B M"],
) -> Int[Array, "G B M"]:
    """The tokens that evaluations at these times estimate; both branches of guidance are sampled with the same key."""
    branches = len(hidden)

    def each(array: Array) -> Array:
        return jnp.tile(array, (branches, *[1] * (array.ndim - 1)))

    tokens = estimated_tokens(
        model,
        hidden.reshape(-1, *hidden.shape[2:]),
        temperature=each(settings.row_temperatures(t)),
        keys=each(evaluation_keys(keys, t)),
        allowed=None if settings.allowed is None else each(settings.allowed),
    )
    return tokens.reshape(hidden.shape[:3])


def settle(
    before: Int[Array, "B M"],
    guesses: Int[Array, "G B M n"],
    found: Int[Array, "G B M W"],
    first: Int[Array, "B M"],
    count: Int[Array, "B M"],
    *,
    most: Int[Array, "#B 1"],
) -> tuple[Int[Array, "B M"], Int[Array, "G B M n"]]:
    """The number of settled rows after a pass over the rows from `first` on, and the next guesses.

    `before` rows were settled before the pass, which settles at most `most` others.
    """
    size, width = guesses.shape[-1], found.shape[-1]
    rows = first[..., None] + jnp.arange(width)
    guessed = jnp.take_along_axis(guesses, rows[None], axis=-1)
    is_right = (found == guessed).all(axis=0) | (rows < before[..., None])
    held = jnp.cumprod(is_right, axis=-1).sum(axis=-1)
    settled = jnp.minimum(first + jnp.minimum(held + 1, width), before + most)
    settled = jnp.minimum(settled, count)
    places = jnp.arange(size) - first[..., None]
    inside = jnp.take_along_axis(found, jnp.clip(places, 0, width - 1)[None], axis=-1)  # after the window: as its last
    is_old = jnp.arange(size) < before[..., None]
    return jnp.maximum(settled, before), jnp.where(is_old, guesses, inside)
