"""The path: the identity at first and at t = 0, a reader of the past alone, and equal to its plain version."""

import dataclasses
import importlib.util
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from l2d_jax.config.schema import PathConfig
from l2d_jax.distributed import sharding
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.context import Context
from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.llm import LLM
from l2d_jax.weights import model_folder
from l2d_jax.weights.model_folder import start_from
from tests.support import plain, tiny

CONFIGS = Path(__file__).parents[2] / "configs"
VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dense": {"layers": "dense"},
    "lora-classes": {"classes": 3},
    "dense-classes": {"layers": "dense", "classes": 3},
}
T = jnp.array([[0.0, 1e-3, 0.3, 0.7, 0.999, 1.0]])


@jax.jit
def read(llm: LLM, tokens: jax.Array, labels: Any = None) -> Context:
    hidden, cache = llm(tokens, tiny.positions(tokens))
    return Context(hidden, cache, tiny.positions(tokens), labels)


@jax.jit
def features(path: DiffusionPath, llm: LLM, x: Any, t: Any, context: Context) -> Any:
    """The output of the path's layers before it is weighted."""
    return path(llm, x, t, context, conditions=Conditions(modulation=None, merge=jnp.ones(1)))


@jax.jit
def correction(path: DiffusionPath, llm: LLM, x: Any, t: Any, context: Context) -> Any:
    return path(llm, x, t, context)


def noise(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(64 * np.random.default_rng(seed).normal(size=shape), jnp.float32)


# --- where the correction is zero ---


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["lora", "dense"])
def test_a_new_path_is_the_identity(variant: str, mesh: Mesh) -> None:
    """No correction at any time, to the bit; and its blocks pass the diffusion token on as it is."""
    llm, tokens = tiny.llm("qwen"), tiny.tokens(2, 6)
    path = model_folder.new_path(tiny.path_config(**VARIANTS[variant]), llm, mesh, seed=0)
    x, context = noise(2, 6, 16), read(llm, tokens)
    np.testing.assert_array_equal(correction(path, llm, x, T, context), 0.0)
    passed = features(path, llm, x, T, context)
    first = np.array(
        [plain.mlp(path.translation, np.array(x[:, i]) / math.hypot((1 - t) * 64, t)) for i, t in enumerate(T[0])]
    )
    np.testing.assert_allclose(passed, first.swapaxes(0, 1), atol=1e-4)
    assert np.std(passed) > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_there_is_no_correction_at_time_zero(variant: str) -> None:
    llm, tokens = tiny.llm("llama-scaled"), tiny.tokens(2, 6)
    path = tiny.path("llama-scaled", **VARIANTS[variant])
    labels = jnp.array([[0], [2]]) if path.classes is not None else None
    out = correction(path, llm, noise(2, 6, 16), T, read(llm, tokens, labels))
    np.testing.assert_array_equal(out[:, 0], 0.0)
    assert float(jnp.min(jnp.max(jnp.abs(out[:, 1:]), axis=-1))) > 1e-3


# --- what an output depends on ---


def test_a_position_depends_on_no_other_diffusion_token_and_on_nothing_later() -> None:
    llm, path, tokens, x = tiny.llm(), tiny.path(), np.array(tiny.tokens(2, 8)), np.array(noise(2, 8, 16))
    t, context = np.full((2, 8), 0.4, np.float32), read(llm, tokens)
    before = np.asarray(correction(path, llm, x, t, context))

    changed_x, changed_t = np.array(noise(2, 8, 16, seed=1)), t.copy()
    changed_x[:, 5], changed_t[:, 3] = x[:, 5], 0.9
    others = np.asarray(correction(path, llm, changed_x, changed_t, context))
    np.testing.assert_array_equal(others[:, 5], before[:, 5])
    assert not np.isclose(others[:, 4], before[:, 4]).any()

    tokens[:, 5] = (tokens[:, 5] + 1) % 96
    after = np.asarray(correction(path, llm, x, t, read(llm, tokens)))
    np.testing.assert_array_equal(after[:, :5], before[:, :5])  # a later token
    assert (np.max(np.abs(after[:, 5:] - before[:, 5:]), axis=-1) > 1e-4).all()  # its own and earlier ones


