"""One optimizer step: micro-batches add up to the batch, the frozen model stays as it is, one program for all steps."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh

from l2d_jax.config.schema import OptimConfig, TrainConfig
from l2d_jax.data.batch import Batch
from l2d_jax.distributed import sharding
from l2d_jax.errors import InputError
from l2d_jax.model import context, lm_head
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.training import objective
from l2d_jax.training.objective import Corruption, LossOptions
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import REMAT, TrainState, check_batch, init_state, is_finite, make_step, micro_batches
from l2d_jax.weights import model_folder
from tests.support import tiny
from tests.support.programs import same_bits

KEY = jax.random.key(0)


def start(path: DiffusionPath, mesh: Mesh, adam: optax.GradientTransformation, **seen: Any) -> TrainState:
    """On the mesh, from a copy of the path, since steps donate their state."""
    declared = DiffusionPath.declare(path.config, tiny.architecture("llama"))
    path = jax.device_put(jax.tree.map(np.array, path), sharding.shardings(declared, mesh))
    return init_state(adam, path, mesh, **seen)


@pytest.fixture(scope="module")
def program(mesh: Mesh) -> tuple[optax.GradientTransformation, Any]:
    """An optimizer without weight decay, and its step for batches of four."""
    adam = optimizer(OptimConfig(weight_decay=0.0), 1e-2)
    config = TrainConfig(batch_size=4)
    state = start(tiny.path(), mesh, adam)
    return adam, make_step(adam, config, state, mesh, objective=tiny.objective(config))


def uneven() -> Batch:
    """Four examples with four, one, three and no answer tokens."""
    batch = tiny.batch(examples=4, length=8, answers=4)
    counts = jnp.array([[4], [1], [3], [0]])
    return batch._replace(weights=(jnp.arange(4) < counts).astype(jnp.float32))


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["token", "example"])
def test_micro_batches_are_one_batch(reduction: Any, mesh: Mesh) -> None:
    """Two of two examples, against the mean over all four with the same draws: loss, gradient norm, new weights."""
    llm, path, batch = tiny.llm(), tiny.path(), uneven()
    adam = optimizer(OptimConfig(), 1e-2)
    config = TrainConfig(batch_size=4, accumulation=2, reduction=reduction, remat="none")
    state = start(path, mesh, adam)
    step = make_step(adam, config, state, mesh, objective=tiny.objective(config))
    new, metrics = step(state, llm, micro_batches(batch, 2, mesh), KEY)

    halves = [jax.tree.map(lambda a: a[:2], batch), jax.tree.map(lambda a: a[2:], batch)]
    drawn = [
        objective.sample_corruption(key, half, path) for key, half in zip(jax.random.split(KEY, 2), halves, strict=True)
    ]
    draws = Corruption(*(jnp.concatenate([half[i] for half in drawn]) for i in range(2)), labels=None)

    @jax.jit
    @jax.value_and_grad
    def whole(path: DiffusionPath) -> jax.Array:
        hidden = objective.correct(path, llm, context.read_context(llm, batch), batch, draws)
        losses = lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, batch.targets)
        return jnp.sum(losses * objective.loss_weights(batch.weights, reduction))

    loss, gradient = whole(path)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    gradient = jax.tree.map(np.array, gradient)
    norm = np.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
    np.testing.assert_allclose(metrics["gradient_norm"], norm, rtol=1e-4)
    first_moment = next(part.mu for part in jax.tree.leaves(new.optimizer, is_leaf=_is_adam) if _is_adam(part))
    close = partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-6)
    jax.tree.map(lambda m, g: close(m, 0.1 * g / max(1.0, norm)), first_moment, gradient)


def _is_adam(part: Any) -> bool:
    return isinstance(part, optax.ScaleByAdamState)


@pytest.mark.slow
def test_three_steps_of_one_program_leave_the_frozen_model_as_it_is(mesh: Mesh, program: Any) -> None:
    llm, path, (adam, step) = tiny.llm(), tiny.path(), program
    before, losses = jax.tree.map(np.array, llm), []
    state = start(path, mesh, adam)
    for number in range(3):
        old = state
        batch = micro_batches(tiny.batch(examples=4, seed=number), 1, mesh)
        state, metrics = step(state, llm, batch, jax.random.fold_in(KEY, number))
        losses.append(float(metrics["loss"]))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))  # donated
    assert np.isfinite(losses).all()
    assert step._cache_size() == 1
    jax.tree.map(np.testing.assert_array_equal, llm, before)
    moved = jax.tree.map(lambda a, b: bool((np.array(a) != np.array(b)).any()), state.trained, path)
    for name, leaf in jax.tree_util.tree_leaves_with_path(moved):
        assert leaf != (jax.tree_util.keystr(name) == ".merge.last.bias"), jax.tree_util.keystr(name)
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer) if leaf.ndim]
    assert sorted(leaf.shape for leaf in moments) == sorted(2 * [leaf.shape for leaf in jax.tree.leaves(path)])


@pytest.mark.slow
def test_a_new_path_learns_from_its_output_backwards(mesh: Mesh, program: Any) -> None:
    """Which parts have moved after each step from the release's initial values, without weight decay."""
    llm, (adam, step) = tiny.llm(), program
    first = model_folder.new_path(tiny.path_config(), llm, mesh, seed=0)
    state = start(first, mesh, adam)
    batch, moved = micro_batches(tiny.batch(examples=4), 1, mesh), []
    for number in range(4):
        state, _ = step(state, llm, batch, jax.random.fold_in(KEY, number))
        change = jax.tree.map(lambda a, b: bool((np.array(a) != np.array(b)).any()), state.trained, first)
        moved.append({jax.tree_util.keystr(name) for name, any_ in jax.tree_util.tree_leaves_with_path(change) if any_})
    names = {jax.tree_util.keystr(name) for name, _ in jax.tree_util.tree_leaves_with_path(first)}
    updates = {name for name in names if name.endswith((".a", ".b"))}
    assert moved[0] == {".merge.last.weight"}
    inputs = {name for name in names if name.startswith((".vocabulary", ".translation", ".time"))}
    heads = {name for name in names if "modulation" in name}
    assert moved[1] == {
        ".merge.last.weight",
        ".merge.first.weight",
        ".merge.first.bias",
        *inputs,
        *(n for n in heads if ".last" in n),
    }
    assert moved[2] == moved[1] | heads | {name for name in updates if name.endswith(".b")}
    assert moved[3] == names - {".merge.last.bias"}


