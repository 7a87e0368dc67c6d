"""Declares each weight once, and maps its logical axes to the axes of the device mesh.

A module's `declare` returns itself with `Weight` leaves; the functions here turn that one tree into shapes
(`abstract`), placements (`shardings`) and values (`initialize`).

Why this table: `fsdp` shards the model width of every large matrix, so that weights, gradients and Adam moments shrink
with the slice; `tensor` shards heads, hidden units and the vocabulary, so that two matrix products of a block need
one reduction; `data` copies the weights and splits the batch only; `context` splits long sequences, whose keys and
values are gathered where they are read, and serves the weights as more of `fsdp`. Small axes (LoRA rank, diffusion
width) stay whole.

`stationary` is for decoding: each matrix is split over it, along hidden units or, in attention, along the model width,
as the residual stream is, whose rows are over `tensor`. The rows of a product are gathered and its weights are not,
which have more values (Pope et al. 2022, section 3.2). Attention has its rows over it: heads need not divide it.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from l2d_jax.config.schema import MeshConfig
from l2d_jax.errors import InputError

Initializer = Callable[..., jax.Array]

Rules: TypeAlias = Mapping[str, str | tuple[str, ...] | None]

RULES: Rules = {
    "batch": ("data", "fsdp", "stationary"),
    "gathered_batch": ("data", "fsdp"),  # the rows of a product with stationary weights
    "residual_batch": ("data", "fsdp", "tensor"),  # those between such products
    "residual_embed": "stationary",
    "vocab": ("tensor", "stationary"),
    "head_vocab": ("tensor", "stationary", "fsdp", "context"),  # of an output head: gathering rows copies nothing
    "embed": ("fsdp", "context"),
    "attention_embed": ("fsdp", "context", "stationary"),  # of the matrices of attention
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": ("tensor", "stationary"),
    "length": "context",
    # Whole everywhere: layers are scanned over, and parts are the six modulation vectors.
    **dict.fromkeys(("layers", "parts", "head_dim", "embed_activation", "hidden", "rank")),
    **dict.fromkeys(("diffusion", "condition", "frequency", "classes")),
}
ROWS = 512  # of a product: about twice the operations per byte that a TPU has time for

# The rules where a weight is used.
GATHERED: Rules = {**RULES, "embed": None, "attention_embed": "stationary", "head_vocab": ("tensor", "stationary")}


@dataclass(frozen=True)
class Weight:
    """The declaration of one array: everything that its users derive its shape, placement and value from."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


# The type of a leaf beside its array's: in a declared tree, which only the functions here read, it is a `Weight`. Type
# checkers need not know, or every use of an array would have to rule it out.
if TYPE_CHECKING:
    Declared: TypeAlias = Any
else:
    Declared = Weight


def shardings(declared: Any, mesh: Mesh) -> Any:
    """The tree of placements of a declared tree on `mesh`."""
    return jax.tree.map(lambda w: NamedSharding(mesh, partition(w.axes, w.shape, mesh)), declared)


def abstract(declared: Any, mesh: Mesh) -> Any:
    """The tree of `jax.ShapeDtypeStruct`s of a declared tree, placed on `mesh`."""
    placed = shardings(declared, mesh)
    return jax.tree.map(lambda w, s: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=s), declared, placed)


def initialize(declared: Any, key: jax.Array, mesh: Mesh) -> Any:
    """Initial values, created where they belong; the same numbers on every mesh."""

    def values(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(declared)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, [w.init(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)])

    return jax.jit(values, out_shardings=shardings(declared, mesh))(key)


def partition(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, rules: Rules = RULES
) -> PartitionSpec:
    """The mesh axes of an array; a dimension that its mesh axis does not divide is whole; raises `ValueError`."""
    spec: list[tuple[str, ...]] = []
    for name, size in zip(axes, shape, strict=True):
        rule = rules[name] or ()
        used = tuple(axis for axis in ((rule,) if isinstance(rule, str) else rule) if mesh.shape.get(axis, 1) > 1)
        spec.append(used if size % math.prod(mesh.shape[axis] for axis in used) == 0 else ())
    flat = [axis for used in spec for axis in used]
    if len(flat) != len(set(flat)):
        raise ValueError(f"logical axes {axes} map twice to one mesh axis: {spec}")
    return PartitionSpec(*(used[0] if len(used) == 1 else used or None for used in spec))