def test_a_few_positions_at_a_time_and_a_larger_cache_change_nothing() -> None:
    llm, path, tokens, x = tiny.llm(), tiny.path(), tiny.tokens(2, 8), noise(2, 8, 16)
    t, context = np.random.default_rng(2).uniform(size=(2, 8)).astype(np.float32), read(llm, np.asarray(tokens))
    whole = correction(path, llm, np.asarray(x), t, context)
    some = np.array([[5, 2, 6], [7, 0, 0]], np.int32)
    room = jax.jit(KVCache.extend)(KVCache.empty(llm.architecture, 2, 11, dtype=jnp.float32), context.cache)

    def pick(array: Any, index: Any) -> Any:
        array = np.asarray(array)
        return np.take_along_axis(array, index.reshape(*index.shape, *[1] * (array.ndim - 2)), axis=1)

    few = correction(path, llm, pick(x, some), pick(t, some), Context(pick(context.hidden, some), room, some))
    wanted = pick(whole, some)
    np.testing.assert_allclose(few, wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


# --- the plain version ---


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "variant"),
    [
        ("llama", "lora"),
        ("qwen", "dense"),
        ("qwen-tied", "lora-classes"),
        ("llama-wide-heads", "dense-classes"),
        ("qwen3-yarn", "lora"),
        ("mistral", "dense"),
        ("smollm3-yarn", "lora"),
        ("gemma3", "lora"),
        ("gemma3", "dense"),
    ],
)
def test_the_path_equals_its_plain_version(kind: str, variant: str) -> None:
    llm, path, tokens = tiny.llm(kind), tiny.path(kind, **VARIANTS[variant]), tiny.tokens(2, 6)
    x, t = noise(2, 6, 16) / 8, jnp.tile(T, (2, 1))
    labels = jax.random.randint(jax.random.key(3), (2, 6), 0, 4) if path.classes is not None else None
    context = read(llm, tokens, labels)
    f, out = features(path, llm, x, t, context), correction(path, llm, x, t, context)
    cache = context.cache
    for b in range(2):
        for m in range(6):
            label = None if labels is None else int(labels[b, m])
            arguments = np.array(x[b, m]), float(t[b, m]), label, m, np.array(cache.k[:, b]), np.array(cache.v[:, b])
            wanted = plain.features(path, llm, *arguments)
            close = partial(np.testing.assert_allclose, rtol=1e-4, atol=3e-6 * np.abs(wanted).max())
            close(f[b, m], wanted)
            close(out[b, m], plain.merge_weight(path, float(t[b, m]), label) * wanted)


def test_no_label_is_the_null_class_and_one_time_serves_all_positions() -> None:
    llm, path, tokens, x = tiny.llm(), tiny.path(classes=3), np.asarray(tiny.tokens(2, 8)), np.asarray(noise(2, 8, 16))
    shared = correction(path, llm, x, np.full((1, 1), 0.6, np.float32), read(llm, tokens))
    labelled = read(llm, tokens)._replace(labels=np.full((2, 8), 3, np.int32))
    each = correction(path, llm, x, np.full((2, 8), 0.6, np.float32), labelled)
    np.testing.assert_allclose(shared, each, atol=1e-4)


def test_vocabulary_vectors() -> None:
    llm, path = tiny.llm(dtype=jnp.bfloat16), tiny.path()
    mapped = plain.f64(llm.embed) @ plain.f64(path.vocabulary.weight) + plain.f64(path.vocabulary.bias)
    wanted = 4 * mapped / np.linalg.norm(mapped, axis=1, keepdims=True)  # sqrt(16)
    np.testing.assert_allclose(path.embed(llm.embed), wanted, rtol=1e-4, atol=1e-5)


# --- sizes and initial values ---

COUNTS = {  # of each config: LoRA of rank 32, full copies, LoRA with three classes
    "llama1b": (73_344_256, 992_945_408, 73_345_280),
    "qwen1p5b": (103_324_928, 1_357_825_280, 103_325_952),
    "llama8b": (281_036_032, 6_918_522_112, 281_037_056),
    "qwen7b": (233_008_384, 6_582_236_416, 233_009_408),
    "smollm2_135m": (37_620_864, 128_859_264, 37_621_888),
    "qwen3_1p7b": (121_467_136, 1_383_952_640, 121_468_160),
    "qwen3_8b": (308_660_480, 6_876_940_544, 308_661_504),
    "smollm3_3b": (172_456_192, 2_854_680_832, 172_457_216),
    "gemma3_4b": (190_493_440, 3_169_071_872, 190_494_464),
    "mistral_7b": (281_036_032, 6_918_522_112, 281_037_056),
    "llama70b": (1_389_401_344, 68_131_263_744, 1_389_402_368),
}


