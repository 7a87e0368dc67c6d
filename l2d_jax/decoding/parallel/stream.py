"""Decoding with one pass over the weights per token while guesses hold: the next token begins during the check of this.

For each sequence, a pass has rows for: the evaluations of its token k, with guesses instead of estimates; the guessed
token k, for the LM; and the first evaluation of token k + 1. If the check confirms the guess of token k, the LM's row
is kept, and token k + 1 already has its hidden state and its first estimate, which is its guess. Otherwise the LM reads
the right token in another pass. The emitted tokens are those of `decode_tokens`.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.decoding.bounded_scan import bounded_scan
from l2d_jax.decoding.buckets import Programs, compiled
from l2d_jax.decoding.parallel.begin import find_plain, first_noise, without_penalties
from l2d_jax.decoding.parallel.stream_state import Stream, write
from l2d_jax.decoding.refinement.estimates import evaluation_keys
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.side_by_side import settle
from l2d_jax.decoding.sampler import SamplingOptions, Tokens, sample_tokens, score_tokens, token_keys
from l2d_jax.distributed.sharding import constrain
from l2d_jax.model import diffusion
from l2d_jax.model.joint_pass import DiffusionRows, joint_pass
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model


class Emitted(NamedTuple):
    """The output of passes: a token, or none, for each sequence and pass."""

    is_new: Bool[Array, "B passes"]
    tokens: Tokens


class _Pass(NamedTuple):
    """The results of a pass for each sequence."""

    hidden: Float[Array, "B D"]  # hidden state of the LM at `next`
    inputs: Float[Array, "B D"]  # its embedding
    new: KVCache
    found: Int[Array, "B W"]  # tokens that the evaluations in the window estimate
    first: Int[Array, " B"]  # the first row of the window
    is_bad: Bool[Array, "B W"]  # evaluations whose logits are NaN
    logits: Float[Array, "B V"]  # of the last evaluation, or the LM's if the token is plain
    begun: Int[Array, " B"]  # the first estimate of the token after `next`
    is_begun: Bool[Array, " B"]  # whether it comes from numbers
    begun_logits: Float[Array, "B V"]
    is_plain: Bool[Array, " B"]  # whether the LM alone decides that token


def _evaluate(model: Model, stream: Stream, settings: Refinement, sampling: SamplingOptions) -> _Pass:
    """One pass over the weights: the checks of a token, the LM on this token, and the next token's first evaluation."""
    llm, path, stages, state = model.llm, model.path, settings.stages, stream.state
    assert path is not None
    assert stages is not None
    width = min(settings.window, max(1, stages.size - 1))  # the first evaluation is nearly always known
    first = jnp.minimum(stream.settled, stages.size - width)
    rows = _diffusion_rows(model, stream, settings, first, width=width)
    made = joint_pass(model, stream.next[:, None], state.positions[:, None] + 1, rows, state.cache)
    with jax.named_scope("corrections"):
        hidden = jnp.repeat(state.hidden[:, None], width, axis=1)  # every row corrects this hidden state
        if path.is_anchored:
            hidden = jnp.concatenate([hidden, made.hidden], axis=1)
        is_plain = stream.is_plain[:, None] & (jnp.arange(hidden.shape[1]) < width)
        hidden = jnp.where(is_plain[..., None], hidden, rows.correct(path, hidden, made.features))
        if not path.is_anchored:  # the LM's logits are those of the first evaluation
            hidden = jnp.concatenate([hidden, made.hidden], axis=1)
        logits = llm.logits(hidden)
        found = _estimate(logits, rows.t, stream, settings, width=width)
    count = jnp.where(stream.is_plain, 1, stages.count)
    is_last = jnp.arange(width) == jnp.clip(count - 1 - first, 0, width - 1)[:, None]
    is_last = constrain(is_last, "gathered_batch", "parts")
    is_plain, plain = find_plain(model, made.hidden[:, 0], logits[:, -1], stages.count, sampling)
    return _Pass(
        hidden=made.hidden[:, 0],
        inputs=llm.lookup(stream.next[:, None])[:, 0],
        new=made.new,
        found=found[:, :width],
        first=first,
        is_bad=jnp.isnan(hidden[:, :width, 0]),
        # A sum, since XLA would move logits between devices to gather some of them.
        logits=jnp.where(is_last[..., None], logits[:, :width], 0).sum(axis=1),
        begun=found[:, -1],
        is_begun=~jnp.isnan(logits[:, -1]).any(axis=-1),
        begun_logits=jnp.where(is_plain[:, None], plain, logits[:, -1]),
        is_plain=is_plain,
    )


