"""Grouped-query attention: one function, by the kernel that is best on each platform, with equal results.

Where each query is the token of its own key slot, as in training and for prompts, TPUs use splash attention, which
holds no scores in memory and repeats no keys, under `shard_map`: sequences over `data` x `fsdp`, heads over `tensor`,
queries over `context`. Elsewhere, and in decoding, whose single query has no scores to speak of, it is
`jax.nn.dot_product_attention`: with cuDNN's kernel on GPUs in bfloat16, otherwise XLA's.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from l2d_jax.distributed import sharding

LANES = 128  # of a TPU: splash attention takes lengths that are multiples
BLOCK = 512  # queries and keys of one tile of splash attention, at most
SCORES = 2**25  # at most, that XLA holds at a time, where the queries can be halved so often
NAME = "attention"  # of what rematerialisation may save of the kernel


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    *,
    kv_positions: Int[Array, "B S"],
    q_positions: Int[Array, "B T"] | None = None,
    kv_segments: Int[Array, "B S"] | None = None,
    q_segments: Int[Array, "B T"] | None = None,
    prefix: tuple[Float[Array, "P K H"], Float[Array, "P K H"]] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention to the keys at or before each query, of the same segment; slots of position -1 are empty and unseen.

    Args:
      q: queries.
      k: keys.
      v: values.
      kv_positions: of the keys.
      q_positions: of the queries; None: each key slot has T / S of them, side by side, and positions grow with the
        slots.
      kv_segments: sequences that share a row have a number each; None: one sequence a row.
      q_segments: the same of the queries, where their positions are given.
      prefix: keys and values of tokens that come before those of every row; every query sees them.
    """
    platform = sharding.platform()
    if q_positions is None:
        if platform == "tpu" and is_tiled(k.shape[1]):
            segments = jnp.where(kv_positions < 0, -1, 0 if kv_segments is None else kv_segments)
            return splash(q, k, v, segments)
        copies = q.shape[1] // k.shape[1]
        q_positions = jnp.repeat(kv_positions, copies, axis=1)
        q_segments = None if kv_segments is None else jnp.repeat(kv_segments, copies, axis=1)
    seen = (kv_positions[:, None, :] <= q_positions[:, :, None]) & (kv_positions[:, None, :] >= 0)
    if q_segments is not None and kv_segments is not None:
        seen &= kv_segments[:, None, :] == q_segments[:, :, None]
    return plain(q, k, v, seen, platform=platform, prefix=prefix)


def is_tiled(length: int) -> bool:
    """Whether a sequence of this length can be cut into the tiles of splash attention."""
    shards = sharding.axis_size("context")
    return length % (LANES * shards) == 0


def plain(
    q: Array,
    k: Array,
    v: Array,
    seen: Bool[Array, "B T S"],
    *,
    platform: str,
    prefix: tuple[Array, Array] | None = None,
) -> Float[Array, "B T N H"]:
    """Attention under a mask, by cuDNN or XLA; XLA, which holds all scores, takes some queries at a time."""
    is_half = q.dtype in (jnp.bfloat16, jnp.float16) and q.shape[1] > 1 and prefix is None
    kernel: Any = "cudnn" if platform == "gpu" and is_half else "xla"

    def attend(own: tuple[Array, Array]) -> Array:
        q, seen = own
        if prefix is not None:
            return after(q, k, v, seen, prefix=prefix)
        return jax.nn.dot_product_attention(q, k, v, mask=seen[:, None], implementation=kernel)

    pieces, scores = 1, q.size // q.shape[3] * (k.shape[1] + (0 if prefix is None else len(prefix[0])))
    while kernel == "xla" and scores > SCORES * pieces and q.shape[1] % (2 * pieces) == 0:
        pieces *= 2
    if pieces == 1:
        return checkpoint_name(attend((q, seen)), NAME)
    split = [jnp.moveaxis(a.reshape(a.shape[0], pieces, -1, *a.shape[2:]), 1, 0) for a in (q, seen)]
    return checkpoint_name(jnp.moveaxis(jax.lax.map(attend, tuple(split)), 0, 1).reshape(q.shape), NAME)


