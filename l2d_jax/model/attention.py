"""Grouped-query attention: one function that picks the best kernel for each platform, with equal results.

In training and for prompts, queries and key slots belong to the same tokens. There TPUs use splash attention, which
stores no scores and repeats no keys, under `shard_map`: sequences over `data` x `fsdp`, heads over `tensor`, queries
over `context`. Other platforms use `jax.nn.dot_product_attention`: cuDNN's kernel on GPUs in bfloat16, XLA's otherwise.
In decoding a sequence has a single query with few scores, and the attention is written out here.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.distributed import sharding

LANES = 128  # vector lanes of a TPU; splash attention takes only lengths that are multiples of it
BLOCK = 512  # largest number of queries and keys in a tile of splash attention
FEW = 16  # rows per device: with fewer, a separate `shard_map` program gains nothing
EMPTY = -1e30  # score of a masked slot: finite, for queries that see no key; it is never scaled, which would round it
SCORES = 2**25  # largest number of scores that XLA holds at once, if halving the queries can achieve it
# Keys and values, each [B, K, S, H], or [K, P, H] for all rows; and a mask [B, T, S], None: every query sees them.
Part: TypeAlias = tuple[Array, Array, Array | None]
NAME = "attention"  # checkpoint name of the kernel's output, so that rematerialisation may save it


def attention(  # noqa: PLR0913 (keys have places, queries have places, and both have their values)
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K S H"],
    v: Float[Array, "B K S H"],
    *,
    kv_positions: Int[Array, "B S"],
    q_positions: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    others: Sequence[Part] = (),
    window: Int[Array, ""] | None = None,
    mask: Bool[Array, "B T S"] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention of each query to the keys at or before it in its segment. Slots of position -1 are empty and masked.

    Args:
      q: queries.
      k: keys.
      v: values.
      kv_positions: position of each key slot; -1: empty.
      q_positions: position of each query. None: each key slot has T / S queries, next to each other, positions grow
        with the slots, and `q_segments` are unused.
      kv_segments: number of the sequence of each key slot, where several sequences share a row.
      q_segments: number of the sequence of each query.
      others: further keys and values in separate arrays, which are also attended to. Copying them into the slots would
        take as long as the attention.
      window: a query sees only keys that are fewer than `window` positions before it.
      mask: mask of the slots of `k` by position, if it was computed before.
    """
    platform = sharding.platform()
    if q_positions is None:
        if platform == "tpu" and window is None and is_tiled(k.shape[2]):
            return splash(q, k, v, jnp.where(kv_positions < 0, -1, 0 if kv_segments is None else kv_segments))
        copies = q.shape[1] // k.shape[2]
        q_positions = jnp.repeat(kv_positions, copies, axis=1)
        q_segments = None if kv_segments is None else jnp.repeat(kv_segments, copies, axis=1)
    mask = causal_mask(q_positions, kv_positions, window) if mask is None else mask
    if q_segments is not None and kv_segments is not None:
        mask &= kv_segments[:, None, :] == q_segments[:, :, None]
    parts = [part for part in (*others, (k, v, mask)) if part[0].shape[-2] > 0]  # a cache may have no slots
    return _masked_attention(q, parts, platform=platform)


def causal_mask(
    q_positions: Int[Array, "B T"], kv_positions: Int[Array, "#B S"], window: Int[Array, ""] | None = None
) -> Bool[Array, "B T S"]:
    """Which slots are at or before each query, and fewer than `window` before it; slots of position -1 are empty."""
    keys, queries = kv_positions[:, None, :], q_positions[:, :, None]
    mask = (keys <= queries) & (keys >= 0)
    return mask if window is None else mask & (queries - keys < window)


def is_tiled(length: int) -> bool:
    """Whether the tiles of splash attention divide a sequence of this length."""
    return length % (LANES * sharding.axis_size("context")) == 0


def cudnn_problem(queries: int, keys: int, width: int, compute_capability: float) -> str | None:
    """Why cuDNN's kernel does not take a masked attention with gradients; None: it does.

    These are the rules that `jax.nn.dot_product_attention` enforces, and the devices for which cuDNN has the kernel.
    """
    if compute_capability < 8:
        return f"it needs an NVIDIA GPU of compute capability 8.0 or later, and this one has {compute_capability:g}"
    widest = 256 if compute_capability >= 9 else 128
    if width > widest or width % 8:
        return f"heads of width {width} are not a multiple of 8 up to {widest}"
    if queries % 2 or keys % 2:
        return f"of {queries} queries and {keys} keys, both have to be even: choose an even data.max_length"
    return None


