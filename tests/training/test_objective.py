"""The loss by hand, its gradient, the draws, and logits that are computed a few positions at a time."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.data.batch import Batch
from l2d_jax.model import lm_head
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.training import objective
from l2d_jax.training.objective import Corruption, LossOptions
from tests.support import plain, tiny

KEY = jax.random.key(0)


@partial(jax.jit, static_argnames=("reduction", "chunk"))
def value_and_gradient(
    path: DiffusionPath, llm: LLM, batch: Batch, draws: Corruption, *, reduction: Any, chunk: Any
) -> Any:
    """Of the loss of this corruption."""

    def loss(path: DiffusionPath) -> jax.Array:
        context = read_context(llm, batch)
        hidden = objective.correct(path, llm, context, batch, draws)
        losses = lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, batch.targets, chunk=chunk)
        return jnp.sum(losses * objective.loss_weights(batch.weights, reduction))

    return jax.value_and_grad(loss)(path)


@jax.jit
def read(llm: LLM, batch: Batch) -> Context:
    return read_context(llm, batch)


def loss_by_hand(model: Model, batch: Batch, draws: Corruption) -> np.ndarray:
    """Cross-entropies [B, M], one position at a time."""
    llm, path = model.llm, model.path
    assert path is not None
    context = read(llm, batch)
    losses = np.zeros(batch.targets.shape)
    for b in range(losses.shape[0]):
        for m in range(losses.shape[1]):
            t, target = float(draws.t[b, m]), int(batch.targets[b, m])
            label = None if draws.labels is None else int(draws.labels[b, m])
            x = t * plain.f64(model.table)[target] + (1 - t) * 64 * plain.f64(draws.noise)[b, m]
            keys, values = np.array(context.cache.k[:, b]), np.array(context.cache.v[:, b])
            f = plain.features(path, llm, x, t, label, int(batch.queries[b, m]), keys, values)
            hidden = plain.f64(context.hidden)[b, m] + plain.merge_weight(path, t, label) * f
            logits = plain.logits(llm, hidden)
            losses[b, m] = np.log(np.exp(logits).sum()) - logits[target]
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("classes", [0, 3])
def test_the_loss_by_hand(classes: int) -> None:
    model, batch = tiny.model("qwen", classes=classes), tiny.batch(classes=max(classes, 1))
    assert model.path is not None
    losses = loss_by_hand(model, batch, objective.sample_corruption(KEY, batch, model.path))
    wanted = {  # the rows have four and three answer tokens
        "token": (losses[0].sum() + losses[1, :3].sum()) / 7,
        "example": (losses[0].mean() + losses[1, :3].mean()) / 2,
        "sum": losses[0].sum() + losses[1, :3].sum(),
    }
    kinds: Any = list(wanted)
    found = jax.jit(
        lambda *arguments: [objective.diffusion_loss(*arguments, options=LossOptions(kind))[0] for kind in kinds]
    )
    np.testing.assert_allclose(found(model.path, model.llm, batch, KEY), list(wanted.values()), rtol=1e-4)


def test_rows_of_padding_do_not_count() -> None:
    values, weights = jnp.array([[1.0, 3.0], [5.0, 7.0], [9.0, 9.0]]), jnp.array([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    assert float(jnp.sum(values * objective.loss_weights(weights, "token"))) == 3.0
    assert float(jnp.sum(values * objective.loss_weights(weights, "example"))) == 3.5
    for reduction in ("token", "example"):
        assert float(jnp.sum(values * objective.loss_weights(jnp.zeros((3, 2)), reduction))) == 0.0
        halves = objective.loss_weights(weights.reshape(3, 1, 2), reduction)  # micro-batches: the same shares
        np.testing.assert_array_equal(halves[:, 0], objective.loss_weights(weights, reduction))
        np.testing.assert_allclose(jnp.sum(halves), 1.0)


def test_examples_of_a_packed_row_count_as_rows_do() -> None:
    weights = jnp.array([[1.0, 1.0, 1.0, 0.0, 1.0], [1.0, 0.0, 0.0, 0.0, 0.0]])
    segments = jnp.array([[1, 1, 2, 2, 3], [5, 5, 5, 0, 0]], jnp.int32)
    found = objective.loss_weights(weights, "example", segments=segments)
    np.testing.assert_allclose(found * 4, [[0.5, 0.5, 1, 0, 1], [1, 0, 0, 0, 0]])
    micro = objective.loss_weights(weights[:, None], "example", segments=segments[:, None])
    np.testing.assert_array_equal(micro[:, 0], found)
    np.testing.assert_allclose(objective.loss_weights(weights, "token", segments=segments), weights / 5)


def program(draws_per_context: int) -> Any:
    """Loss and gradient."""

    def loss(*arguments: Any) -> jax.Array:
        return objective.diffusion_loss(*arguments, draws_per_context=draws_per_context)[0]

    return jax.jit(jax.value_and_grad(loss))


@pytest.mark.slow
def test_several_draws_are_the_mean_of_several_losses() -> None:
    llm, path, batch = tiny.llm(), tiny.path(classes=3), tiny.batch(examples=3, classes=3)
    batch = batch._replace(weights=batch.weights.at[2].set(0.0))
    found, one = program(3)(path, llm, batch, KEY), program(1)
    each = [one(path, llm, batch, key) for key in jax.random.split(KEY, 3)]
    assert len({float(value) for value, _ in each}) == 3
    mean = jax.tree.map(lambda *values: sum(values) / 3, *each)
    np.testing.assert_allclose(found[0], mean[0], rtol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), found[1], mean[1])


def test_several_draws_share_one_frozen_pass() -> None:
    """And stand side by side: the cache that they read has a row per example."""
    llm, path, batch = tiny.llm(), tiny.path(), tiny.batch(examples=2, length=10, answers=4)
    several, draws = objective.sample_corruptions(KEY, batch, path, draws_per_context=3)
    np.testing.assert_array_equal(several.queries, jnp.repeat(batch.queries, 3, axis=1))
    np.testing.assert_array_equal(several.targets, jnp.repeat(batch.targets, 3, axis=1))
    assert draws.noise.shape == (2, 12, 16)
    keys = jax.random.split(KEY, 3)
    np.testing.assert_array_equal(draws.t[:, 1::3], objective.sample_corruption(keys[1], batch, path).t)
    np.testing.assert_array_equal(draws.noise[:, 2::3], objective.sample_corruption(keys[2], batch, path).noise)
    context = read_context(llm, several)
    assert context.cache.k.shape[1::2] == (2, 10)
    assert context.hidden.shape == (2, 12, 32)


@pytest.mark.slow
def test_one_draw_is_the_plain_loss_bit_for_bit() -> None:
    llm, path, batch = tiny.llm(), tiny.path(), tiny.batch()
    draws = objective.sample_corruption(KEY, batch, path)
    plain, _ = value_and_gradient(path, llm, batch, draws, reduction="example", chunk=1024)
    assert float(program(1)(path, llm, batch, KEY)[0]) == float(plain)


@pytest.mark.slow
def test_the_answers_positions_alone_give_the_loss_of_all_positions() -> None:
    """Queries of M < T positions, against all T with weight zero outside the answer, with the same draws."""
    llm, path, few = tiny.llm(), tiny.path(), tiny.batch(examples=2, length=9, answers=4)
    draws = objective.sample_corruption(KEY, few, path)
    rows = jnp.arange(2)[:, None]

    def spread(values: jax.Array, filler: jax.Array) -> jax.Array:
        return filler.at[rows, few.queries].set(values)

    everywhere = jnp.tile(jnp.arange(9, dtype=jnp.int32), (2, 1))
    whole = few._replace(
        queries=everywhere,
        targets=spread(few.targets, jnp.ones((2, 9), jnp.int32)),
        weights=spread(few.weights, jnp.zeros((2, 9))),
    )
    other = objective.sample_corruption(jax.random.key(1), whole, path)
    same = Corruption(t=spread(draws.t, other.t), noise=spread(draws.noise, other.noise), labels=None)
    gathered = value_and_gradient(path, llm, few, draws, reduction="example", chunk=1024)
    full = value_and_gradient(path, llm, whole, same, reduction="example", chunk=1024)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), gathered, full)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 4])
def test_logits_in_chunks_change_neither_value_nor_gradient(chunk: int) -> None:
    llm, path, batch = tiny.llm(), tiny.path(), tiny.batch(examples=2, answers=4)
    draws = objective.sample_corruption(KEY, batch, path)
    whole = value_and_gradient(path, llm, batch, draws, reduction="token", chunk=8)
    chunked = value_and_gradient(path, llm, batch, draws, reduction="token", chunk=chunk)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), whole, chunked)


@pytest.mark.parametrize("reader", ["lm", "path"])
def test_no_gradient_enters_the_frozen_model(reader: str) -> None:
    """None through the hidden states, the keys and the values; only the loss of the path's own layers remains."""
    path, batch, frozen = tiny.path(reader=reader), tiny.batch(), tiny.llm()

    def through_context(llm: LLM) -> jax.Array:
        context = objective.path_context(path, llm, batch)
        return jnp.sum(context.hidden) + jnp.sum(jnp.sin(context.cache.k)) + jnp.sum(jnp.cos(context.cache.v))

    for leaf in jax.tree.leaves(jax.jit(jax.grad(through_context))(frozen)):
        np.testing.assert_array_equal(leaf, 0.0)
    gradient = jax.grad(lambda path: objective.diffusion_loss(path, frozen, batch, KEY)[0])
    moments = jax.eval_shape(gradient, path)  # the shape of the path, and of nothing else
    assert jax.tree.structure(moments) == jax.tree.structure(path)


