"""Declares each weight once, and maps its logical axes to the axes of the device mesh.

A module's `declare` returns the module with `Weight` leaves. The functions here turn this tree into shapes
(`abstract`), placements (`shardings`) and values (`initialize`).

Why this table? `fsdp` shards the model width of every large matrix, so weights, gradients and Adam moments shrink with
the number of devices. `tensor` shards heads, hidden units and the vocabulary, so that two matrix products of a block
need one reduction. `data` copies the weights and splits only the batch. `context` splits long sequences, whose keys and
values are gathered where they are read; for weights it acts like more of `fsdp`. Small axes (LoRA rank, diffusion
width) are not sharded.

`stationary` is for decoding. Each matrix is split over it along hidden units or, in attention, along the model width,
like the residual stream, whose rows are split over `tensor`. A product gathers its rows and not its weights, because
weights have more values (Pope et al. 2022, section 3.2). In attention, rows are split over `stationary`, so the number
of heads need not be a multiple of it.
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
    "block": ("data", "fsdp", "stationary"),  # the tokens of a block of a prefix cache
    # Not sharded: layers (a scan runs over them) and parts (the six modulation vectors).
    **dict.fromkeys(("layers", "parts", "head_dim", "embed_activation", "hidden", "rank")),
    **dict.fromkeys(("diffusion", "condition", "frequency", "classes")),
}
ROWS = 512  # rows of a product: about twice the number for which a TPU's arithmetic takes as long as reading weights

# The rules where a weight is used.
GATHERED: Rules = {**RULES, "embed": None, "attention_embed": "stationary", "head_vocab": ("tensor", "stationary")}


@dataclass(frozen=True)
class Weight:
    """The declaration of an array, from which its shape, placement and initial value are derived."""

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    init: Initializer
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.axes), (self.shape, self.axes)


# The type of leaves in declared trees, which only the functions here read: a `Weight`. It is hidden from type checkers;
# otherwise every use of an array would have to rule it out.
if TYPE_CHECKING:
    Declared: TypeAlias = Any
else:
    Declared = Weight


def shardings(declared: Any, mesh: Mesh) -> Any:
    """The shardings of a declared tree on `mesh`, as a tree."""
    return jax.tree.map(lambda w: NamedSharding(mesh, partition(w.axes, w.shape, mesh)), declared)


def abstract(declared: Any, mesh: Mesh) -> Any:
    """The `jax.ShapeDtypeStruct`s of a declared tree, placed on `mesh`, as a tree."""
    placed = shardings(declared, mesh)
    return jax.tree.map(lambda w, s: jax.ShapeDtypeStruct(w.shape, w.dtype, sharding=s), declared, placed)


def initialize(declared: Any, key: jax.Array, mesh: Mesh) -> Any:
    """Initial values, created on their devices; the same numbers on every mesh."""

    def values(key: jax.Array) -> Any:
        leaves, structure = jax.tree.flatten(declared)
        keys = jax.random.split(key, len(leaves))
        return jax.tree.unflatten(structure, [w.init(k, w.shape, w.dtype) for w, k in zip(leaves, keys, strict=True)])

    return jax.jit(values, out_shardings=shardings(declared, mesh))(key)


def partition(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh | AbstractMesh, *, rules: Rules = RULES
) -> PartitionSpec:
    """The mesh axes of an array. A dimension that its mesh axis does not divide is not sharded. Raises `ValueError`."""
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
    """The size of each axis for a number of devices, without a check of their product; "auto" is like -1."""
    sizes = {name: -1 if size == "auto" else size for name, size in dataclasses.asdict(config).items()}
    rest = max(1, devices // math.prod(max(size, 1) for size in sizes.values()))
    return {name: rest if size == -1 else size for name, size in sizes.items()}


def decoding_mesh(config: MeshConfig, *, rows: int, kv_heads: int, devices: int) -> MeshConfig:
    """The mesh for decoding `rows` sequences at a time, with stationary weights, unless the config sets a mesh.

    Key heads are split over `tensor` as far as they divide the devices. The weights are split over the other devices as
    well, because that reads them fastest. Beyond `ROWS` rows, where a device computes for longer than it reads, there
    are copies of the weights.
    """
    if config != MeshConfig():
        return config
    copies = max(n for n in range(1, devices + 1) if devices % n == 0 and (n == 1 or rows >= n * ROWS))
    tensor = math.gcd(devices // copies, kv_heads)
    return MeshConfig(data=copies, fsdp=1, tensor=tensor, stationary=devices // copies // tensor)


def count_slices(devices: Iterable[Any]) -> int:
    """The number of TPU slices to which the devices belong; other devices count as one slice."""
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
    # The network between slices is slow: only axes with the least traffic may cross it (`data` before `fsdp`).
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
    """Place an array that every process has: rows over `data` x `fsdp` of the current mesh, if these divide them."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty or mesh.size == 1:
        return jnp.asarray(array)
    rows = partition(("batch",), array.shape[:1], mesh)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, rows), lambda index: array[index])


def axis_size(axis: str) -> int:
    """The number of devices along an axis of the current mesh; 1 if no mesh is set."""
    return dict(jax.sharding.get_abstract_mesh().shape).get(axis, 1)


def platform() -> str:
    """The platform for which programs are compiled: that of the current mesh, else JAX's default backend."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None or device.platform is None else str(device.platform)


def rows_on_devices(mesh: Mesh, count: int, devices: Iterable[jax.Device] | None = None) -> list[int]:
    """The rows of a batch of `count` that are on `devices` (None: those of this process), in ascending order."""
    ranges = batch_sharding(mesh).devices_indices_map((count,))
    held = mesh.local_devices if devices is None else devices
    return sorted({row for device in held for row in range(*ranges[device][0].indices(count))})


def constrain(x: jax.Array, *axes: str, rules: Rules = RULES) -> jax.Array:
    """Constrain the sharding of `x` to its logical `axes`, inside `jax.set_mesh`; elsewhere return `x` unchanged."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    return jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh, rules=rules))
