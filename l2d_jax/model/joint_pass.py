"""One pass over the weights for the LM and the path: tokens for the LM, and diffusion tokens for the path.

The rows of both go through each layer together, so that a matrix that both use is read once. In decoding the LM has one
row, a position after the newest known token, to which most of the path's rows belong. In a prompt the LM has a row for
each token. The path's other rows belong to the LM's last token: they see its keys, which the layer has just computed.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.model import diffusion
from l2d_jax.model.attention import attention, causal_mask
from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.gathering import gather_layer, gather_rows, residual, split_rows
from l2d_jax.model.kv_cache import KVCache, LayerCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.layer_scan import scan_layers
from l2d_jax.model.layers import Lora, RowLora, activate, layer_options, project, project_update, rope
from l2d_jax.model.llm import bias


class DiffusionRows(NamedTuple):
    """Diffusion tokens at positions of known tokens, or of the LM's last one."""

    x: Float[Array, "B M C"]
    t: Float[Array, "B M"]
    positions: Int[Array, "B M"]
    inputs: Float[Array, "B M D"]  # the LM's embedding of the token at each position
    conditions: Conditions | None  # conditions of t; None: computed here

    def correct(
        self, path: DiffusionPath, hidden: Float[Array, "B M D"], features: Float[Array, "B M D"]
    ) -> Float[Array, "B M D"]:
        """The hidden states that the path makes from those of the LM at these positions, given its features f_d."""
        merge = path.merge_weight(self.t) if self.conditions is None else self.conditions.merge
        return hidden + merge.astype(hidden.dtype) * (features - hidden if path.is_anchored else features)


class JointPass(NamedTuple):
    """The results of a joint pass."""

    hidden: Float[Array, "B T D"]  # of the LM's tokens
    features: Float[Array, "B M D"]  # f_d of the diffusion tokens
    new: KVCache  # keys and values of the LM's tokens