@pytest.mark.slow
def test_the_gradient_reaches_every_parameter_but_one_bias() -> None:
    """The bias of w's last layer cancels in w(t) - w(0)."""
    llm, batch = tiny.llm("qwen"), tiny.batch(examples=4, classes=3)
    for variant in ({"classes": 3}, {"layers": "dense"}):
        path = tiny.path("qwen", **variant)
        draws = objective.sample_corruption(KEY, batch, path)
        _, gradient = value_and_gradient(path, llm, batch, draws, reduction="token", chunk=1024)
        largest = {
            jax.tree_util.keystr(where): float(jnp.max(jnp.abs(leaf)))
            for where, leaf in jax.tree_util.tree_leaves_with_path(gradient)
        }
        assert [name for name, size in largest.items() if size < 1e-7] == [".merge.last.bias"]


def test_draws_are_independent_per_position() -> None:
    batch, path = tiny.batch(examples=40, length=60, answers=50, classes=3), tiny.path(classes=3)
    draws = objective.sample_corruption(KEY, batch, path)
    assert draws.labels is not None
    assert len(np.unique(draws.t)) > 1990
    np.testing.assert_allclose([draws.t.mean(), draws.t.std(), draws.t.min()], [0.5, 12**-0.5, 0.0], atol=0.02)
    np.testing.assert_allclose([draws.noise.mean(), draws.noise.std()], [0.0, 1.0], atol=0.02)
    dropped = np.array(draws.labels) == 3
    np.testing.assert_allclose(dropped.mean(), 0.2, atol=0.03)  # three standard deviations
    assert (dropped.any(axis=1) & ~dropped.all(axis=1)).all()  # per position, not per example
    np.testing.assert_array_equal(np.where(dropped, 3, batch.classes[:, None]), draws.labels)
    assert abs(np.corrcoef(dropped.ravel(), np.array(draws.t).ravel())[0, 1]) < 0.06
    assert not np.array_equal(objective.sample_corruption(jax.random.key(1), batch, path).t, draws.t)
    assert objective.sample_corruption(KEY, batch, tiny.path()).labels is None


