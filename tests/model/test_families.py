"""Head norms, windows, layers without rope, norms of what is added: in packing, prefixes, decoding and training."""

import dataclasses
from itertools import cycle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from l2d_jax.config.schema import DecodeConfig, TrainConfig
from l2d_jax.decoding.batch.prefill import prefill, read_prefix
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.model.attention import attention
from l2d_jax.model.context import read_context
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.layers import EVERY, layer_options
from l2d_jax.model.llm import LLM
from l2d_jax.training.step import init_state, make_step, micro_batches
from tests.support import tiny
from tests.support.marks import slow

FAMILIES = ["qwen-late-windows", "qwen3-yarn", "mistral", "smollm3-yarn", "gemma3"]


@jax.jit
def run(llm: LLM, tokens: jax.Array, positions: jax.Array, segments: jax.Array | None = None) -> jax.Array:
    return llm.logits(llm(tokens, positions, segments=segments)[0])


def test_options_of_layers() -> None:
    shared, own = layer_options(tiny.architecture("gemma3"))
    assert shared.frequencies is shared.window is own.query_scale is None
    np.testing.assert_array_equal(own.window, [tiny.WINDOW, EVERY, tiny.WINDOW])
    np.testing.assert_allclose(shared.query_scale, (16 / 24) ** 0.5, rtol=1e-6)
    wanted = [[theta ** (-i / 8) / factor for i in range(8)] for theta, factor in ((1e4, 1), (1e6, 8), (1e4, 1))]
    np.testing.assert_allclose(own.frequencies, wanted, rtol=1e-5)
    shared, own = layer_options(tiny.architecture("llama"))
    assert (shared.query_scale, shared.window, *own) == (None,) * 5  # nothing that programs of Llama would compute
    shared, own = layer_options(tiny.architecture("mistral"))
    assert int(shared.window) == tiny.WINDOW
    assert own.window is None
    short, _ = layer_options(tiny.architecture("mistral"), length=tiny.WINDOW)  # all of the row is in the window
    longer, _ = layer_options(tiny.architecture("mistral"), length=tiny.WINDOW + 1)
    assert short.window is None
    assert longer.window is not None
    _, own = layer_options(tiny.architecture("smollm3-yarn"))
    np.testing.assert_array_equal(own.frequencies[1], 0.0)
    np.testing.assert_allclose(own.query_scale, [(0.1 * np.log(8) + 1) ** 2, 1] * 2, rtol=1e-6)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_sequences_are_those_alone(kind: str) -> None:
    llm, parts = tiny.llm(kind), np.array([tiny.tokens(1, 8), tiny.tokens(1, 8, seed=1)])
    places = np.tile(np.arange(8, dtype=np.int32), (2, 1, 1))
    segments = np.array([[0] * 8 + [1] * 8], np.int32)
    packed = run(llm, np.concatenate(parts, axis=1), np.concatenate(places, axis=1), segments)
    alone = np.concatenate([run(llm, part, place) for part, place in zip(parts, places, strict=True)], axis=1)
    np.testing.assert_allclose(packed, alone, atol=2e-5)


