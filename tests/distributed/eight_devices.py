"""Tests that need eight devices: `test_sharding` runs this file in a process that has them (it is not collected)."""

import dataclasses
import math
import re
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from l2d_jax.config.schema import Config, DataConfig, DecodeConfig, MeshConfig, OptimConfig, TrainConfig
from l2d_jax.data.examples import Examples
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.batch.prefix_cache import BLOCK, PrefixCache
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.distributed import sharding
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.distributed.sharding import constrain, make_mesh
from l2d_jax.model.attention import attention, splash
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.held_out.validation import placed_in_order
from l2d_jax.training.methods import METHODS, method_of
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import TrainState, init_state, make_step, micro_batches, process_rows
from l2d_jax.weights import mapping
from l2d_jax.weights.mapping import LLM_ROWS
from tests.decoding.batch import test_lane_paths
from tests.performance import test_lowering
from tests.support import tiny
from tests.support.mappings import declarations, theirs


@pytest.fixture(scope="session")
def eight() -> Mesh:
    assert len(jax.devices()) == 8, "run by test_sharding.py"
    return make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))


def place(tree: Any, declared: Any, mesh: Mesh) -> Any:
    return jax.device_put(tree, sharding.shardings(declared, mesh))


def declared_llm() -> LLM:
    return LLM.declare(tiny.architecture("llama"), dtype=jnp.float32)


def declared_path() -> Any:
    return type(tiny.path()).declare(tiny.path_config(), tiny.architecture("llama"))


def test_one_axis_takes_the_devices_that_are_left() -> None:
    one = dict.fromkeys(("data", "fsdp", "tensor", "context", "stationary"), 1)
    assert dict(make_mesh(MeshConfig(data=2, tensor=2)).shape) == one | {"data": 2, "fsdp": 2, "tensor": 2}
    assert dict(make_mesh(MeshConfig()).shape) == one | {"fsdp": 8}


def test_initial_values_are_the_same_on_every_mesh(mesh: Mesh, eight: Mesh) -> None:
    one, split = (sharding.initialize(declared_llm(), jax.random.key(0), m) for m in (mesh, eight))
    jax.tree.map(np.testing.assert_array_equal, one, split)
    assert split.layers.gate.sharding.shard_shape(split.layers.gate.shape) == (2, 16, 24)


@pytest.mark.parametrize("name", declarations())
def test_sharded_loading_keeps_the_bits_and_reads_each_shard_alone(name: str, eight: Mesh) -> None:
    declared, rows = declarations()[name]
    tree = tiny.randomise(declared)
    source = theirs(tree, rows)
    loaded = mapping.load_tree(declared, source, eight, rows=rows)
    for ours, back, placement in zip(
        jax.tree.leaves(tree),
        jax.tree.leaves(loaded),
        jax.tree.leaves(sharding.shardings(declared, eight)),
        strict=True,
    ):
        assert back.sharding == placement
        assert np.array(ours).tobytes() == np.array(back).tobytes()
    for key, array in theirs(loaded, rows).items():
        assert array.tobytes() == source[key].tobytes(), key
    kept = jax.tree.leaves(loaded)
    held = sum(shard.data.size for leaf in kept for shard in leaf.addressable_shards)
    if rows is LLM_ROWS:  # every device's share, and nothing else
        whole = sum(leaf.size for leaf in kept if leaf.sharding.is_fully_replicated)  # norms of heads: read once
        assert source.elements == held - 7 * whole
    else:  # the six vectors of a modulation head are one axis there, read whole where ours is split inside
        assert held < source.elements < 1.3 * held


class Trained(NamedTuple):
    """Three steps of two micro-batches."""

    losses: list[float]
    state: TrainState


def begin_method(config: Config, m: Mesh, kind: str) -> tuple[Any, LLM | None]:
    """What is trained and what is frozen, of the same random values on every mesh."""
    method, architecture = method_of(config), tiny.architecture(kind)
    path = partial(tiny.path, kind, start=config.path.start, reader=config.path.reader)
    tree = {"path": path, "adapter": partial(tiny.adapter, kind), "weights": partial(tiny.llm, kind)}[method.part]()
    declared = method.declare_frozen(architecture)
    frozen = None if declared is None else place(tiny.llm(kind), declared, m)
    wanted = method.declare(architecture)
    return place(tree, wanted, m), frozen