def joint_pass(
    model: Model, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], rows: DiffusionRows, cache: KVCache
) -> JointPass:
    """Read tokens with the LM that reads the context, and evaluate the path in the same pass.

    The model comes from `Model.reading`. `model.llm` and `model.path` compute the same in two passes.
    """
    llm, path = model.llm, model.path if model.updating is None else model.updating
    assert path is not None
    is_shared, dtype = path.config.reader != "lm", llm.dtype
    is_first, count = not cache.positions.shape[1] and cache.prefix is None, tokens.shape[1]
    shared, own = layer_options(llm.architecture, length=count if is_first else None)
    places = jnp.concatenate([positions, rows.positions], axis=1)
    kinds = _Kinds(count, rows.positions.shape[1])
    gather = partial(gather_layer, dtype=dtype, products=llm.product_dtype)
    scale, llm_scale = path.config.lora_alpha / path.config.lora_rank, 1.0 if llm.adapter is None else llm.adapter.scale
    known, which = None, None
    if rows.conditions is not None:
        known, which = rows.conditions.modulation, jax.tree.map(kinds.spread, rows.conditions.which)

    def block(x: Array, scanned: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
        layers, adapter, changes, others, past, modulation, options = scanned
        w, changes, others, options = gather(layers), gather(changes), gather(others), options.over(shared)
        updates = {} if adapter is None else gather(adapter).updates()
        norms = w.attention_norm, w.mlp_norm
        if modulation is None:
            modulation = jnp.stack(
                path.modulate(path.condition(rows.t).astype(dtype), others["modulation"], *norms), axis=-2
            )
            modulation = kinds.spread(modulation)
        modulation = jnp.moveaxis(modulation, -2, 0)
        norm_1, shift_1, gate_1, norm_2, shift_2, gate_2 = modulation if which is None else modulation[:, *which]

        def normalize(x: Array, weight: Array, own: Array, shift: Array) -> Array:
            return llm.normalize(x, kinds.pick(weight, own)) + kinds.pick(0.0, shift)

        def add(x: Array, y: Array, gate: Array, norm: Array | None) -> Array:
            return x + kinds.pick(1.0, gate) * llm.normalize(split_rows(y), norm)

        product = partial(_product, _Weights(w, updates, llm_scale, changes, scale, is_shared=is_shared), kinds)
        with jax.named_scope("attention"):
            y = gather_rows(normalize(x, w.attention_norm, norm_1, shift_1), "attention_embed")
            q, biases = product(y, "q"), bias(w.q_bias, y)
            if others["q_bias"] is not None:
                biases = kinds.pick(biases, others["q_bias"].astype(y.dtype)[None, None])
            q = q + biases
            k, v = (project(y[:, :count], getattr(w, n), updates.get(n), scale=llm_scale) for n in "kv")
            k, v = k + bias(w.k_bias, y), v + bias(w.v_bias, y)
            q = llm.normalize(split_rows(q, "heads", "head_dim"), w.q_norm)
            k = llm.normalize(split_rows(k, "kv_heads", "head_dim"), w.k_norm)
            q = rope(q, places, options.frequencies, options.query_scale)
            k = rope(k, positions, options.frequencies)
            k, v = k.swapaxes(1, 2), split_rows(v, "kv_heads", "head_dim").swapaxes(1, 2)
            y = _attend(q, k, v, (positions, rows.positions), cache, past, window=options.window, is_first=is_first)
            x = add(x, product(gather_rows(y, "heads", "head_dim"), "o", dims=2), gate_1, w.post_attention_norm)
        with jax.named_scope("mlp"):
            y = gather_rows(normalize(x, w.mlp_norm, norm_2, shift_2))
            y = activate(product(y, "gate"), llm.architecture) * product(y, "up")
            x = add(x, product(y, "down"), gate_2, w.post_mlp_norm)
        return residual(x), (k, v)

    with jax.named_scope("joint_pass"):
        entry = path.translation(diffusion.scale_input(rows.x, rows.t, path.config.sigma)).astype(dtype)
        entry = rows.inputs + entry if path.is_anchored else entry
        x = residual(jnp.concatenate([llm.lookup(tokens), entry], axis=1))
        others = {name: getattr(path.layers, name) for name in ("modulation", "q_bias")}
        changes = None if is_shared else path.layers
        scanned = (llm.layers, llm.adapter, changes, others, cache.layers(), known, own)
        x, (k, v) = scan_layers(block, x, scanned, in_place=llm.in_place)
    new = KVCache(k=k, v=v, positions=positions, used=jnp.int32(count))
    return JointPass(x[:, :count], x[:, count:], new)


def _attend(
    q: Float[Array, "B R N H"],
    k: Float[Array, "B K T H"],
    v: Float[Array, "B K T H"],
    places: tuple[Int[Array, "B T"], Int[Array, "B M"]],
    cache: KVCache,
    past: LayerCache,
    *,
    window: Int[Array, ""] | None,
    is_first: bool,
) -> Float[Array, "B R N H"]:
    """Attention of the LM's queries and the path's, at these `places`, to the cache and to the LM's new keys."""

    def part(q: Array, q_positions: Array) -> Array:
        others = [*past.others(q_positions, window), (k, v, causal_mask(q_positions, places[0], window))]
        seen: Any = {"q_positions": q_positions, "kv_positions": cache.positions}
        return attention(q, past.k, past.v, **seen, others=others, window=window)

    if not is_first:
        return part(q, jnp.concatenate(places, axis=1))
    # Alone, the queries of a prompt have the fastest kernel of each platform.
    of_llm, of_path = jnp.split(q, [k.shape[2]], axis=1)
    return _join(attention(of_llm, k, v, kv_positions=places[0], window=window), part(of_path, places[1]))


class _Kinds(NamedTuple):
    """The numbers of rows of each kind: the LM's rows come first.

    In decoding rows are not taken apart, since a TPU copies what begins at a row that no tile begins with.
    """

    llm: int
    path: int

    def pick(self, of_llm: Array | float, of_path: Array) -> Array:
        """Values for all rows: `of_path` has one for each, from `spread`, or one for all."""
        is_path = jnp.arange(self.llm + self.path) >= self.llm
        return jnp.where(is_path.reshape(-1, *[1] * (of_path.ndim - 2)), of_path, of_llm)

    def spread(self, of_path: Array) -> Array:
        """Values of the path's rows [B, M, ...] as values of all rows, with zeros for the LM's rows."""
        if of_path.shape[1] == 1:
            return of_path
        return jnp.pad(of_path, [(0, 0), (self.llm, 0), *[(0, 0)] * (of_path.ndim - 2)])

    def add_to_path(self, product: Array, update: Callable[[Array], Array], y: Array) -> Array:
        """Add an update of y to the path's rows."""
        if self.llm > 1:  # a prompt
            return product.at[:, self.llm :].add(update(y[:, self.llm :]))
        return product + self.pick(0.0, update(y))


class _Weights(NamedTuple):
    """The matrices of one layer, for the LM's rows and for the path's rows."""

    llm: Any
    updates: dict[str, Lora]  # updates of the LM's matrices
    llm_scale: float
    path: Any  # updates or replacements of the LM's matrices; unused if they are shared
    scale: float
    is_shared: bool  # whether the path uses the LM's matrices


def _product(weights: _Weights, kinds: _Kinds, y: Array, name: str, *, dims: int = 1) -> Array:
    weight: Any = getattr(weights.llm, name)
    update, change = weights.updates.get(name), getattr(weights.path, name, None)
    if weights.is_shared:
        return project(y, weight, update, scale=weights.llm_scale, dims=dims)
    if isinstance(change, Lora | RowLora):
        product = project(y, weight, dims=dims)
        of_path = partial(project_update, weight=weight, update=change, scale=weights.scale, dims=dims)
        product = kinds.add_to_path(product, of_path, y)
    else:
        assert change is not None
        product = _join(project(y[:, : kinds.llm], weight, dims=dims), project(y[:, kinds.llm :], change, dims=dims))
    if update is not None:
        of_llm = project_update(y[:, : kinds.llm], weight, update, scale=weights.llm_scale, dims=dims)
        product = product.at[:, : kinds.llm].add(of_llm)
    return product


def _join(of_llm: Array, of_path: Array) -> Array:
    return jnp.concatenate([of_llm, of_path], axis=1)
