"""The frozen language model (the main path): one decoder for all classes in `architecture.SUPPORTED`.

Notable: layers are stacked and run by `lax.scan`. The cache stores a position per slot, so one mask covers left
padding, right padding, gaps and prompts of different lengths. A call returns only its new keys and values, so extending
a cache writes one slice.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jaxtyping import Array, Float, Int, Num

from l2d_jax.distributed.sharding import Declared, constrain, platform
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.attention import attention, causal_mask
from l2d_jax.model.axes import (
    EMBEDDING_AXES,
    HEAD_AXES,
    MATRICES,
    Apart,
    axis_sizes,
    declare_stacked,
    declare_weight,
)
from l2d_jax.model.few_rows import few_rows_logits
from l2d_jax.model.gathering import gather_layer, gather_rows, gather_weight, residual, split_rows
from l2d_jax.model.kv_cache import KVCache, LayerCache
from l2d_jax.model.layer_scan import scan_layers
from l2d_jax.model.layers import LayerOptions, activate, layer_options, project, project_saved, rms_norm, rope
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.model.products import logits_of
from l2d_jax.model.quantization import QuantizedWeight, declare_quantized


@nnx.dataclass
class Layers(nnx.Module):
    """Stacked weights of all decoder blocks. Matrices may be integers, as `as_bits` makes them, or None if unused."""

    attention_norm: Float[Array, "L D"] | Declared = nnx.data()
    q: Num[Array, "L D N H"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    k: Num[Array, "L D K H"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    v: Num[Array, "L D K H"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    o: Num[Array, "L N H D"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    mlp_norm: Float[Array, "L D"] | Declared = nnx.data()
    gate: Num[Array, "L D F"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    up: Num[Array, "L D F"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    down: Num[Array, "L F D"] | QuantizedWeight | Apart | Declared | None = nnx.data()
    q_bias: Float[Array, "L N H"] | Declared | None = nnx.data(default=None)
    k_bias: Float[Array, "L K H"] | Declared | None = nnx.data(default=None)
    v_bias: Float[Array, "L K H"] | Declared | None = nnx.data(default=None)
    q_norm: Float[Array, "L H"] | Declared | None = nnx.data(default=None)
    k_norm: Float[Array, "L H"] | Declared | None = nnx.data(default=None)
    post_attention_norm: Float[Array, "L D"] | Declared | None = nnx.data(default=None)
    post_mlp_norm: Float[Array, "L D"] | Declared | None = nnx.data(default=None)


@nnx.dataclass
class LLM(nnx.Module):
    """Embedding, decoder blocks, final norm and LM head."""

    embed: Float[Array, "V D"] | Declared = nnx.data()
    layers: Layers = nnx.data()
    norm: Float[Array, " D"] | Declared = nnx.data()
    head: Float[Array, "V D"] | Declared | None = nnx.data()  # None: the embedding, transposed
    architecture: Architecture = nnx.static()
    adapter: LLMAdapter | None = nnx.data(default=None)  # LoRA, added to the products of its matrices
    products: str | None = nnx.static(default=None)  # dtype of products and activations; None: that of the weights
    in_place: bool = nnx.static(default=False)  # whether `few_rows` computes products of few rows

    @property
    def dtype(self) -> Any:
        """The dtype of activations: that of products, except float32 on CPUs, which are slow in bfloat16 elsewhere."""
        dtype = self.product_dtype
        return jnp.dtype("float32") if platform() == "cpu" and dtype == jnp.bfloat16 else dtype

    @property
    def product_dtype(self) -> Any:
        """The dtype of the factors of products."""
        return self.embed.dtype if self.products is None else jnp.dtype(self.products)

    @property
    def token_bytes(self) -> int:
        """The bytes of the keys and values of a token."""
        a = self.architecture
        return 2 * a.num_hidden_layers * a.num_key_value_heads * a.head_dim * jnp.dtype(self.dtype).itemsize

    @classmethod
    def declare(cls, architecture: Architecture, *, dtype: Any) -> "LLM":
        """Declare the module, with a `Weight` for each array; int8: the layers' matrices; the rest is bfloat16."""
        a, is_quantized = architecture, jnp.dtype(dtype) == jnp.int8
        dtype = jnp.bfloat16 if is_quantized else dtype
        sizes, matrix, one = axis_sizes(a), initializers.normal(0.02), initializers.constant(1 - a.norm_offset)
        names = ("attention_norm", "mlp_norm", *(("q_norm", "k_norm") if a.qk_norm else ()))
        names += ("post_attention_norm", "post_mlp_norm") if a.output_norms else ()
        norms = {name: declare_stacked(name, sizes, one, dtype=dtype) for name in names}
        biases = ("q_bias", "k_bias", "v_bias") if a.qkv_bias else ()
        others = {name: declare_stacked(name, sizes, matrix, dtype=dtype) for name in (*MATRICES, *biases)}
        layers = Layers(**norms, **others)
        return cls(
            embed=declare_weight(EMBEDDING_AXES, sizes, matrix, dtype=dtype),
            layers=declare_quantized(layers) if is_quantized else layers,
            norm=declare_weight(("embed",), sizes, one, dtype=dtype),
            head=None if a.tied else declare_weight(HEAD_AXES, sizes, matrix, dtype=dtype),
            architecture=a,
        )

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        cache: KVCache | None = None,
        *,
        segments: Int[Array, "B T"] | None = None,
        remat: Callable[..., Any] | None = None,
    ) -> tuple[Float[Array, "B T D"], KVCache]:
        """Run the decoder on tokens that follow those of `cache`.

        Several sequences may share a row: `segments` numbers them, and each begins at position 0. Such rows are read in
        one call, without a cache. `remat` wraps a block for rematerialisation, if this model is trained.

        Returns the last hidden states before the final norm, and the keys and values of these tokens only. After the
        first call these are the whole cache; `cache.extend` appends those of later calls.
        """
        shared, own = layer_options(self.architecture, length=tokens.shape[1] if cache is None else None)
        scale = 1.0 if self.adapter is None else self.adapter.scale
        assert cache is None or segments is None
        gather = partial(gather_layer, dtype=self.dtype, products=self.product_dtype)
        product = partial(project if remat is None else project_saved, scale=scale)

        def block(
            x: Array, scanned: tuple[Layers, LLMAdapter | None, LayerCache | None, LayerOptions]
        ) -> tuple[Array, tuple[Array, Array]]:
            w, past, options = gather(scanned[0]), scanned[2], scanned[3].over(shared)
            window = options.window
            updates = {} if scanned[1] is None else gather(scanned[1]).updates()
            with jax.named_scope("attention"):
                y = gather_rows(self.normalize(x, w.attention_norm), "attention_embed")
                q, k, v = (product(y, getattr(w, n), updates.get(n)) + bias(getattr(w, f"{n}_bias"), y) for n in "qkv")
                q = self.normalize(split_rows(q, "heads", "head_dim"), w.q_norm)
                k = self.normalize(split_rows(k, "kv_heads", "head_dim"), w.k_norm)
                q = rope(q, positions, options.frequencies, options.query_scale)
                k = rope(k, positions, options.frequencies)
                k, v = k.swapaxes(1, 2), split_rows(v, "kv_heads", "head_dim").swapaxes(1, 2)
                if cache is None or past is None:
                    y = attention(q, k, v, kv_positions=positions, kv_segments=segments, window=window)
                else:
                    others = [*past.others(positions, window), (k, v, causal_mask(positions, positions, window))]
                    places = {"q_positions": positions, "kv_positions": cache.positions}
                    y = attention(q, past.k, past.v, **places, others=others, window=window)
                y = product(gather_rows(y, "heads", "head_dim"), w.o, updates.get("o"), dims=2)
                x = x + self.normalize(split_rows(y), w.post_attention_norm)
            with jax.named_scope("mlp"):
                y = gather_rows(self.normalize(x, w.mlp_norm))
                gate, up = (product(y, getattr(w, name), updates.get(name)) for name in ("gate", "up"))
                y = activate(gate, self.architecture) * up
                x = x + self.normalize(split_rows(product(y, w.down, updates.get("down"))), w.post_mlp_norm)
            k, v = (constrain(a, "batch", "kv_heads", "length", "head_dim") for a in (k, v))
            return residual(x), (k, v)

        with jax.named_scope("llm"):
            scanned = (self.layers, self.adapter, None if cache is None else cache.layers(), own)
            layer = remat(block) if remat else block
            hidden, (k, v) = scan_layers(layer, self.lookup(tokens), scanned, in_place=self.in_place)
        used = jnp.int32(tokens.shape[1])
        return hidden, KVCache(k=k, v=v, positions=positions, used=used, segments=segments)

    def normalize(self, x: Float[Array, "*B D"], weight: Float[Array, "*b D"] | None) -> Float[Array, "*B D"]:
        """The root-mean-square norm of this model; `x` itself if `weight` is None."""
        return rms_norm(x, weight, self.architecture.rms_norm_eps, self.architecture.norm_offset)

    def lookup(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """The embeddings of tokens, as the first block reads them."""
        rows, scale = self.rows(tokens), self.architecture.embedding_scale
        return rows if scale == 1 else rows * jnp.asarray(scale, rows.dtype)  # rounded, as in transformers

    def rows(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Rows of the embedding table. The table is gathered first: sharded rows would be moved twice."""
        table = gather_weight(self.embed, EMBEDDING_AXES, dtype=self.embed.dtype)
        rows = table[gather_rows(tokens)].astype(self.dtype)
        return residual(rows)

    def with_whole_head(self) -> "LLM":
        """The same model with its LM head gathered once, before a loop that uses it many times."""
        head, axes = (self.embed, EMBEDDING_AXES) if self.head is None else (self.head, HEAD_AXES)
        return dataclasses.replace(self, head=gather_weight(head, axes, dtype=self.product_dtype))

    def logits(self, hidden: Float[Array, "*B D"]) -> Float[Array, "*B V"]:
        """Apply the final norm and the LM head; logits are in float32."""
        with jax.named_scope("head"):
            y = gather_rows(self.normalize(hidden, self.norm))
            head = self.embed if self.head is None else self.head
            return few_rows_logits(y, head) if self.in_place else logits_of(y, head.astype(self.product_dtype))


def bias(value: Array | None, like: Array) -> Array | float:
    """A bias in the dtype of the activations, or zero if the model has none."""
    return 0.0 if value is None else value.astype(like.dtype)
