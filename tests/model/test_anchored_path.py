"""A path that begins as the language model, and one that reads the context itself."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import LoraConfig
from l2d_jax.data.batch import Batch
from l2d_jax.distributed.sharding import initialize
from l2d_jax.model import context as contexts
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.training.objective import diffusion_loss
from l2d_jax.weights.model_folder import start_from
from tests.support import tiny
from tests.support.marks import slow

ANCHORED = {"start": "anchored"}
READING = {"start": "anchored", "reader": "path"}

read_context = jax.jit(contexts.read_context)


def untrained(mesh, kind="llama", **changes):
    path = initialize(
        DiffusionPath.declare(tiny.path_config(**changes), tiny.architecture(kind)), jax.random.key(1), mesh
    )
    return start_from(path, tiny.llm(kind)) if path.config.layers == "dense" else path


def correction(path, llm, context, t, *, seed=0):
    """At x_t of the size that it has at this t, but of no token."""
    x = 64 * jax.random.normal(jax.random.key(seed), (*context.hidden.shape[:2], path.config.width))
    return path(llm, x, jnp.full((1, 1), t, jnp.float32), context)


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        pytest.param("qwen", marks=pytest.mark.slow),
        pytest.param("qwen3-yarn", marks=pytest.mark.slow),
        pytest.param("mistral", marks=pytest.mark.slow),
        pytest.param("smollm3-yarn", marks=pytest.mark.slow),
        pytest.param("gemma3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("layers", "options"),
    [
        pytest.param("lora", READING, id="lora-path"),
        pytest.param("dense", ANCHORED, id="dense-lm"),
        pytest.param("lora", ANCHORED, id="lora-lm", marks=pytest.mark.slow),
        pytest.param("dense", READING, id="dense-path", marks=pytest.mark.slow),
    ],
)
def test_untrained_it_is_the_language_model_at_any_time(mesh, kind, layers, options):
    llm, batch = tiny.llm(kind), tiny.batch()
    path = untrained(mesh, kind, layers=layers, **options)
    context = read_context(path.reader(llm), batch)
    plain = read_context(llm, batch)
    np.testing.assert_allclose(context.hidden, plain.hidden, atol=1e-5)
    logits_at = jax.jit(lambda t: llm.logits(context.hidden + correction(path, llm, context, t)))
    for t in (0.0, 0.4, 1.0):
        np.testing.assert_allclose(logits_at(t), llm.logits(plain.hidden), atol=2e-5)


def test_a_trained_one_corrects_at_any_time_and_reads_x(mesh):
    llm, path, batch = tiny.llm(), tiny.path(**ANCHORED), tiny.batch()
    context = read_context(llm, batch)
    correct = jax.jit(correction)
    found = [correct(path, llm, context, t, seed=seed) for t in (0.0, 1.0) for seed in (0, 1)]
    assert all(float(jnp.abs(a - b).max()) > 1e-2 for i, a in enumerate(found) for b in (0.0, *found[:i]))
    without = context._replace(inputs=context.inputs + 1)
    assert float(jnp.abs(correct(path, llm, without, 0.0, seed=0) - found[0]).max()) > 1e-2


@pytest.mark.parametrize("layers", ["lora", "dense"])
def test_what_reads_the_context_is_the_model_with_the_paths_layers(layers):
    """Against an adapter of the same updates, or a model with the same weights."""
    llm, path, batch = tiny.llm("qwen"), tiny.path("qwen", layers=layers, **READING), tiny.batch()
    changes = {name: getattr(path.layers, name) for name in ("q", "k", "v", "o", "gate", "up", "down")}
    if layers == "lora":
        modules = tuple(f"{name}_proj" for name in changes)
        adapter = LLMAdapter(**changes, config=LoraConfig(rank=4, alpha=6.0, modules=modules))
        other = dataclasses.replace(llm, adapter=adapter)
    else:
        other = dataclasses.replace(llm, layers=dataclasses.replace(llm.layers, **changes, q_bias=path.layers.q_bias))
    found, expected = (read_context(model, batch) for model in (path.reader(llm), other))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert float(jnp.abs(found.hidden - read_context(llm, batch).hidden).max()) > 1e-2
    assert tiny.path(**ANCHORED).reader(llm) is llm


@pytest.mark.parametrize("layers", ["lora", *slow("dense")])
def test_gradients_are_finite_differences(layers):
    """Along the gradient of each weight; the context that the path reads depends on its weights, too."""
    llm, path, batch = tiny.llm(), tiny.path(layers=layers, sigma=2.0, **READING), tiny.batch()

    def loss(path):
        return diffusion_loss(path, llm, batch, jax.random.key(3))[0]

    named, tree = jax.tree_util.tree_flatten_with_path(path)
    names, leaves = zip(*((jax.tree_util.keystr(name), leaf) for name, leaf in named), strict=True)
    both = jax.jit(jax.value_and_grad(loss))  # one program for all
    gradient = jax.tree.leaves(both(path)[1])
    for i, (leaf, slope) in enumerate(zip(leaves, gradient, strict=True)):
        norm = float(jnp.linalg.norm(slope))
        if names[i].endswith("merge.last.bias"):  # w(t) - w(0) has none
            assert norm == 0
            continue
        step = min(3e-3 / norm, 1e-2 * float(jnp.linalg.norm(leaf)))
        moved = (leaf + sign * step / norm * slope for sign in (1, -1))
        above, below = (float(both(tree.unflatten([*leaves[:i], one, *leaves[i + 1 :]]))[0]) for one in moved)
        assert (above - below) / (2 * step) == pytest.approx(norm, rel=2e-2, abs=1e-6 / step)


def test_a_packed_row_is_its_examples_apart():
    """Each example has its own context, its own positions and the same loss."""
    llm, path = tiny.llm(), tiny.path(sigma=2.0, **READING)
    apart = tiny.batch(examples=2, length=8, answers=3)
    weights = jnp.ones_like(apart.weights)
    context = read_context(path.reader(llm), apart._replace(weights=weights))
    packed = Batch(
        tokens=apart.tokens.reshape(1, -1),
        queries=(apart.queries + jnp.array([[0], [8]])).reshape(1, -1),
        targets=apart.targets.reshape(1, -1),
        weights=weights.reshape(1, -1),
        classes=apart.classes.reshape(1, -1),
        segments=jnp.repeat(jnp.arange(1, 3), 8)[None].astype(jnp.int32),
    )
    together = read_context(path.reader(llm), packed)
    np.testing.assert_allclose(together.hidden.reshape(context.hidden.shape), context.hidden, rtol=1e-5, atol=1e-4)
    x = jax.random.normal(jax.random.key(0), (2, 3, 16))
    run = jax.jit(lambda x, context: path(llm, x, jnp.full((1, 1), 0.5), context))
    alone, found = run(x, context), run(x.reshape(1, 6, 16), together)
    np.testing.assert_allclose(found.reshape(alone.shape), alone, rtol=1e-5, atol=1e-4)


def test_a_model_reads_as_its_path_does_only_to_refine():
    model = tiny.model(**READING)
    assert model.reading(refines=False) is model
    assert model.reading(refines=True).llm.adapter is not None
    lm = tiny.model(**ANCHORED)
    assert lm.reading(refines=True).llm is lm.llm