@pytest.mark.slow
def test_own_estimates_are_shown_in_place_of_true_tokens() -> None:
    """The path guesses at t = 0 from the same noise, and x_t holds the guess; the loss is still of the true token."""
    model, batch = tiny.model(), tiny.batch()
    llm, path = model.llm, model.path
    assert path is not None
    found, terms = objective.diffusion_loss(path, llm, batch, KEY, own_estimates=1.0)
    context = read(llm, batch)
    corruption = objective.sample_corruption(KEY, batch, path)
    start = corruption._replace(t=jnp.zeros_like(corruption.t))
    guesses = jnp.argmax(llm.logits(objective.correct(path, llm, context, batch, start)), axis=-1)
    assert (guesses != batch.targets).mean() > 0.5
    hidden = objective.correct(path, llm, context, batch._replace(targets=guesses), corruption)
    losses = lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, batch.targets)
    np.testing.assert_allclose(terms, losses, rtol=1e-5)
    np.testing.assert_allclose(found, jnp.sum(losses * objective.loss_weights(batch.weights, "example")), rtol=1e-5)
    _, plain = objective.diffusion_loss(path, llm, batch, KEY)
    _, half = objective.diffusion_loss(path, llm, batch, KEY, own_estimates=0.5)
    assert (jnp.isclose(half, terms) | jnp.isclose(half, plain)).all()
    share = (~jnp.isclose(half, plain, rtol=1e-6)).mean(axis=1)
    np.testing.assert_array_less(share, 0.5 + 0.5 / half.shape[1] + 1e-6)  # half of the positions, less right guesses
    assert not jnp.allclose(half, terms)
    assert not jnp.allclose(half, plain)