def _compute_capability() -> float:
    """That of the first GPU; 0 if it is not NVIDIA's, and for a GPU that is only described."""
    found = getattr(jax.devices()[0], "compute_capability", "")
    return float(found) if found.replace(".", "", 1).isdigit() else 0.0


def _masked_attention(q: Array, parts: Sequence[Part], *, platform: str) -> Float[Array, "B T N H"]:
    """Masked attention by cuDNN or XLA. XLA holds all scores in memory, so many queries are processed in parts."""
    is_half = q.dtype in (jnp.bfloat16, jnp.float16) and len(parts) == 1
    keys, values, masks = zip(*parts, strict=True)
    kernel: Any = "xla"
    if platform == "gpu" and is_half and q.shape[1] > 1:
        problem = cudnn_problem(q.shape[1], keys[0].shape[-2], q.shape[-1], _compute_capability())
        if problem is None:
            kernel = "cudnn"
        else:
            warnings.warn(f"attention is computed by XLA, more slowly than by cuDNN's kernel: {problem}", stacklevel=2)

    def attend(part: tuple[Array, tuple[Array | None, ...]]) -> Array:
        q, masks = part
        if q.shape[1] == 1:
            return _single_query(q, list(zip(keys, values, masks, strict=True)))
        if len(masks) == 1 and masks[0] is not None:
            k, v = keys[0].swapaxes(1, 2), values[0].swapaxes(1, 2)
            return jax.nn.dot_product_attention(q, k, v, mask=masks[0][:, None], implementation=kernel)
        return _attention_to_parts(q, list(zip(keys, values, masks, strict=True)))

    pieces, scores = 1, q.size // q.shape[3] * sum(k.shape[-2] for k in keys)
    while kernel == "xla" and scores > SCORES * pieces and q.shape[1] % (2 * pieces) == 0:
        pieces *= 2
    if pieces == 1:
        return checkpoint_name(attend((q, masks)), NAME)

    def split(a: Array) -> Array:
        return jnp.moveaxis(a.reshape(a.shape[0], pieces, -1, *a.shape[2:]), 1, 0)

    out = jax.lax.map(attend, jax.tree.map(split, (q, masks)))
    return checkpoint_name(jnp.moveaxis(out, 0, 1).reshape(q.shape), NAME)


def _single_query(q: Array, parts: Sequence[Part]) -> Float[Array, "B 1 N H"]:
    """`_attention_to_parts` for one query; under `shard_map` if rows and key heads divide over all devices.

    `shard_map` removes the axis of a device's only key head: with an axis of size 1, XLA reads the scores again to sum
    the softmax.
    """
    q, parts = q[:, 0], [(k, v, None if mask is None else mask[:, 0]) for k, v, mask in parts]
    mesh, sizes, run = jax.sharding.get_abstract_mesh(), (q.shape[0], parts[0][0].shape[-3]), _attention_to_parts
    rows, heads = spec = sharding.partition(("batch", "kv_heads"), sizes, mesh)
    local = math.prod(NamedSharding(mesh, spec).shard_shape(sizes))
    if mesh.size > 1 and local >= FEW and local * mesh.size == math.prod(sizes):
        keys = [PartitionSpec(*[rows] * (k.ndim - 3), heads) for k, _, _ in parts]
        masks = (None if mask is None else PartitionSpec(rows) for _, _, mask in parts)
        specs = spec, list(zip(keys, keys, masks, strict=True))
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
    return run(q, parts)[:, None]