def _diffusion_rows(
    model: Model, stream: Stream, settings: Refinement, first: Int[Array, " B"], *, width: int
) -> DiffusionRows:
    """The evaluations from `first` on; with an anchored path also the first one of the token after `next`, at t = 0."""
    path, stages, state = model.path, settings.stages, stream.state
    assert path is not None
    assert stages is not None
    noise, following = first_noise(path, _keys(stream, ahead=False)[0]), state.positions[:, None] + 1
    places = (first[:, None] + jnp.arange(width))[:, None]
    x = stages.x(places, noise[:, None], model.vectors(stream.estimates)[:, None])[:, 0]
    t = stages.spread(stages.times, places)[:, 0]
    at, inputs = (jnp.repeat(a[:, None], width, axis=1) for a in (state.positions, state.inputs))
    if path.is_anchored:  # a released path corrects nothing there
        begun = first_noise(path, _keys(stream, ahead=True)[0])[:, None]
        columns = ((x, begun), (t, jnp.zeros((len(t), 1))), (at, following))
        x, t, at = (jnp.concatenate(pair, axis=1) for pair in columns)
        inputs = jnp.concatenate([inputs, model.llm.lookup(stream.next[:, None])], axis=1)
    return DiffusionRows(x, t, at, inputs, None if settings.table is None else settings.table.at(t, None))


def _estimate(
    logits: Float[Array, "B R V"], t: Float[Array, "B M"], stream: Stream, settings: Refinement, *, width: int
) -> Int[Array, "B R"]:
    """The tokens that the rows of a pass estimate; the last row is at t = 0 of the token after `next`."""
    t = t if t.shape[1] == logits.shape[1] else jnp.pad(t, ((0, 0), (0, 1)))
    checked, begun = (_keys(stream, ahead=ahead)[1][:, None] for ahead in (False, True))
    keys = evaluation_keys(jnp.concatenate([jnp.repeat(checked, width, axis=1), begun], axis=1), t).reshape(-1)
    found = diffusion.sample_rows(keys, logits.reshape(-1, logits.shape[-1]), settings.row_temperatures(t).reshape(-1))
    return found.reshape(t.shape).astype(jnp.int32)


def _keys(stream: Stream, *, ahead: bool) -> tuple[Array, Array, Array]:
    """The keys for the noise, the estimates and the sample of the token being checked, or of the next one (`ahead`)."""
    return token_keys(stream.state.keys, stream.state.count + (stream.is_checked if ahead else 0))


def decode_stream(
    model: Model,
    stream: Stream,
    *,
    settings: Refinement,
    sampling: SamplingOptions,
    stop_ids: Int[Array, " n"],
    passes: int,
    limit: Int[Array, ""] | None = None,
) -> tuple[Stream, Emitted]:
    """Make `passes` passes, or only the first `limit` of them.

    `settings` must have stages; sequences have neither classes nor several noise samples.
    """
    vocab_size = model.llm.architecture.vocab_size

    def one_pass(carry: tuple[Stream, Array | None], _: None) -> tuple[tuple[Stream, Array | None], Emitted]:
        stream, counts = carry
        made = _evaluate(model, stream, settings, sampling)
        checked = _check(stream, made, settings)
        token = sample_tokens(_keys(stream, ahead=False)[2], made.logits, sampling, counts=counts)
        token = jnp.where(checked.is_bad, stop_ids[0], token)
        is_last = checked.is_bad | (checked.is_new & (token[:, None] == stop_ids).any(axis=-1))
        scores = score_tokens(token, made.logits) if sampling.is_scored else (None, None, None)
        emitted = Emitted(checked.is_new, Tokens(token, *_cost(stream, settings), *scores))
        guess = sample_tokens(_keys(stream, ahead=True)[2], made.begun_logits, without_penalties(sampling))
        stream = _follow(stream, made, checked, token, guess, is_last=is_last, settings=settings)
        return (stream, sampling.count(counts, jnp.where(checked.is_new, token, vocab_size))), emitted

    carry = stream, sampling.start_counts(vocab_size)
    (stream, _), emitted = bounded_scan(one_pass, carry, length=passes, limit=limit)
    return stream, jax.tree.map(lambda array: array.swapaxes(0, 1), emitted)


