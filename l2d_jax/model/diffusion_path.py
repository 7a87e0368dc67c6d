"""The trainable diffusion path: a reader of the frozen model's cache (paper section 3.2).

It carries one diffusion token per position. The diffusion token that predicts position k sits at position k - 1: it has
the rotary angle of that position and sees the LM's keys up to it, but no other diffusion token. The path's layers are
the LM's weights with LoRA updates, or full copies. Their output, multiplied by w(t) - w(0), corrects the last hidden
state.

Two options go beyond the paper. A path may be anchored: untrained, it is the LM itself. It then starts from the token's
embedding plus the translated x_t, its gates are 1 + g(t), and its correction is (1 + w(t) - w(0)) (f_d - h). A path may
also read the context itself (`reader`): the LM then runs with the path's layers, and diffusion tokens see the keys and
values of that run.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.nn import initializers
from jaxtyping import Array, Float, Int, Num

from l2d_jax.config.schema import PROJECTIONS, LoraConfig, PathConfig
from l2d_jax.distributed.sharding import Declared, Initializer, Weight
from l2d_jax.model import diffusion
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.attention import attention, causal_mask
from l2d_jax.model.axes import ADAPTED, KEYS, MATRICES, Apart, axis_sizes, declare_stacked
from l2d_jax.model.context import Context
from l2d_jax.model.gathering import gather_layer, gather_rows, residual, split_rows
from l2d_jax.model.kv_cache import LayerCache
from l2d_jax.model.layer_scan import scan_layers
from l2d_jax.model.layers import (
    LayerOptions,
    Linear,
    Lora,
    Mlp,
    RowLinear,
    RowLora,
    RowMlp,
    activate,
    layer_options,
    project,
    project_saved,
    rope,
)
from l2d_jax.model.llm import LLM, bias
from l2d_jax.model.llm import Layers as LLMLayers
from l2d_jax.model.lora import LLMAdapter

PARTS = 6  # scale, shift and gate of the attention, then of the MLP


@nnx.dataclass
class PathLayers(nnx.Module):
    """Stacked weights of all blocks of the path; its matrices update the LM's matrices or replace them."""

    modulation: Mlp | None = nnx.data()  # E -> E -> (6, D); None in a path of rows
    q: Lora | RowLora | Num[Array, "L D N H"] | Apart | list[Lora] | Declared = nnx.data()
    o: Lora | RowLora | Num[Array, "L N H D"] | Apart | list[Lora] | Declared = nnx.data()
    gate: Lora | RowLora | Num[Array, "L D F"] | Apart | list[Lora] | Declared = nnx.data()
    up: Lora | RowLora | Num[Array, "L D F"] | Apart | list[Lora] | Declared = nnx.data()
    down: Lora | RowLora | Num[Array, "L F D"] | Apart | list[Lora] | Declared = nnx.data()
    q_bias: Float[Array, "L N H"] | Declared | None = nnx.data(default=None)  # only in full copies, if the LM has one
    k: Lora | Num[Array, "L D K H"] | Apart | Declared | None = nnx.data(default=None)  # if it reads the context
    v: Lora | Num[Array, "L D K H"] | Apart | Declared | None = nnx.data(default=None)


class Conditions(NamedTuple):
    """Everything that time and class alone determine. Decoding computes it once for all evaluations of a grid."""

    modulation: Float[Array, "L *b 6 D"] | None  # `DiffusionPath.modulate` of each block; None: blocks compute it
    merge: Float[Array, "*b #D"]  # w_d(t); for an anchored path 1 + w_d(t)
    # Index of each row's (batch row,) time and class, of a modulation that has all of them: a layer looks its own up.
    which: tuple[Int[Array, "..."], ...] | None = None


