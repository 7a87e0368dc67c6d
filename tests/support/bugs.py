"""Bugs that such programs have, and features left out, each of which a comparison of logits has to find."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from l2d_jax.model import layers
from l2d_jax.model import llm as llm_module
from l2d_jax.model.llm import LLM


def _architecture(llm: LLM, **changes: Any) -> LLM:
    return dataclasses.replace(llm, architecture=dataclasses.replace(llm.architecture, **changes))


def _layers(llm: LLM, **changes: Any) -> LLM:
    return dataclasses.replace(llm, layers=dataclasses.replace(llm.layers, **changes))


def no_bias(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _layers(llm, **{name: jnp.zeros_like(getattr(llm.layers, name)) for name in ("q_bias", "k_bias", "v_bias")})


def tiled_instead_of_repeated_heads(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right, repeats = llm_module.attention, llm.architecture.num_attention_heads // llm.architecture.num_key_value_heads

    def wrong(q: Any, k: Any, v: Any, **positions: Any) -> Any:
        return right(q, jnp.tile(k, (1, repeats, 1, 1)), jnp.tile(v, (1, repeats, 1, 1)), **positions)

    patch.setattr(llm_module, "attention", wrong)
    return llm


def wrong_rope_theta(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, rope_theta=500000.0)


def interleaved_rope(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right = layers.rope

    def wrong(x: Any, positions: Any, frequencies: Any, scale: Any = None) -> Any:
        pairs = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        first, second = jnp.split(right(pairs, positions, frequencies), 2, axis=-1)
        return jnp.stack([first, second], axis=-1).reshape(x.shape)

    patch.setattr(llm_module, "rope", wrong)
    return llm


def bfloat16_angles(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    def wrong(x: Any, positions: Any, frequencies: Any, scale: Any = None) -> Any:
        angle = positions[..., None, None].astype(jnp.bfloat16) * frequencies.astype(jnp.bfloat16)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    patch.setattr(llm_module, "rope", wrong)
    return llm


def wrong_epsilon(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, rms_norm_eps=1e-6)


def no_rope_scaling(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, rope_scaling=None)


def gelu_instead_of_silu(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    patch.setattr(jax.nn, "silu", jax.nn.gelu)
    return llm


def no_final_norm(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    patch.setattr(LLM, "logits", lambda self, hidden: jnp.einsum("btd,vd->btv", hidden, self.head))
    return llm


def norm_weight_plus_one(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right = layers.rms_norm
    patch.setattr(
        llm_module, "rms_norm", lambda x, weight, *rest: right(x, weight if weight is None else 1 + weight, *rest)
    )
    return llm


def mask_off_by_one(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right = llm_module.attention

    def wrong(q: Any, k: Any, v: Any, *, kv_positions: Any, **others: Any) -> Any:
        return right(q, k, v, **{**others, "q_positions": kv_positions + 1}, kv_positions=kv_positions)

    patch.setattr(llm_module, "attention", wrong)
    return llm


def no_attention_scale(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right, factor = llm_module.attention, llm.architecture.head_dim**0.5
    patch.setattr(llm_module, "attention", lambda q, k, v, **positions: right(q * factor, k, v, **positions))
    return llm


# --- what the families have beyond Llama, left out ---


def no_head_norms(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _layers(llm, q_norm=None, k_norm=None)


def head_norms_after_rope(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right, norms = layers.rope, iter((llm.layers.q_norm[0], llm.layers.k_norm[0]) * 2)

    def wrong(x: Any, *rest: Any) -> Any:
        return layers.rms_norm(right(x, *rest), next(norms), llm.architecture.rms_norm_eps)

    patch.setattr(llm_module, "rope", wrong)
    return _layers(llm, q_norm=None, k_norm=None)


def no_windows(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, windows=())


def windows_off_by_one(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, windows=tuple(w + (w > 0) for w in llm.architecture.windows))


def windows_in_all_layers(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, windows=(max(llm.architecture.windows),) * llm.architecture.num_hidden_layers)


def rope_of_one_kind(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, ropes=())


def no_sharper_attention(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    scaling = llm.architecture.rope_scaling
    return _architecture(llm, rope_scaling=dataclasses.replace(scaling, attention_factor=1.0))


def sharper_without_rope(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    factor = llm.architecture.rope_scaling.attention_factor
    return _architecture(no_sharper_attention(llm, patch), query_scale=factor**2)


def no_norm_offset(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, norm_offset=0.0)


def no_norm_of_what_attention_adds(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _layers(llm, post_attention_norm=None)


def no_norm_of_what_the_mlp_adds(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _layers(llm, post_mlp_norm=None)


def silu_instead_of_gelu(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, activation="silu")


def no_embedding_scale(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, embedding_scale=1.0)


def no_query_scale(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, query_scale=1.0)


def local_base_of_the_global_one(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, local_rope_theta=llm.architecture.rope_theta)


BUGS = [
    (no_bias, "qwen"),
    (tiled_instead_of_repeated_heads, "llama"),
    (wrong_rope_theta, "llama"),
    (interleaved_rope, "llama"),
    (bfloat16_angles, "llama"),
    (wrong_epsilon, "llama"),
    (no_rope_scaling, "llama-scaled"),
    (gelu_instead_of_silu, "llama"),
    (no_final_norm, "llama"),
    (norm_weight_plus_one, "llama"),
    (mask_off_by_one, "llama"),
    (no_attention_scale, "llama"),
    (no_head_norms, "qwen3"),
    (no_head_norms, "gemma3"),
    (head_norms_after_rope, "qwen3"),
    (no_windows, "mistral"),
    (no_windows, "qwen-late-windows"),
    (no_windows, "smollm3-yarn"),
    (no_windows, "gemma3"),
    (windows_off_by_one, "mistral"),
    (windows_off_by_one, "gemma3"),
    (windows_in_all_layers, "qwen-late-windows"),
    (windows_in_all_layers, "gemma3"),
    (rope_of_one_kind, "smollm3"),
    (rope_of_one_kind, "gemma3"),
    (no_rope_scaling, "qwen3-yarn"),
    (no_rope_scaling, "gemma3"),
    (no_sharper_attention, "qwen3-yarn"),
    (no_sharper_attention, "smollm3-yarn"),
    (sharper_without_rope, "smollm3-yarn"),
    (no_norm_offset, "gemma3"),
    (no_norm_of_what_attention_adds, "gemma3"),
    (no_norm_of_what_the_mlp_adds, "gemma3"),
    (silu_instead_of_gelu, "gemma3"),
    (no_embedding_scale, "gemma3"),
    (no_query_scale, "gemma3"),
    (local_base_of_the_global_one, "gemma3"),
]