def declare(name: str, **changes: Any) -> DiffusionPath:
    spec = importlib.util.spec_from_file_location(name, CONFIGS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    options = PathConfig(**{**config.path.to_dict(), **changes})
    return DiffusionPath.declare(options, Architecture.from_hf(config.model.architecture.to_dict()))


def count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", COUNTS)
def test_numbers_of_trainable_parameters(name: str) -> None:
    found = count(declare(name)), count(declare(name, layers="dense")), count(declare(name, classes=3))
    assert found == COUNTS[name]


def test_numbers_of_parameters_by_part() -> None:
    path = declare("llama1b")
    lora = [getattr(path.layers, name) for name in ("q", "o", "gate", "up", "down")]
    parts = path.layers.modulation, lora, path.merge, path.translation, path.vocabulary, path.time
    assert [count(part) for part in parts] == [51_580_928, 19_922_944, 592_128, 592_128, 524_544, 131_584]


@pytest.mark.slow
def test_initial_values_are_those_of_the_release(mesh: Mesh) -> None:
    config = PathConfig(classes=40)
    architecture = dataclasses.replace(tiny.architecture("llama"), hidden_size=320, intermediate_size=256)
    path = sharding.initialize(DiffusionPath.declare(config, architecture), jax.random.key(0), mesh)
    layers = path.layers
    for zero in (
        layers.q.b,
        layers.down.b,
        layers.modulation.last.weight,
        layers.modulation.last.bias,
        path.merge.last.weight,
    ):
        np.testing.assert_array_equal(zero, 0.0)
    for weight, deviation in [
        (layers.q.a, 1 / 32),
        (layers.o.a, 1 / 32),
        (layers.down.a, 1 / 32),
        (path.time.first.weight, 0.02),
        (path.time.last.weight, 0.02),
        (path.classes, 0.02),
    ]:
        np.testing.assert_allclose(jnp.std(weight), deviation, rtol=0.05)
    for weight, inputs, outputs in [  # Xavier: uniform in ± sqrt(6 / (inputs + outputs))
        (path.vocabulary.weight, 320, 256),
        (path.translation.first.weight, 256, 256),
        (path.translation.last.weight, 256, 320),
        (path.merge.first.weight, 256, 256),
        (layers.modulation.first.weight, 256, 256),
    ]:
        np.testing.assert_allclose(jnp.max(jnp.abs(weight)), math.sqrt(6 / (inputs + outputs)), rtol=0.01)
    dense = sharding.initialize(
        DiffusionPath.declare(PathConfig(layers="dense"), architecture), jax.random.key(0), mesh
    )
    for weight, inputs, outputs in [(dense.layers.q, 320, 32), (dense.layers.o, 32, 320), (dense.layers.up, 320, 256)]:
        np.testing.assert_allclose(jnp.max(jnp.abs(weight)), math.sqrt(6 / (inputs + outputs)), rtol=0.01)
    assert len(np.unique(np.array(layers.gate.a))) > layers.gate.a.size * 0.9  # no layer has the numbers of another


@pytest.mark.slow
def test_a_full_path_starts_from_the_weights_of_the_language_model() -> None:
    """Copies, to the bit, and with them the output of LoRA whose updates are zero."""
    llm, tokens = tiny.llm("qwen", dtype=jnp.bfloat16), tiny.tokens(2, 6)
    lora, dense = tiny.path("qwen"), tiny.path("qwen", layers="dense")
    dense = start_from(dense, llm)
    for name in ("q", "o", "gate", "up", "down", "q_bias"):
        copy, original = getattr(dense.layers, name), getattr(llm.layers, name)
        assert copy.dtype == jnp.float32
        np.testing.assert_array_equal(copy, original.astype(jnp.float32), err_msg=name)
    zero = {
        name: dataclasses.replace(getattr(lora.layers, name), b=jnp.zeros_like(getattr(lora.layers, name).b))
        for name in ("q", "o", "gate", "up", "down")
    }
    lora = dataclasses.replace(lora, layers=dataclasses.replace(lora.layers, **zero))
    shared = dataclasses.replace(dense.layers, modulation=lora.layers.modulation)
    dense = dataclasses.replace(lora, layers=shared, config=dense.config)
    arguments = llm, noise(2, 6, 16), T, read(llm, tokens)
    np.testing.assert_array_equal(features(dense, *arguments), features(lora, *arguments))


@pytest.mark.slow
def test_full_copies_can_start_from_scratch(mesh: Mesh) -> None:
    llm = tiny.llm()
    for init, same in [("lm", True), ("scratch", False)]:
        config = tiny.path_config(layers="dense", dense_init=init)
        path = model_folder.new_path(config, llm, mesh, seed=0)
        assert np.allclose(path.layers.up, llm.layers.up) == same