@pytest.mark.slow
@pytest.mark.parametrize("poison", ["loss", "gradient"])
def test_what_is_not_finite_changes_nothing(poison: str, mesh: Mesh, program: tuple[Any, Any]) -> None:
    """Neither the path, nor the moments, nor their count; the next step goes on from there."""
    adam, step = program
    state = start(tiny.path(), mesh, adam)
    llm, batch = tiny.llm(), micro_batches(tiny.batch(examples=4), 1, mesh)
    state, metrics = step(state, llm, batch, KEY)
    assert metrics["skipped"] == 0
    before = jax.tree.map(np.array, state)
    # Two tokens of one row whose losses cancel, each so large that the square of its gradient is not a number.
    values = {"loss": [np.nan, 1.0], "gradient": [1e30, -1e30]}[poison]
    bad = batch._replace(weights=batch.weights.at[0, 0, :2].set(jnp.array(values)))
    for _ in range(3):  # however often
        state, metrics = step(state, llm, bad, KEY)
        assert metrics["skipped"] == 1
        assert np.isfinite(metrics["loss"]) == (poison == "gradient")
        assert not np.isfinite(metrics["gradient_norm"])
        assert same_bits(state, before)
    state, metrics = step(state, llm, batch, KEY)
    assert metrics["skipped"] == 0
    assert not same_bits(state.trained, before.trained)