def train(m: Mesh, method: str = "l2d", **options: Any) -> Trained:
    """By one of `METHODS`, or "reading": of a path that begins as the language model and reads the context.

    "gemma3" is the same of a model with windows, two ropes and all norms.
    """
    beyond = {"start": "anchored", "reader": "path"} if method in ("reading", "gemma3") else {}
    kind = method if method == "gemma3" else "llama"
    adam = optimizer(OptimConfig(), 1e-2)
    config = TrainConfig(method="l2d" if beyond else method, batch_size=16, accumulation=2, **options)
    losses = []
    with jax.set_mesh(m):
        trained, llm = begin_method(dataclasses.replace(tiny.config(config), path=tiny.path_config(**beyond)), m, kind)
        state = init_state(adam, trained, m)
        step = make_step(adam, config, state, m, objective=tiny.objective(config))
        for number in range(3):
            batch = micro_batches(tiny.batch(examples=16, seed=number), 2, m)
            state, metrics = step(state, llm, batch, jax.random.fold_in(jax.random.key(0), number))
            losses.append(float(metrics["loss"]))
        assert step._cache_size() == 1
        if llm is not None:
            jax.tree.map(np.testing.assert_array_equal, llm, tiny.llm(kind))  # the frozen bits stay
    return Trained(losses, state)


@pytest.fixture(scope="module")
def alone(mesh: Mesh) -> dict[str, Trained]:
    return {method: train(mesh, method) for method in (*METHODS, "reading", "gemma3")}


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        ("l2d", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("l2d", {"fsdp": 8}),
        ("l2d", {"data": 8, "fsdp": 1}),
        ("l2d", {"fsdp": 2, "tensor": 2, "context": 2}),
        ("l2d", {"fsdp": 2}),  # on two devices
        ("reading", {"fsdp": 2, "tensor": 2, "context": 2}),
        ("gemma3", {"fsdp": 2, "tensor": 2, "context": 2}),
        ("gemma3", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("lora", {"fsdp": 2, "tensor": 2, "context": 2}),
        ("full", {"data": 2, "fsdp": 2, "tensor": 2}),
        ("full", {"fsdp": 4, "context": 2}),
    ],
    ids=str,
)
def test_training_is_split_and_equal_to_one_device(
    alone: dict[str, Trained], method: str, sizes: dict[str, int]
) -> None:
    """The same losses and weights on every mesh; moments lie where their weights lie."""
    devices = jax.devices()[: math.prod(sizes.values())]
    losses, state = train(make_mesh(MeshConfig(**sizes), devices), method)
    np.testing.assert_allclose(losses, alone[method].losses, rtol=1e-5)
    wanted = alone[method].state.trained
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-3), state.trained, wanted)
    weights, moments = jax.tree.leaves(state.trained), []
    for name in ("mu", "nu"):
        own = jax.tree.leaves(optax.tree.get(state.optimizer, name))
        for moment, weight in zip(own, weights, strict=True):
            assert moment.sharding.is_equivalent_to(weight.sharding, weight.ndim)
        moments += own
    if sizes.get("fsdp") != 1:
        assert sum(not moment.sharding.is_fully_replicated for moment in moments) > len(moments) / 3


def test_times_and_estimates_are_the_same_on_eight_devices(mesh: Mesh, eight: Mesh) -> None:
    options = {"time_density": "cosmap", "draws_per_context": 2, "own_estimates": 0.5}
    one, split = (train(m, **options) for m in (mesh, eight))
    np.testing.assert_allclose(split.losses, one.losses, rtol=1e-5)