def mesh_sizes(config: MeshConfig, devices: int) -> dict[str, int]:
    """The size of each axis on a number of devices, which they need not multiply to; "auto" is like -1."""
    sizes = {name: -1 if size == "auto" else size for name, size in dataclasses.asdict(config).items()}
    rest = devices // math.prod(max(size, 1) for size in sizes.values())
    return {name: rest if size == -1 else size for name, size in sizes.items()}


def decoding_mesh(config: MeshConfig, *, rows: int, kv_heads: int, devices: int) -> MeshConfig:
    """The mesh to decode so many rows at a time on, unless the config sets one: weights stay where they are.

    As many key heads as divide the devices are split over `tensor`. The weights are split over the other devices, too,
    which reads them fastest; beyond `ROWS` rows, for which a device computes longer than it reads, there are copies.
    """
    if config != MeshConfig():
        return config
    copies = max(n for n in range(1, devices + 1) if devices % n == 0 and (n == 1 or rows >= n * ROWS))
    tensor = math.gcd(devices // copies, kv_heads)
    return MeshConfig(data=copies, fsdp=1, tensor=tensor, stationary=devices // copies // tensor)


def count_slices(devices: Iterable[Any]) -> int:
    """The number of TPU slices that devices belong to; other devices are one slice."""
    return len({getattr(device, "slice_index", 0) for device in devices})


def make_mesh(config: MeshConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The device mesh of a config; raises `InputError` if the sizes do not multiply to the number of devices."""
    devices = devices or jax.devices()
    sizes = mesh_sizes(config, len(devices))
    if (total := math.prod(sizes.values())) != len(devices):
        wanted = " x ".join(f"{name}={size}" for name, size in sizes.items())
        raise InputError(f"config.mesh {wanted} needs {total} devices, found {len(devices)}: change config.mesh")
    slices = count_slices(devices)
    if slices == 1:
        arranged = mesh_utils.create_device_mesh(tuple(sizes.values()), devices, allow_split_physical_axes=True)
        return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))
    # Between slices the network is slow: only what crosses it least may lie there, copies before shards of weights.
    across = next((name for name in ("data", "fsdp") if sizes[name] % slices == 0), None)
    if across is None:
        rule = f"{slices} slices need config.mesh.data or fsdp to be a multiple of {slices}"
        got = f"got data={sizes['data']} fsdp={sizes['fsdp']}"
        raise InputError(f"{rule}, {got}: try --config.mesh.data={slices}")
    between = [slices if name == across else 1 for name in sizes]
    within = [size // copies for size, copies in zip(sizes.values(), between, strict=True)]
    arranged = mesh_utils.create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The placement of a batch: examples over `data` x `fsdp`."""
    return NamedSharding(mesh, PartitionSpec(RULES["batch"]))


def spread(array: np.ndarray) -> jax.Array:
    """Place an array that every process holds: rows over `data` x `fsdp` of the set mesh, if these divide them."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.size == 1:
        return jnp.asarray(array)
    rows = partition(("batch",), array.shape[:1], mesh)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, rows), lambda index: array[index])


def axis_size(axis: str) -> int:
    """The number of devices along an axis of the set mesh; 1 where no mesh is set."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def platform() -> str:
    """The platform that programs are compiled for: that of the set mesh, otherwise JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None or device.platform is None else str(device.platform)


def rows_on_devices(mesh: Mesh, count: int, devices: Iterable[jax.Device] | None = None) -> list[int]:
    """The rows of a batch of `count` that lie on `devices` (None: those of this process), in rising order."""
    ranges = batch_sharding(mesh).devices_indices_map((count,))
    held = mesh.local_devices if devices is None else devices
    return sorted({row for device in held for row in range(*ranges[device][0].indices(count))})


def constrain(x: jax.Array, *axes: str, rules: Rules = RULES) -> jax.Array:
    """Ask the partitioner to keep `x` on its logical `axes`, inside `jax.set_mesh`; elsewhere return `x` unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh, rules=rules))