@pytest.mark.slow
@pytest.mark.parametrize("adam", [optax.adamw(1e-2, eps=0.0), optax.adamw(1e-2, b1=1.0), optax.adamw(1e38)])
def test_a_step_to_weights_that_are_not_finite_changes_nothing(adam: optax.GradientTransformation, mesh: Mesh) -> None:
    """Though its loss and gradient are: Adam divides by zero, or moves too far."""
    config = TrainConfig(batch_size=4)
    state = start(tiny.path(), mesh, adam)
    take_step = make_step(adam, config, state, mesh, objective=tiny.objective(config))
    llm, batch = tiny.llm(), micro_batches(tiny.batch(examples=4), 1, mesh)
    skipped = []
    for _ in range(3):
        before = jax.tree.map(np.array, state)
        state, metrics = take_step(state, llm, batch, KEY)
        skipped.append(bool(metrics["skipped"]))
        assert is_finite(state)
        assert not skipped[-1] or same_bits(state, before)
    assert skipped[-1]


@pytest.mark.slow
def test_a_step_at_times_of_another_density(mesh: Mesh) -> None:
    """Is the loss of the same noise at those times."""
    llm, path, batch = tiny.llm(), tiny.path(), uneven()
    adam, config = optimizer(OptimConfig(), 1e-2), TrainConfig(batch_size=4, time_density="cosmap")
    state = start(path, mesh, adam)
    _, metrics = make_step(adam, config, state, mesh, objective=tiny.objective(config))(
        state, llm, micro_batches(batch, 1, mesh), KEY
    )
    draws = objective.sample_corruption(jax.random.split(KEY, 1)[0], batch, path)
    u = np.asarray(draws.t, np.float64)
    draws = draws._replace(t=jnp.asarray(1 - 1 / (1 + np.tan(np.pi / 2 * u)), jnp.float32))

    @jax.jit
    def loss() -> jax.Array:
        hidden = objective.correct(path, llm, context.read_context(llm, batch), batch, draws)
        losses = lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, batch.targets)
        return jnp.sum(losses * objective.loss_weights(batch.weights, "example"))

    np.testing.assert_allclose(metrics["loss"], loss(), rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rematerialisation_changes_no_gradient(dtype: Any) -> None:
    llm, path, batch = tiny.llm(dtype=dtype), tiny.path(), tiny.batch()

    def gradient(name: str) -> Any:
        return jax.jit(
            jax.grad(partial(objective.diffusion_loss, options=LossOptions(remat=REMAT[name])), has_aux=True)
        )(path, llm, batch, KEY)[0]

    plain = gradient("none")
    for name in REMAT.keys() - {"none"}:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6), gradient(name), plain)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("name", REMAT)
def test_no_gathered_weight_waits_for_the_backward_pass(name: str, dtype: Any) -> None:
    """No loop over layers puts out an array of the weights' shapes: the backward pass reads the weights themselves."""
    llm, path, batch = tiny.llm(dtype=dtype), tiny.path(), tiny.batch()

    def kept(path: DiffusionPath, llm: Any) -> list[Any]:
        return jax.tree.leaves(
            jax.vjp(
                lambda p: objective.diffusion_loss(p, llm, batch, KEY, options=LossOptions(remat=REMAT[name]))[0], path
            )[1]
        )

    loops = [equation for equation in jax.make_jaxpr(kept)(path, llm).eqns if equation.primitive.name == "scan"]
    made = {variable.aval.shape for loop in loops for variable in loop.outvars}
    assert (2, 2, 4, 32) in made
    assert made.isdisjoint({llm.layers.q.shape, llm.layers.o.shape, llm.layers.down.shape})


def test_micro_batches_keep_the_order_of_examples(mesh: Mesh) -> None:
    batch = tiny.batch(examples=6, length=5, answers=2)
    split = micro_batches(batch, 3, mesh)
    assert split.tokens.shape == (3, 2, 5)
    np.testing.assert_array_equal(split.tokens.reshape(6, 5), batch.tokens)
    np.testing.assert_array_equal(split.classes.reshape(6), batch.classes)


def test_a_micro_batch_has_to_divide_over_the_devices() -> None:
    mesh = AbstractMesh((2, 2, 1, 1), ("data", "fsdp", "tensor", "stationary"))
    check_batch(TrainConfig(batch_size=16, accumulation=2), mesh)
    with pytest.raises(InputError, match=r"micro-batch of 6 examples .*batch_size 12 / accumulation 2.* = 4 devices"):
        check_batch(TrainConfig(batch_size=12, accumulation=2), mesh)