@pytest.mark.parametrize("sizes", [{"data": 2, "fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 4}], ids=str)
def test_splash_attention_is_split_and_equal_to_plain_attention(sizes: dict[str, int]) -> None:
    rng = np.random.default_rng(0)
    shapes = (4, 512, 4, 16), (4, 2, 512, 16), (4, 2, 512, 16)
    q, k, v = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
    positions = np.tile(np.arange(512), (4, 1))
    positions[1, 300:] = -1
    plain = attention(q, k, v, kv_positions=jnp.asarray(positions, jnp.int32))
    with jax.set_mesh(make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))):
        segments = jnp.asarray(np.minimum(positions, 0), jnp.int32)
        split = jax.jit(partial(splash, interpret=True))(q, k, v, segments)
    np.testing.assert_allclose(split[0], plain[0], atol=2e-6)
    np.testing.assert_allclose(split[1, :300], plain[1, :300], atol=2e-6)


DECODING = [
    MeshConfig(data=2, fsdp=2, tensor=2),
    MeshConfig(data=2, fsdp=1, tensor=2, stationary=2),  # rows divide
    MeshConfig(fsdp=1, stationary=8),  # they do not, and some weights do not either
]


@pytest.mark.parametrize(
    ("kind", "is_reading", "is_merged"),  # each pair of values once
    [("llama", False, True), ("llama", True, False), ("gemma3", False, False), ("gemma3", True, True)],
)
def test_decoding_gives_the_same_tokens(mesh: Mesh, kind: str, *, is_reading: bool, is_merged: bool) -> None:
    tokens = []
    for m in (mesh, *map(make_mesh, DECODING)):
        model, found = decode(m, kind, is_reading=is_reading, is_merged=is_merged)
        assert isinstance(model.llm.layers.up, list) == (is_merged and m.shape["stationary"] > 1)
        tokens.append(found)
    for found in tokens[1:]:
        np.testing.assert_array_equal(tokens[0], found)


def decode(m: Mesh, kind: str, *, is_reading: bool, is_merged: bool) -> tuple[Model, np.ndarray]:
    """The model on a mesh, and four tokens of each of four answers."""
    beyond = {"start": "anchored", "reader": "path"} if is_reading else {}
    path, llm = tiny.path(kind, **beyond), tiny.llm(kind)
    declared = DiffusionPath.declare(path.config, llm.architecture)
    declared_base = LLM.declare(llm.architecture, dtype=jnp.float32)
    with jax.set_mesh(m):
        model = Model.build(place(llm, declared_base, m), place(path, declared, m))
        model = (model.merged() if is_merged else model).reading(refines=True)
        keys = jax.random.split(jax.random.key(0), 4)
        state = prefill(model.llm, tiny.tokens(4, 6), jnp.array([6, 2, 5, 3], jnp.int32), keys, capacity=4)
        config = DecodeConfig(velocity_temperature=1.0, temperature=1.0, budget=5)
        options = {"sampling": SamplingOptions.from_config(config), "stop_ids": jnp.array([-1], jnp.int32), "steps": 4}
        _, new = token_decoder()(model, state, settings=Refinement.from_config(config), **options)
    return model, np.array(new.ids)


@pytest.fixture
def on_gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every choice by platform is that for GPUs."""
    real = sharding.platform
    for module in [*sys.modules.values()]:
        if getattr(module, "platform", None) is real:
            monkeypatch.setattr(module, "platform", lambda: "gpu")
    jax.clear_caches()  # programs with the choices for CPUs
    yield
    jax.clear_caches()


@pytest.mark.usefixtures("on_gpus")
def test_what_eight_gpus_of_a_host_run_is_what_one_runs(mesh: Mesh, eight: Mesh) -> None:
    """Training by FSDP, and decoding on the mesh that programs choose for these sizes."""
    one, split = train(mesh), train(eight)
    np.testing.assert_allclose(split.losses, one.losses, rtol=1e-5)
    chosen = make_mesh(sharding.decoding_mesh(MeshConfig(), rows=4, kv_heads=2, devices=8))
    assert chosen.shape["tensor"] * chosen.shape["stationary"] == 8
    (model, tokens), (_, found) = (decode(m, "llama", is_reading=False, is_merged=True) for m in (mesh, chosen))
    assert isinstance(model.llm.layers.up, list)
    np.testing.assert_array_equal(found, tokens)


def test_paths_share_lanes_on_any_mesh(mesh: Mesh) -> None:
    """Answers of three paths, some read while others run, evaluated one by one and as a stream."""
    trained, llm, found = test_lane_paths.paths(), tiny.llm(), []
    declared = DiffusionPath.declare(trained[0].config, llm.architecture)
    prompts = test_lane_paths.PROMPTS
    for m in (mesh, *map(make_mesh, DECODING)):
        with jax.set_mesh(m):
            placed = [place(path, declared, m) for path in trained]
            base = Model.build(place(llm, LLM.declare(llm.architecture, dtype=jnp.float32), m), None).merged().llm
            answers = []
            for parallel in ("off", "on"):
                chosen = [dataclasses.replace(test_lane_paths.SETTINGS, budget=3, parallel=parallel) for _ in prompts]
                answers.append(test_lane_paths.mixed(placed, prompts, chosen, lanes=2, llm=base)[0])
        found.append(answers)
    assert found[1:] == found[:1] * len(DECODING)


def test_merging_takes_a_copy_of_the_language_model_where_weights_are_stationary() -> None:
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1, stationary=8))):
        model = tiny.model()
        assert model.can_merge(4 * tree_bytes(model) + 1)
        assert not model.can_merge(4 * tree_bytes(model))


@pytest.mark.parametrize("config", DECODING)
def test_one_query_is_a_program_of_each_device_where_rows_divide(config: MeshConfig) -> None:
    shapes = [(68, 1, 4, 8), (68, 2, 12, 8), (68, 2, 12, 8), (2, 5, 8), (2, 5, 8)]
    arrays = [jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes)]
    places = {"q_positions": jnp.full((68, 1), 9), "kv_positions": jnp.arange(816).reshape(68, 12) % 11}

    def run(q: jax.Array, k: jax.Array, v: jax.Array, *prefix: jax.Array) -> jax.Array:
        return attention(q, k, v, **places, others=[(*prefix, None)])

    alone = run(*arrays)
    with jax.set_mesh(make_mesh(config)):
        assert ("shard_map" in str(jax.make_jaxpr(run)(*arrays))) == (config.stationary != 8)
        np.testing.assert_allclose(jax.jit(run)(*arrays), alone, atol=1e-6)


@pytest.mark.parametrize(
    "beyond", [{}, {"path__start": "anchored", "path__reader": "path"}], ids=["released", "reading"]
)
def test_what_is_compiled_for_stationary_weights_is_what_runs(beyond: dict[str, Any]) -> None:
    m = make_mesh(MeshConfig(fsdp=1, tensor=2, stationary=4))
    with jax.set_mesh(m):
        test_lowering.test_decoding_is_that_of_generation(m, beyond)


def test_decoding_moves_no_weight() -> None:
    """Compiled, a decoder on stationary weights gathers nothing of a weight's size, and one on `fsdp` does."""
    largest = {}
    for config in (MeshConfig(), MeshConfig(fsdp=1, tensor=2, stationary=4)):
        m = make_mesh(config)
        with jax.set_mesh(m):
            llm = sharding.abstract(declared_llm(), m)
            rows = jax.ShapeDtypeStruct((8, 1), jnp.int32, sharding=sharding.batch_sharding(m))
            text = jax.jit(lambda llm, rows: llm.logits(llm(rows, rows)[0])).lower(llm, rows).compile().as_text()
        shapes = re.findall(r"= f32\[([\d,]*)\]\S* all-gather", text)
        largest[config] = max(math.prod(map(int, shape.split(","))) for shape in shapes if shape)
    stays, moves = (largest[config] for config in sorted(largest, key=lambda config: config.fsdp == "auto"))
    matrix = math.prod(tiny.llm().layers.q.shape[1:])
    assert stays < matrix <= moves


@pytest.mark.parametrize(
    ("rows", "kv_heads", "devices", "wanted"),
    [
        (1, 4, 1, {"tensor": 1}),
        (16, 4, 16, {"tensor": 4, "stationary": 4}),
        (512, 4, 16, {"tensor": 4, "stationary": 4}),
        (1024, 8, 16, {"data": 2, "tensor": 8}),
        (4096, 8, 16, {"data": 8, "tensor": 2}),
        (5, 3, 8, {"stationary": 8}),
    ],
)
def test_the_mesh_of_decoding(rows: int, kv_heads: int, devices: int, wanted: dict[str, int]) -> None:
    found = sharding.decoding_mesh(MeshConfig(), rows=rows, kv_heads=kv_heads, devices=devices)
    assert found == MeshConfig(fsdp=1, **wanted)
    given = MeshConfig(fsdp=2, tensor=4)
    assert sharding.decoding_mesh(given, rows=rows, kv_heads=kv_heads, devices=devices) == given


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ({"fsdp": 8}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]]),
        ({"data": 2, "tensor": 4}, [[*range(8)]] * 2 + [[*range(8, 16)]] * 2),
        ({"tensor": 8}, [[*range(16)]] * 4),  # all processes hold all rows
    ],
)
def test_rows_of_four_processes_of_two_devices(sizes: dict[str, int], wanted: list[list[int]]) -> None:
    mesh = make_mesh(MeshConfig(**{"fsdp": 1, **sizes}))
    devices = jax.devices()
    assert [sharding.rows_on_devices(mesh, 16, devices[i : i + 2]) for i in range(0, 8, 2)] == wanted
    assert sharding.rows_on_devices(mesh, 16) == list(range(16))
    config = TrainConfig(batch_size=32, accumulation=2)
    assert sorted(process_rows(config, mesh)) == list(range(32))