def after(q: Array, k: Array, v: Array, seen: Array, *, prefix: tuple[Array, Array]) -> Float[Array, "B T N H"]:
    """Attention to the keys of each row under a mask, and to those of the prefix, which are read once for all rows."""
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[3])
    own = jnp.einsum("BTKGH,BSKH->BKGTS", grouped, k, preferred_element_type=jnp.float32)
    own = jnp.where(seen[:, None, None], own, -jnp.inf)
    first = jnp.einsum("BTKGH,SKH->BKGTS", grouped, prefix[0], preferred_element_type=jnp.float32)
    chances = jax.nn.softmax(jnp.concatenate([first, own], axis=-1) * q.shape[3] ** -0.5).astype(v.dtype)
    first, own = jnp.split(chances, [len(prefix[0])], axis=-1)
    mean = jnp.einsum("BKGTS,SKH->BTKGH", first, prefix[1]) + jnp.einsum("BKGTS,BSKH->BTKGH", own, v)
    return mean.reshape(q.shape)


def splash(q: Array, k: Array, v: Array, segments: Int[Array, "B T"], *, interpret: bool = False) -> Array:
    """Causal attention within segments by the TPU's kernel; `interpret` runs it, slowly, on any platform.

    Several queries of one slot are to the kernel what the query heads of one key head are: rows that read one key.
    """
    mesh = jax.sharding.get_abstract_mesh()
    (batch, length, key_heads, width), copies = k.shape, q.shape[1] // k.shape[1]
    group = copies * (q.shape[2] // key_heads)
    scaled = (q * width**-0.5).astype(q.dtype).reshape(batch, length, copies, key_heads, -1, width)
    scaled = scaled.swapaxes(2, 3).reshape(batch, length, key_heads * group, width)
    heads = "tensor" if sharding.axis_size("tensor") > 1 and key_heads % sharding.axis_size("tensor") == 0 else None
    context = "context" if sharding.axis_size("context") > 1 else None
    shards = sharding.axis_size("context")
    kernel = _kernel(length, group, shards, interpret)

    def local(kernel: Any, q: Array, k: Array, v: Array, own: Array, all_segments: Array) -> Array:
        b, t, n, h = q.shape
        ids = splash_attention.SegmentIds(own, all_segments)
        grouped = q.reshape(b, t, n // group, group, h).transpose(0, 2, 3, 1, 4)
        per_head = jax.vmap(kernel, (0, 0, 0, None))  # over key heads, each with its group of queries
        out = jax.vmap(per_head)(grouped, k.swapaxes(1, 2), v.swapaxes(1, 2), ids)
        return out.transpose(0, 3, 1, 2, 4).reshape(b, t, n, h)

    run = local
    if not mesh.empty and mesh.size > 1:
        rows = sharding.partition(("batch",), (batch,), mesh)[0]
        queries, keys = PartitionSpec(rows, context, heads, None), PartitionSpec(rows, None, heads, None)
        own = kernel.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, context)))
        specs = (own, queries, keys, keys, PartitionSpec(rows, context), PartitionSpec(rows, None))
        run = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=queries, check_vma=False)
    out = run(kernel, scaled, k, v, segments, segments)
    return out.reshape(batch, length, key_heads, copies, -1, width).swapaxes(2, 3).reshape(q.shape)


@functools.lru_cache
def _kernel(length: int, group: int, shards: int, interpret: bool) -> Any:  # noqa: FBT001 (a key of the cache)
    """The kernel of one key head and its queries."""
    block = next(size for size in (BLOCK, BLOCK // 2, LANES) if length % (size * shards) == 0)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    tiles: dict[str, Any] = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    causal = splash_attention.CausalMask((length, length), shard_count=shards)
    mask = splash_attention.MultiHeadMask([causal] * group)
    with jax.ensure_compile_time_eval():
        return splash_attention.make_splash_mqa(
            mask,
            block_sizes=splash_attention.BlockSizes(**tiles),
            head_shards=1,
            q_seq_shards=shards,
            residual_checkpoint_name=NAME,
            interpret=interpret,
        )
