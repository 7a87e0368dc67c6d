"""One pass over the weights for the LM and the path: a token for the LM, and diffusion tokens for the path.

The rows of both go through each layer together, so that a matrix that both use is read once. The LM's row is one
position after the newest known token, to which most of the path's rows belong. The path's last rows belong to the LM's
row: they see its keys, which the layer has just computed.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from l2d_jax.model import diffusion
from l2d_jax.model.attention import attention, causal_mask
from l2d_jax.model.diffusion_path import Conditions
from l2d_jax.model.gathering import gather_layer, gather_rows, residual, split_rows
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from l2d_jax.model.layer_scan import scan_layers
from l2d_jax.model.layers import Lora, activate, layer_options, project, project_update, rope
from l2d_jax.model.llm import bias


class DiffusionRows(NamedTuple):
    """Diffusion tokens at positions of known tokens, or at the position of the LM's row."""

    x: Float[Array, "B M C"]
    t: Float[Array, "B M"]
    positions: Int[Array, "B M"]
    inputs: Float[Array, "B M D"]  # the LM's embedding of the token at each position
    conditions: Conditions | None  # conditions of t; None: computed here


class JointPass(NamedTuple):
    """The results of a joint pass."""

    hidden: Float[Array, "B 1 D"]  # of the LM's row
    features: Float[Array, "B M D"]  # f_d of the diffusion tokens
    new: KVCache  # keys and values of the LM's row


def joint_pass(
    model: Model, tokens: Int[Array, "B 1"], positions: Int[Array, "B 1"], rows: DiffusionRows, cache: KVCache
) -> JointPass:
    """Read one token per sequence with the LM that reads the context, and evaluate the path in the same pass.

    The model comes from `Model.reading`. `model.llm` and `model.path` compute the same in two passes.
    """
    llm, path = model.llm, model.path if model.updating is None else model.updating
    assert path is not None
    is_shared, dtype = path.config.reader != "lm", llm.dtype
    shared, own = layer_options(llm.architecture)
    places = jnp.concatenate([positions, rows.positions], axis=1)
    gather = partial(gather_layer, dtype=dtype, products=llm.product_dtype)
    scale, llm_scale = path.config.lora_alpha / path.config.lora_rank, 1.0 if llm.adapter is None else llm.adapter.scale
    known, which = (None, None) if rows.conditions is None else (rows.conditions.modulation, rows.conditions.which)

    def block(x: Array, scanned: tuple[Any, ...]) -> tuple[Array, tuple[Array, Array]]:
        layers, adapter, changes, others, past, modulation, options = scanned
        w, changes, others, options = gather(layers), gather(changes), gather(others), options.over(shared)
        updates = {} if adapter is None else gather(adapter).updates()
        norms = w.attention_norm, w.mlp_norm
        if modulation is None:
            modulation = jnp.stack(
                path.modulate(path.condition(rows.t).astype(dtype), others["modulation"], *norms), axis=-2
            )
        elif which is not None:
            modulation = modulation[which]
        norm_1, shift_1, gate_1, norm_2, shift_2, gate_2 = jnp.moveaxis(modulation, -2, 0)

        def normalize(x: Array, weight: Array, own: Array, shift: Array) -> Array:
            return _join(llm.normalize(x[:, :1], weight), llm.normalize(x[:, 1:], own) + shift)

        def add(x: Array, y: Array, gate: Array, norm: Array | None) -> Array:
            y = llm.normalize(split_rows(y), norm)
            return x + _join(y[:, :1], gate * y[:, 1:])

        product = partial(_product, _Weights(w, updates, llm_scale, changes, scale, is_shared=is_shared))
        with jax.named_scope("attention"):
            y = gather_rows(normalize(x, w.attention_norm, norm_1, shift_1), "attention_embed")
            q, of_path = product(y, "q"), w.q_bias if others["q_bias"] is None else others["q_bias"]
            q = _join(q[:, :1] + bias(w.q_bias, y), q[:, 1:] + bias(of_path, y))
            k, v = (project(y[:, :1], getattr(w, n), updates.get(n), scale=llm_scale) for n in "kv")
            k, v = k + bias(w.k_bias, y), v + bias(w.v_bias, y)
            q = llm.normalize(split_rows(q, "heads", "head_dim"), w.q_norm)
            k = llm.normalize(split_rows(k, "kv_heads", "head_dim"), w.k_norm)
            q = rope(q, places, options.frequencies, options.query_scale)
            k, v = rope(k, positions, options.frequencies), split_rows(v, "kv_heads", "head_dim")
            window = options.window
            beside = [*past.others(places, window), (k, v, causal_mask(places, positions, window))]
            seen: Any = {"q_positions": places, "kv_positions": cache.positions}
            y = attention(q, past.k, past.v, **seen, others=beside, window=window)
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
    new = KVCache(k=k, v=v, positions=positions, used=jnp.int32(1))
    return JointPass(x[:, :1], x[:, 1:], new)


class _Weights(NamedTuple):
    """The matrices of one layer, for the LM's row and for the path's rows."""

    llm: Any
    updates: dict[str, Lora]  # updates of the LM's matrices
    llm_scale: float
    path: Any  # updates or replacements of the LM's matrices; unused if they are shared
    scale: float
    is_shared: bool  # whether the path uses the LM's matrices


def _product(weights: _Weights, y: Array, name: str, *, dims: int = 1) -> Array:
    weight: Any = getattr(weights.llm, name)
    update, change = weights.updates.get(name), getattr(weights.path, name, None)
    if weights.is_shared:
        return project(y, weight, update, scale=weights.llm_scale, dims=dims)
    of_llm, of_path = y[:, :1], y[:, 1:]
    if isinstance(change, Lora):
        both = project(y, weight, dims=dims)
        first, others = (
            both[:, :1],
            both[:, 1:] + project_update(of_path, weight, change, scale=weights.scale, dims=dims),
        )
    else:
        assert change is not None
        first, others = project(of_llm, weight, dims=dims), project(of_path, change, dims=dims)
    if update is not None:
        first += project_update(of_llm, weight, update, scale=weights.llm_scale, dims=dims)
    return _join(first, others)


def _join(of_llm: Array, of_path: Array) -> Array:
    return jnp.concatenate([of_llm, of_path], axis=1)
