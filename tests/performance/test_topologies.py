import importlib.util

import numpy as np
import pytest

from l2d_jax.config.schema import MeshConfig
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.errors import InputError
from l2d_jax.performance import topologies
from l2d_jax.performance.topologies import GENERATIONS, Topology

with_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs libtpu: the extra tpu")


def test_names():
    assert Topology.parse("v5e:16x16") == Topology("v5e", (16, 16))
    assert Topology.parse("v5p:2x2x1").name == "v5p:2x2x1"
    assert Topology.parse("v6e:4x8", slices=2).name == "2 x v6e:4x8"


@pytest.mark.parametrize(
    ("text", "slices", "message"),
    [
        ("v5f:2x2", 1, "unknown kind of TPU 'v5f': did you mean 'v5"),
        ("h100", 1, "unknown kind of TPU 'h100': choose from tpu7x, v4, v5e, v5p, v6e"),
        ("v5e", 1, "a slice of v5e has 2 sizes, got 'v5e': write it as v5e:4x4"),
        ("v5e:2x2x2", 1, "got 'v5e:2x2x2'"),
        ("v5p:2x2", 1, "write it as v5p:4x4x4"),
        ("v5e:0x2", 1, "got 'v5e:0x2'"),
        ("v5e:2x2", 0, "--slices must be at least 1, got 0"),
    ],
)
def test_a_bad_name_is_one_line(text, slices, message):
    with pytest.raises(InputError) as caught:
        Topology.parse(text, slices=slices)
    assert message in str(caught.value)


def test_without_libtpu_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(topologies.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"needs libtpu.*: pip install '\.\[tpu\]'"):
        Topology.parse("v5e:2x2").devices()


@pytest.mark.parametrize(("kind", "clock"), [("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.2)])
def test_clocks(kind, clock):
    generation = GENERATIONS[kind]
    assert generation.peak / generation.per_cycle == pytest.approx(clock * 1e9, rel=0.01)
    assert generation.seconds(10**9) == pytest.approx(1 / clock, rel=0.01)


@with_libtpu
@pytest.mark.parametrize(
    ("text", "count"),
    [("v4:2x2x1", 4), ("v5e:1x1", 1), ("v5e:16x16", 256), ("v5p:2x2x2", 8), ("v6e:2x4", 8), ("tpu7x:2x2x1", 8)],
)
def test_devices_of_a_slice(text, count):
    assert len(Topology.parse(text).devices()) == count


@with_libtpu
def test_a_slice_that_does_not_exist():
    with pytest.raises(InputError, match=r"there is no slice v5e:3x3 .*: choose another --topology"):
        Topology.parse("v5e:3x3").devices()


@with_libtpu
@pytest.mark.parametrize(
    ("mesh", "axis"),
    [(MeshConfig(data=2, tensor=2), "data"), (MeshConfig(data=4), "data"), (MeshConfig(tensor=2), "fsdp")],
)
def test_one_axis_of_the_mesh_lies_across_slices(mesh, axis):
    made = make_mesh(mesh, Topology.parse("v5e:4x4", slices=2).devices())
    assert made.size == 32
    for place, name in enumerate(made.axis_names):
        first, *others = np.moveaxis(np.vectorize(lambda device: device.slice_index)(made.devices), place, 0)
        assert any((first != other).any() for other in others) == (name == axis)


@with_libtpu
def test_slices_that_no_axis_can_lie_across():
    with pytest.raises(InputError, match=r"3 slices need .* got data=1 fsdp=1: try --config\.mesh\.data=3"):
        make_mesh(MeshConfig(tensor=12), Topology.parse("v5e:2x2", slices=3).devices())
