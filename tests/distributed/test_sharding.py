"""Declarations, the table from logical to mesh axes, and whole programs on eight devices in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.nn import initializers
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed import sharding
from l2d_jax.distributed.sharding import RULES, Weight, make_mesh, partition
from l2d_jax.errors import InputError
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from tests.support import tiny

EIGHT = AbstractMesh((2, 2, 2), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3)


@pytest.mark.parametrize(
    ("axes", "shape", "wanted"),
    [
        ("layers embed heads head_dim", (3, 8, 4, 16), (None, "fsdp", "tensor", None)),
        ("vocab embed", (10, 6), ("tensor", "fsdp")),
        ("vocab embed", (9, 6), (None, "fsdp")),  # not divisible: whole
        ("layers embed kv_heads head_dim", (3, 8, 1, 16), (None, "fsdp", None, None)),
        ("batch length", (8, 5), (("data", "fsdp"), None)),
        ("batch length", (2, 5), (None, None)),
        ("rank mlp", (4, 8), (None, "tensor")),
    ],
)
def test_axes_of_the_mesh(axes: str, shape: tuple[int, ...], wanted: tuple[object, ...]) -> None:
    assert partition(tuple(axes.split()), shape, EIGHT) == PartitionSpec(*wanted)


@pytest.mark.parametrize("axes", ["embed embed", "heads mlp", "batch embed"])
def test_two_dimensions_on_one_axis_of_the_mesh_collide(axes: str) -> None:
    with pytest.raises(ValueError, match="map twice to one mesh axis"):
        partition(tuple(axes.split()), (8, 8), EIGHT)


def test_a_mesh_of_one_device_splits_nothing(mesh: Mesh) -> None:
    declared = LLM.declare(tiny.architecture("qwen"), dtype=jnp.bfloat16)
    for placement in jax.tree.leaves(sharding.shardings(declared, mesh)):
        assert placement.spec == PartitionSpec(*[None] * len(placement.spec))


def test_every_declared_axis_has_a_rule_and_every_large_matrix_is_split() -> None:
    architecture = tiny.architecture("qwen")
    llm = LLM.declare(architecture, dtype=jnp.float32)
    path = DiffusionPath.declare(tiny.path_config(layers="dense", classes=3), architecture)
    for weight in jax.tree.leaves((llm, path)):
        assert set(weight.axes) <= RULES.keys()
        if "embed" in weight.axes:
            assert "fsdp" in partition(weight.axes, weight.shape, EIGHT)
    for weight in jax.tree.leaves((path.layers.q, path.layers.o, path.layers.gate, path.layers.up, path.layers.down)):
        assert {"fsdp", "tensor"} <= set(partition(weight.axes, weight.shape, EIGHT))


@pytest.mark.slow
def test_shapes_types_and_values_come_from_one_declaration(mesh: Mesh) -> None:
    declared = LLM.declare(tiny.architecture("qwen"), dtype=jnp.bfloat16)
    abstract = sharding.abstract(declared, mesh)
    values = sharding.initialize(declared, jax.random.key(0), mesh)
    assert jax.tree.structure(abstract) == jax.tree.structure(values) == jax.tree.structure(declared)
    for weight, shape, value in zip(*map(jax.tree.leaves, (declared, abstract, values)), strict=True):
        assert weight.shape == shape.shape == value.shape
        assert weight.dtype == shape.dtype == value.dtype
        assert shape.sharding == value.sharding
    np.testing.assert_array_equal(values.norm, 1.0)
    np.testing.assert_allclose(jnp.std(values.embed.astype(jnp.float32)), 0.02, rtol=0.05)
    assert not np.array_equal(values.layers.gate, values.layers.up)


def test_a_declaration_names_each_of_its_axes() -> None:
    with pytest.raises(AssertionError):
        Weight((2, 3), ("embed",), initializers.zeros)


def test_the_mesh_takes_all_devices() -> None:
    one = jax.devices()
    axes = ("data", "fsdp", "tensor", "context", "stationary")
    assert dict(make_mesh(MeshConfig(), one).shape) == dict.fromkeys(axes, 1)
    assert make_mesh(MeshConfig(), one).axis_types == (AxisType.Auto,) * len(axes)
    with pytest.raises(
        InputError, match=r"config.mesh data=2 x fsdp=1 x tensor=2 x context=1 x stationary=1 needs 4 devices, found 1"
    ):
        make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), one)
    with pytest.raises(
        InputError, match=r"config.mesh data=2 x fsdp=1 x tensor=1 x context=1 x stationary=1 needs 2 devices, found 1"
    ):
        make_mesh(MeshConfig(data=2), one)


@pytest.mark.slow
def test_on_eight_devices() -> None:
    """Runs `eight_devices.py`, whose tests need a process that starts with eight."""
    root = Path(__file__).parents[2]
    flags = os.environ["XLA_FLAGS"] + " --xla_force_host_platform_device_count=8"  # after those of conftest
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        "-s",
        "tests/distributed/eight_devices.py",
    ]
    child = subprocess.run(command, cwd=root, env={**os.environ, "XLA_FLAGS": flags}, capture_output=True, text=True)
    assert child.returncode == 0, child.stdout + child.stderr
    assert "rematerialization" not in child.stderr  # "involuntary": an array that was gathered to be split again