class _Checked(NamedTuple):
    """What a pass has found about the token that it checks, for each sequence."""

    settled: Int[Array, " B"]  # number of leading evaluations whose estimates are final
    estimates: Int[Array, "B n"]
    is_new: Bool[Array, " B"]  # whether the token is decided and has not been emitted
    is_bad: Bool[Array, " B"]  # whether it comes from logits that are NaN


def _check(stream: Stream, made: _Pass, settings: Refinement) -> _Checked:
    """Keep the estimates that are confirmed, and find out which tokens are decided."""
    stages = settings.stages
    assert stages is not None
    count = jnp.where(stream.is_plain, 0, stages.count)
    settled, estimates = settle(
        stream.settled[:, None],
        stream.estimates[None, :, None],
        made.found[None, :, None],
        made.first[:, None],
        count[:, None],
        most=settings.most_settled.reshape(-1, 1),
    )
    settled, estimates = settled[:, 0], estimates[0, :, 0]
    places = made.first[:, None] + jnp.arange(made.found.shape[1])
    is_bad = (made.is_bad & (places < jnp.maximum(settled, 1)[:, None])).any(axis=1)
    is_new = stream.is_checked & ~stream.state.done & ((settled >= count) | is_bad)
    return _Checked(settled, estimates, is_new, is_new & (is_bad | jnp.isnan(made.logits).any(axis=-1)))


def _cost(stream: Stream, settings: Refinement) -> tuple[Int[Array, " B"], Int[Array, " B"]]:
    """The evaluations of the token that is checked, and the passes since the last emitted one, with this pass."""
    stages = settings.stages
    assert stages is not None
    evaluations = settings.solver.evaluations(jnp.broadcast_to(settings.steps, stream.passes.shape))
    return jnp.where(stream.is_plain & (stages.count > 0), 0, evaluations), stream.passes + ~stream.state.done


def _follow(
    stream: Stream,
    made: _Pass,
    checked: _Checked,
    token: Int[Array, " B"],
    guess: Int[Array, " B"],
    *,
    is_last: Bool[Array, " B"],
    settings: Refinement,
) -> Stream:
    """The stream after a pass: at the next token where the LM has read the right one, else at the same token.

    `token` is the decided one, and `guess` the guess of the one after it.
    """
    state, stages = stream.state, settings.stages
    assert stages is not None
    is_kept = ~state.done & (~stream.is_checked | (checked.is_new & (token == stream.next)))

    def keep(new: Array, old: Array) -> Array:
        return jnp.where(is_kept.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    after = dataclasses.replace(
        state,
        cache=write(state.cache, made.new, stream.read, is_kept),
        hidden=keep(made.hidden, state.hidden),
        inputs=keep(made.inputs, state.inputs),
        positions=state.positions + is_kept,
        count=state.count + checked.is_new,
        done=state.done | is_last,
        broken=state.broken | checked.is_bad,
    )
    begun = jnp.broadcast_to(made.begun[:, None], checked.estimates.shape)
    return Stream(
        state=after,
        next=keep(guess, jnp.where(stream.is_checked, token, stream.next)),
        is_checked=is_kept | (stream.is_checked & ~checked.is_new),
        is_plain=keep(made.is_plain, stream.is_plain),
        settled=keep(jnp.minimum(stages.count, made.is_begun.astype(jnp.int32)), checked.settled),
        estimates=keep(begun, checked.estimates),
        read=stream.read + is_kept,
        passes=jnp.where(checked.is_new, 0, _cost(stream, settings)[1]),
    )


def stream_decoder() -> Programs:
    """`decode_stream`, compiled as `decode.token_decoder`; it donates the stream."""
    return compiled(decode_stream, static=("passes",), donate="stream")