@nnx.dataclass
class DiffusionPath(nnx.Module):
    """f_d and w_d of the paper, with the maps into and out of the diffusion space."""

    vocabulary: Linear | RowLinear = nnx.data()  # D -> C
    translation: Mlp | RowMlp = nnx.data()  # C -> D
    time: Mlp | None = nnx.data()  # F -> E; None in a path of rows, whose conditions are in a table
    layers: PathLayers = nnx.data()
    merge: Mlp | None = nnx.data()  # E -> D, the weight w; None in a path of rows
    classes: Float[Array, "labels E"] | Declared | None = nnx.data()  # the last label is the null class
    config: PathConfig = nnx.static()

    @classmethod
    def declare(cls, config: PathConfig, architecture: Architecture) -> "DiffusionPath":
        """Declare the module: a float32 `Weight` in place of each array, with the release's initial values."""
        a, c, d, e = architecture, config, architecture.hidden_size, config.condition_width
        sizes = axis_sizes(a) | {"rank": c.lora_rank, "condition": e, "parts": PARTS}

        def layer(name: str) -> Lora | Weight:
            if c.layers == "lora":
                return Lora.declare(name, sizes, initializers.normal(1 / c.lora_rank))
            inputs, outputs = map(len, MATRICES[name])
            fan_in, fan_out = tuple(range(1, 1 + inputs)), tuple(range(1 + inputs, 1 + inputs + outputs))
            return declare_stacked(name, sizes, initializers.glorot_uniform(fan_in, fan_out, batch_axis=0))

        def modulation(name: str, init: Initializer) -> Linear:
            weight = declare_stacked(f"modulation.{name}.weight", sizes, init)
            return Linear(weight=weight, bias=declare_stacked(f"modulation.{name}.bias", sizes, initializers.zeros))

        normal, xavier, zeros = initializers.normal(0.02), initializers.glorot_uniform(), initializers.zeros
        entry = zeros if c.start == "anchored" else xavier  # at the start, x_t must not change the LM
        first = modulation("first", initializers.glorot_uniform(1, -1, batch_axis=0))
        has_q_bias = c.layers == "dense" and a.qkv_bias
        return cls(
            vocabulary=_affine((d, c.width), ("embed", "diffusion"), xavier),
            translation=_mlp((c.width, c.translation_width, d), ("diffusion", "condition", "embed"), xavier, entry),
            time=_mlp((c.frequency_width, e, e), ("frequency", "condition", "condition"), normal, normal),
            layers=PathLayers(
                modulation=Mlp(first=first, last=modulation("last", zeros)),
                **{name: layer(name) for name in matrices(c)},
                q_bias=declare_stacked("q_bias", sizes, zeros) if has_q_bias else None,
            ),
            merge=_mlp((e, e, d), ("condition", "condition", "embed"), xavier, zeros),
            classes=Weight((c.classes + 1, e), ("classes", "condition"), normal) if c.classes else None,
            config=c,
        )

    @property
    def is_anchored(self) -> bool:
        """Whether an untrained path is the LM itself."""
        return self.config.start == "anchored"

    def reader(self, llm: LLM) -> LLM:
        """The model that reads the context for this path: the LM, or the LM with the path's layers."""
        if self.config.reader == "lm":
            return llm
        if (adapter := self.adapter) is not None:
            return dataclasses.replace(llm, adapter=adapter)
        changes = {name: getattr(self.layers, name) for name in matrices(self.config)}
        q_bias = llm.layers.q_bias if self.layers.q_bias is None else self.layers.q_bias
        return dataclasses.replace(llm, layers=dataclasses.replace(llm.layers, **changes, q_bias=q_bias))

    @property
    def adapter(self) -> LLMAdapter | None:
        """The path's low-rank updates of the LM's layers, as an adapter; None for a path with full copies."""
        if not isinstance(self.layers.q, Lora):
            return None
        config = LoraConfig(rank=self.config.lora_rank, alpha=self.config.lora_alpha, modules=PROJECTIONS)
        updates = {name: getattr(self.layers, name, None) for name in MATRICES}
        return LLMAdapter(**updates, config=config)

    def with_matrices(self, layers: LLMLayers) -> "DiffusionPath":
        """The same path with the matrices of `layers` instead of its own matrices or low-rank updates."""
        given = {name: getattr(layers, name) for name in matrices(self.config)}
        return dataclasses.replace(self, layers=dataclasses.replace(self.layers, **given))

    def embed(self, embeddings: Float[Array, "*B D"]) -> Float[Array, "*B C"]:
        """Vocabulary vectors V_y for rows of the LM's embedding table, in float32 (bias as in the released code)."""
        return diffusion.normalize(self.vocabulary(embeddings.astype(jnp.float32)))

    def condition(self, t: Float[Array, "*#B"], labels: Int[Array, "*#B"] | None = None) -> Float[Array, "*#B E"]:
        """The embedding of t and the class, in float32; `labels` None: the null class."""
        assert self.time is not None
        embedded = self.time(diffusion.time_features(t * self.config.time_scale, self.config.frequency_width))
        if self.classes is None:
            return embedded
        return embedded + self.classes[self.config.classes if labels is None else labels]

    def merge_weight(self, t: Float[Array, "*#B"], labels: Int[Array, "*#B"] | None = None) -> Float[Array, "*#B D"]:
        """w_d(t) = w(t) - w(0), in float32; exactly zero at t = 0. For an anchored path: 1 + w_d(t)."""
        assert self.merge is not None
        weight = self.merge(self.condition(t, labels)) - self.merge(self.condition(jnp.zeros_like(t), labels))
        return jnp.where(t[..., None] == 0, 0.0, weight) + float(self.is_anchored)

    def conditions(self, llm: LLM, t: Float[Array, "*b"], labels: Int[Array, "*b"] | None = None) -> Conditions:
        """Compute the conditions for times and classes, in the dtype of the blocks' activations."""
        condition = self.condition(t, labels).astype(llm.dtype)
        scanned = (self.layers.modulation, llm.layers.attention_norm, llm.layers.mlp_norm)
        _, parts = jax.lax.scan(lambda _, block: (None, self.modulate(condition, *block)), None, scanned)
        return Conditions(jnp.stack(parts, axis=-2), self.merge_weight(t, labels))

    def modulate(
        self,
        condition: Float[Array, "*B E"] | None,
        modulation: Mlp | None,
        norm_1: Float[Array, " D"],
        norm_2: Float[Array, " D"],
    ) -> list[Float[Array, "*B D"]]:
        """The norm weight, shift and gate of a block's attention, then those of its MLP.

        They are computed one by one, so that the backward pass does not concatenate six gradients.
        """
        assert condition is not None
        assert modulation is not None
        hidden, last = jax.nn.silu(modulation.first(condition)), modulation.last
        parts = (Linear(weight=last.weight[:, i], bias=last.bias[i])(hidden) for i in range(PARTS))
        gate = float(self.is_anchored)
        starts: Any = (norm_1.astype(hidden.dtype), 0.0, gate, norm_2.astype(hidden.dtype), 0.0, gate)
        return [part + start for part, start in zip(parts, starts, strict=True)]

    def __call__(
        self,
        llm: LLM,
        x: Float[Array, "B M C"],
        t: Float[Array, "#B #M"],
        context: Context,
        *,
        conditions: Conditions | None = None,
        remat: Callable[..., Any] | None = None,
    ) -> Float[Array, "B M D"]:
        """The correction w_d(t) * f_d(x_t, t) of the context's hidden states h (paper section 3.2).

        For an anchored path it is (1 + w_d(t)) * (f_d(x_t, t) - h).

        Args:
          llm: the language model.
          x: the diffusion tokens x_t, in float32.
          t: times in [0, 1], per position or shared.
          context: results of the frozen pass.
          conditions: `DiffusionPath.conditions` for t and the labels, if they were computed before.
          remat: wraps a block for rematerialisation in training, such as `jax.checkpoint`.
        """
        cache, positions, labels, dtype = context.cache, context.positions, context.labels, llm.dtype
        modulation, which = (None, None) if conditions is None else (conditions.modulation, conditions.which)
        assert positions is None or (context.segments is None) == (cache.segments is None)
        gather = partial(gather_layer, dtype=dtype, products=llm.product_dtype)
        slots = cache.positions.shape[1]
        shared, own = layer_options(llm.architecture, length=slots if positions is None else None)
        scale = self.config.lora_alpha / self.config.lora_rank
        condition = self.condition(t, labels).astype(dtype) if modulation is None else None
        angles = jnp.repeat(cache.positions, x.shape[1] // slots, axis=1) if positions is None else positions
        places: Any = {"q_positions": positions, "kv_positions": cache.positions}
        if angles.shape[1] == 1 and own.window is None:  # otherwise XLA would compute it in every layer
            places["mask"] = causal_mask(angles, cache.positions, shared.window)
        segments: Any = {"q_segments": context.segments, "kv_segments": cache.segments}
        matmul = project if remat is None else project_saved

        def product(y: Array, weight: Any, change: Any, *, dims: int = 1) -> Array:
            if isinstance(change, Lora | RowLora):
                return matmul(y, weight, change, scale=scale, dims=dims)
            return matmul(y, change, dims=dims)

        def block(
            x: Array, scanned: tuple[LLMLayers, PathLayers, LayerCache, Array | None, LayerOptions]
        ) -> tuple[Array, None]:
            w, changes, past, known, options = scanned
            options = options.over(shared)
            w, changes = gather(w), gather(changes)
            q_bias = w.q_bias if changes.q_bias is None else changes.q_bias
            norms = w.attention_norm, w.mlp_norm
            known = known if which is None or known is None else known[which]
            parts = (
                self.modulate(condition, changes.modulation, *norms) if known is None else jnp.moveaxis(known, -2, 0)
            )
            norm_1, shift_1, gate_1, norm_2, shift_2, gate_2 = parts
            with jax.named_scope("attention"):
                y = llm.normalize(x, norm_1) + shift_1
                y = gather_rows(y, "attention_embed")
                q = split_rows(product(y, w.q, changes.q) + bias(q_bias, y), "heads", "head_dim")
                q = rope(llm.normalize(q, w.q_norm), angles, options.frequencies, options.query_scale)
                others, window = past.others(angles, options.window), options.window
                y = attention(q, past.k, past.v, **places, **segments, others=others, window=window)
                y = product(gather_rows(y, "heads", "head_dim"), w.o, changes.o, dims=2)
                x = x + gate_1 * llm.normalize(split_rows(y), w.post_attention_norm)
            with jax.named_scope("mlp"):
                y = llm.normalize(x, norm_2) + shift_2
                y = gather_rows(y)
                gate, up = (product(y, getattr(w, name), getattr(changes, name)) for name in ("gate", "up"))
                y = activate(gate, llm.architecture) * up
                x = x + gate_2 * llm.normalize(split_rows(product(y, w.down, changes.down)), w.post_mlp_norm)
            return residual(x), None

        with jax.named_scope("diffusion_path"):
            y = self.translation(diffusion.scale_input(x, t, self.config.sigma)).astype(dtype)
            if self.is_anchored:
                assert context.inputs is not None
                y = context.inputs + y
            y = residual(y)
            unread = (
                KEYS if isinstance(self.layers.q, Lora | RowLora) else MATRICES
            )  # XLA may copy the operands of a branch
            layers = dataclasses.replace(llm.layers, **dict.fromkeys(unread))
            scanned = (layers, self.layers, cache.layers(), modulation, own)
            layer = remat(block) if remat else block
            f, _ = scan_layers(layer, y, scanned, in_place=llm.in_place)
        weight = self.merge_weight(t, labels) if conditions is None else conditions.merge
        return weight.astype(f.dtype) * (f - context.hidden if self.is_anchored else f)


def matrices(config: PathConfig) -> tuple[str, ...]:
    """The names of the LM's matrices that a path updates or copies."""
    return ADAPTED if config.reader == "lm" else ADAPTED + KEYS


def _affine(shape: tuple[int, ...], axes: tuple[str, ...], init: Initializer) -> Linear:
    """Declare an affine map whose bias starts at zero."""
    return Linear(weight=Weight(shape, axes, init), bias=Weight(shape[1:], axes[1:], initializers.zeros))


def _mlp(sizes: tuple[int, ...], axes: tuple[str, ...], first: Initializer, last: Initializer) -> Mlp:
    return Mlp(first=_affine(sizes[:2], axes[:2], first), last=_affine(sizes[1:], axes[1:], last))