def test_processes_whose_devices_are_scattered_hold_the_rows_of_those() -> None:
    """As on TPUs, where the mesh follows the wires and not the processes' numbers."""
    devices = jax.devices()
    mesh = make_mesh(MeshConfig(), devices[::-1])
    assert sharding.rows_on_devices(mesh, 16, [devices[0], devices[7]]) == [0, 1, 14, 15]


def test_a_checkpoint_is_restored_onto_any_mesh(tmp_path: Path, mesh: Mesh, eight: Mesh) -> None:
    """Saved from eight devices, restored on eight others and on one: the bits, and each in its own placement."""
    path = place(tiny.path(), declared_path(), eight)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"path": path})
    checkpoints.close()
    checkpoints = Checkpoints(tmp_path)
    for config in (MeshConfig(), MeshConfig(data=8, fsdp=1), MeshConfig(tensor=4), None):
        other = mesh if config is None else make_mesh(config)
        like = sharding.abstract(declared_path(), other)
        found = checkpoints.restore(1, {"path": like})["path"]
        jax.tree.map(np.testing.assert_array_equal, found, tiny.path())
        assert [x.sharding for x in jax.tree.leaves(found)] == [x.sharding for x in jax.tree.leaves(like)]
    checkpoints.close()


def test_validation_batches_fill_the_mesh(eight: Mesh) -> None:
    config = DataConfig(source="problems", validation_split="validation", validation_examples=5, max_length=1024)
    examples = Examples.load(config, byte_tokenizer(), split="validation")
    batches = list(placed_in_order(examples, 3, eight))
    for batch, plain in zip(batches, examples.in_order(3), strict=True):
        assert batch.tokens.sharding == sharding.batch_sharding(eight)
        jax.tree.map(lambda ours, theirs: np.testing.assert_array_equal(ours[:3], theirs), batch, plain)
        assert len(batch.tokens) == 4
        assert not np.any(batch.weights[3])