def _attention_to_parts(q: Array, parts: Sequence[Part]) -> Float[Array, "B *T N H"]:
    """Attention to keys in several arrays; arrays without a row axis are read once for all rows."""
    grouped, t = q.reshape(*q.shape[:-2], parts[0][0].shape[-3], -1, q.shape[-1]), "T" if q.ndim == 4 else ""
    grouped = jnp.moveaxis(grouped, 1, 3) if t else grouped  # once, instead of around each product
    axes = ["BKSH"[-k.ndim :] for k, _, _ in parts]
    scores = []
    for (k, _, mask), names in zip(parts, axes, strict=True):
        if sharding.platform() == "cpu" and not t:  # with keys as the second factor, XLA would transpose all of them
            score = jnp.einsum(f"{names},BKGH->BKSG", k, grouped).swapaxes(2, 3)
        else:
            score = jnp.einsum(f"BKG{t}H,{names}->BKG{t}S", grouped, k, preferred_element_type=jnp.float32)
        score = score * q.shape[-1] ** -0.5
        scores.append(score if mask is None else jnp.where(mask[:, None, None], score, EMPTY))
    highest = functools.reduce(jnp.maximum, (score.max(axis=-1, keepdims=True) for score in scores))
    weights = [jnp.exp(score - highest) for score in scores]  # one softmax, without joining its parts
    total = functools.reduce(jnp.add, (weight.sum(axis=-1, keepdims=True) for weight in weights))
    probs = ((weight / total).astype(q.dtype) for weight in weights)
    triples = zip(probs, parts, axes, strict=True)
    values = (jnp.einsum(f"BKG{t}S,{names}->BKG{t}H", p, v) for p, (_, v, _), names in triples)
    total = functools.reduce(jnp.add, values)
    return (jnp.moveaxis(total, 3, 1) if t else total).reshape(q.shape)


def splash(q: Array, k: Array, v: Array, segments: Int[Array, "B T"], *, interpret: bool = False) -> Array:
    """Causal attention within segments by the TPU kernel; `interpret` runs it, slowly, on any platform.

    Several queries of one slot are treated like the query heads of one key head: as rows that read the same key.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (batch, key_heads, length, width), copies = k.shape, q.shape[1] // k.shape[2]
    group = copies * (q.shape[2] // key_heads)
    scaled = (q * width**-0.5).astype(q.dtype).reshape(batch, length, copies, key_heads, -1, width)
    scaled = scaled.swapaxes(2, 3).reshape(batch, length, key_heads * group, width)
    heads = "tensor" if sharding.axis_size("tensor") > 1 and key_heads % sharding.axis_size("tensor") == 0 else None
    context = "context" if sharding.axis_size("context") > 1 else None
    from jax.experimental.pallas.ops.tpu import splash_attention  # here: other devices start without it

    kernel = _kernel(length, group, sharding.axis_size("context"), interpret)

    def local(kernel: Any, q: Array, k: Array, v: Array, q_segments: Array, kv_segments: Array) -> Array:
        b, t, n, h = q.shape
        ids = splash_attention.SegmentIds(q_segments, kv_segments)
        grouped = q.reshape(b, t, n // group, group, h).transpose(0, 2, 3, 1, 4)
        per_head = jax.vmap(kernel, (0, 0, 0, None))  # over key heads, each with its group of queries
        out = jax.vmap(per_head)(grouped, k, v, ids)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)

    run = local
    if not mesh.empty and mesh.size > 1:
        rows = sharding.partition(("batch",), (batch,), mesh)[0]
        queries, keys = PartitionSpec(rows, context, heads, None), PartitionSpec(rows, heads, None, None)
        kernel_spec = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, context)))
        specs = (kernel_spec, queries, keys, keys, PartitionSpec(rows, context), PartitionSpec(rows, None))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
    out = run(kernel, scaled, k, v, segments, segments)
    return out.reshape(batch, length, key_heads, copies, -1, width).swapaxes(2, 3).reshape(q.shape)


@functools.lru_cache
def _kernel(length: int, group: int, shards: int, interpret: bool) -> Any:  # noqa: FBT001 (a key of the cache)
    """The splash kernel for one key head and its group of queries."""
    from jax.experimental.pallas.ops.tpu import splash_attention  # here: other devices start without it

    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if length % (size * shards) == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    tiles: dict[str, Any] = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    causal = splash_attention.CausalMask((length, length), shard_count=shards)
    mask = splash_attention.MultiHeadMask([causal] * group)
    options: dict[str, Any] = {"block_sizes": splash_attention.BlockSizes(**tiles), "residual_checkpoint_name": NAME}
    with jax.ensure_compile_time_eval():
        make = splash_attention.make_splash_mqa
        return make(mask, head_shards=1, q_seq_shards=shards, interpret=interpret, **options)