@pytest.mark.parametrize("kind", [*slow("qwen-late-windows", "qwen3-yarn", "mistral"), "smollm3-yarn", "gemma3"])
def test_a_common_prefix_is_read_in_windows(kind: str) -> None:
    llm, tokens = tiny.llm(kind), np.array(tiny.tokens(2, 12))
    tokens[1, :7] = tokens[0, :7]

    @jax.jit
    def beside(llm: LLM, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The logits after the prefix that has been read, and those of the whole rows."""
        places, prefix = tiny.positions(tokens), read_prefix(llm, tokens[0, :7])
        cache = KVCache.empty(llm.architecture, 2, 5, dtype=jnp.float32, prefix=prefix)
        hidden, _ = llm(tokens[:, 7:], places[:, 7:], cache)
        return llm.logits(hidden), run(llm, tokens, places)[:, 7:]

    found, wanted = beside(llm, tokens)
    np.testing.assert_allclose(found, wanted, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 3])
@pytest.mark.parametrize("kind", FAMILIES)
def test_decoding_equals_the_full_pass(kind: str, budget: int) -> None:
    """Greedy tokens of an anchored path that is the language model, against arg maxes of whole rows."""
    path = tiny.path(kind, start="anchored")
    neutral = jax.tree.map(jnp.zeros_like, (path.layers, path.merge, path.translation))
    path = dataclasses.replace(path, layers=neutral[0], merge=neutral[1], translation=neutral[2])
    model = tiny.Model.build(tiny.llm(kind), path)
    config = DecodeConfig(budget=budget, solver="midpoint" if budget > 1 else "euler", temperature=0.0)
    keys, steps = jax.random.split(jax.random.key(0), 2), 9
    prompts = tiny.tokens(2, 8)
    state = prefill(model.llm, prompts, jnp.array([8, 6], jnp.int32), keys, capacity=steps)
    settings, sampling = Refinement.prepare(model, config), SamplingOptions.from_config(config)
    stop_ids = jnp.full(2, -1, jnp.int32)
    _, out = token_decoder()(
        model, state, settings=settings, sampling=sampling, stop_ids=stop_ids, steps=steps, noise_samples=1
    )
    found = np.asarray(out[0])
    for row, length in enumerate((8, 6)):
        text = list(np.asarray(prompts[row, :length]))
        for _ in range(steps):
            ids = jnp.asarray([text], jnp.int32)
            text.append(int(np.argmax(run(model.llm, ids, tiny.positions(ids))[0, -1])))
        assert list(found[row][:steps]) == text[length:]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "start"), list(zip(FAMILIES, cycle(["anchored", "released"]), strict=False)))
def test_a_training_step(kind: str, start: str, mesh: Mesh) -> None:
    """The loss and all gradients are finite, every weight of the path moves, and remat changes nothing."""
    changes = []
    for remat in ("none", "full"):
        train = TrainConfig(batch_size=2, remat=remat)
        path, batch = tiny.path(kind, start=start, reader="path", sigma=2.0), micro_batches(tiny.batch(), 1, mesh)
        adam = optax.sgd(1.0)
        state = init_state(adam, path, mesh)
        step = make_step(adam, train, state, mesh, objective=tiny.objective(train))
        before = jax.tree.map(np.asarray, path)
        state, metrics = step(state, tiny.llm(kind), batch, jax.random.key(0))
        assert np.isfinite(float(metrics["loss"]))
        changes.append(jax.tree.map(lambda a, b: np.asarray(a) - b, state.trained, before))
    for place, change in jax.tree_util.tree_leaves_with_path(changes[0]):
        assert np.isfinite(change).all()
        name = jax.tree_util.keystr(place)  # the bias is in w(t) and in w(0)
        assert np.abs(change).max() > 0 or name == ".merge.last.bias", name
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4 * np.abs(a).max()), *changes)


def test_the_path_reads_targets_without_the_scale_of_the_embedding() -> None:
    """The vocabulary vectors of its table, to which the noise is added."""
    llm, tokens = tiny.llm("gemma3"), tiny.tokens(2, 3)
    np.testing.assert_array_equal(llm.rows(tokens), llm.embed[tokens])
    np.testing.assert_allclose(llm.lookup(tokens), llm.embed[tokens] * 32**0.5, rtol=1e-6)
    np.testing.assert_array_equal(read_context(llm, tiny.batch()).inputs, llm.lookup(tiny.batch().tokens)[:, -4:])


@jax.jit
def windowed(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, window: jax.Array) -> jax.Array:
    return attention(q, k, v, kv_positions=positions, window=window)


@pytest.mark.parametrize("window", [1, 3, 300])
def test_a_window_by_hand(window: int) -> None:
    q, k, v = np.random.default_rng(0).normal(size=(3, 1, 6, 1, 4)).astype(np.float32)
    k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
    positions = np.array([[0, 1, 2, 3, 4, 5]], np.int32)
    found = np.asarray(windowed(q, k, v, positions, np.int32(window)))
    for i in range(6):
        seen = slice(max(0, i - window + 1), i + 1)
        weights = np.exp(k[0, 0, seen] @ q[0, i, 0] / 2)
        weights /= weights.sum()
        np.testing.assert_allclose(found[0, i, 0], weights @ v[0, 0, seen], atol=1e-5)