@pytest.mark.slow
def test_the_gradient_with_own_estimates() -> None:
    """Guesses are steps of the weights: their own gradient is zero, and finite differences agree with the rest."""
    model, batch = tiny.model(), tiny.batch()
    llm, path = model.llm, model.path
    assert path is not None

    def loss(path: DiffusionPath, llm: LLM, batch: Batch) -> jax.Array:
        return objective.diffusion_loss(path, llm, batch, KEY, own_estimates=1.0)[0]

    gradient = jax.jit(jax.grad(loss))(path, llm, batch)
    size = jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient)))

    def at(step: float) -> jax.Array:
        return jax.jit(loss)(jax.tree.map(lambda w, g: w + step * g / size, path, gradient), llm, batch)

    assert (at(1e-2) - at(-1e-2)) / 2e-2 == pytest.approx(float(size), rel=2e-2)


def test_cosmap_is_that_of_the_release() -> None:
    u = np.linspace(0, 1, 1001)[:-1]
    wanted = 1 - 1 / (np.tan(np.pi / 2 * u) + 1)
    found = np.asarray(objective.cosmap_times(jnp.asarray(u, jnp.float32)))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-7)
    assert found[0] == 0.0
    assert found[-1] < 1.0


def test_the_times_of_the_defaults_are_the_bits_that_are_drawn() -> None:
    batch, path = tiny.batch(), tiny.path()
    plain = objective.sample_corruption(jax.random.key(3), batch, path)
    drawn = [
        objective.sample_corruptions(jax.random.key(3), batch, path, draws_per_context=1, times=times)[1]
        for times in objective.TIMES.values()
    ]
    jax.tree.map(np.testing.assert_array_equal, drawn[0], plain)
    np.testing.assert_array_equal(drawn[1].noise, plain.noise)
    np.testing.assert_array_equal(drawn[1].t, objective.cosmap_times(plain.t))


def test_each_evaluation_has_a_step_of_the_working() -> None:
    working = jnp.broadcast_to(jnp.arange(10, 16, dtype=jnp.int32), (40, 50, 6))
    batch = tiny.batch(examples=40, length=60, answers=50)._replace(working=working)
    batch = batch._replace(targets=jnp.full((40, 50), 16, jnp.int32))
    shown, stepped, t = objective.next_steps(batch, jax.random.uniform(KEY, (40, 50)).at[0, 0].set(1.0))
    step = np.round(np.asarray(t) * 6).astype(int)
    np.testing.assert_allclose(t, step / 6, atol=1e-7)
    np.testing.assert_allclose(np.bincount(step.ravel()) / step.size, 1 / 7, atol=0.03)
    np.testing.assert_array_equal(stepped.targets, 10 + step)
    np.testing.assert_array_equal(shown, 10 + np.maximum(step - 1, 0))  # x_0 shows nothing


def test_without_a_working_the_loss_is_the_plain_one() -> None:
    batch, t = tiny.batch(), jnp.full((2, 4), 0.3)
    shown, stepped, same = objective.next_steps(batch, t)
    assert (id(shown), id(stepped), id(same)) == (id(batch.targets), id(batch), id(t))


@pytest.mark.slow
def test_the_loss_of_a_working_by_its_parts() -> None:
    model, batch = tiny.model(start="anchored", time_scale=100.0), tiny.batch()
    llm, path = model.llm, model.path
    assert path is not None
    working = jax.random.randint(jax.random.key(5), (*batch.targets.shape, 3), 0, 50)
    batch = batch._replace(working=working)
    found, terms = objective.diffusion_loss(path, llm, batch, KEY)
    corruption = objective.sample_corruption(KEY, batch, path)
    shown, stepped, t = objective.next_steps(batch, corruption.t)
    hidden = objective.correct(path, llm, read(llm, batch), batch._replace(targets=shown), corruption._replace(t=t))
    losses = lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, stepped.targets)
    np.testing.assert_allclose(terms, losses, rtol=1e-5)
    np.testing.assert_allclose(found, jnp.sum(losses * objective.loss_weights(batch.weights, "example")), rtol=1e-5)
    assert (stepped.targets != batch.targets).any()