def test_a_prefix_cache_is_split_over_all_devices() -> None:
    """Each device has an eighth of each block, and what comes out is as on one device."""
    llm, tokens = tiny.llm(), tiny.tokens(1, 5 * BLOCK)
    _, read = llm(tokens, tiny.positions(tokens))
    mesh, ids = make_mesh(MeshConfig(fsdp=1, tensor=2, stationary=4)), tokens[0].tolist()
    with jax.set_mesh(mesh):
        placed = jax.device_put(read, NamedSharding(mesh, PartitionSpec()))
        cache = PrefixCache(llm, size=8 * BLOCK * llm.token_bytes)
        for length in (2 * BLOCK, 4 * BLOCK):  # what is donated stays where it is
            cache.keep("lm", ids[:length], placed, row=0)
            for pool in cache._pool:
                assert pool.sharding.shard_shape(pool.shape) == (2, 8, 1, BLOCK // 4, 8)
        found = cache.load(cache.find("lm", ids), tokens=4 * BLOCK, slots=5 * BLOCK)
        assert found.k.sharding.shard_shape(found.k.shape) == (2, 1, 1, 5 * BLOCK, 8)
    for loaded, whole in ((found.k, read.k), (found.v, read.v)):
        np.testing.assert_array_equal(loaded[..., : 4 * BLOCK, :], whole[..., : 4 * BLOCK, :])


def test_rows_of_a_cache_are_written_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a TPU does it, each device its own rows and heads, against a scatter."""
    read, slots = tiny.llm()(tokens := tiny.tokens(4, 6), tiny.positions(tokens))[1], jnp.array([3, 6, 0, 5])
    new = dataclasses.replace(
        read, k=1 + read.k[..., :1, :], v=2 - read.v[..., :1, :], positions=10 + read.positions[:, :1]
    )
    wanted = read.put(new, slots)
    monkeypatch.setattr(sharding, "platform", lambda: "tpu")
    mesh = make_mesh(MeshConfig(fsdp=1, tensor=2, stationary=4))
    with jax.set_mesh(mesh):
        cache, one = jax.device_put((read, new), NamedSharding(mesh, PartitionSpec()))
        found = jax.jit(KVCache.put)(cache, one, slots)
        assert found.k.sharding.shard_shape(found.k.shape) == (2, 1, 1, 6, 8)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_constraints_hold_inside_a_mesh(eight: Mesh) -> None:
    x = jnp.zeros((8, 3, 4))
    assert constrain(x, "batch", "length", "embed_activation") is x  # no mesh is set
    with jax.set_mesh(eight):
        placed = jax.jit(lambda x: constrain(x, "batch", "length", "embed_activation"))(x)
    assert placed.sharding.shard_shape(x.shape) == (2, 3, 4)
