"""Twelve bugs that such programs have, each of which a comparison of logits has to find."""

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
        return right(q, jnp.tile(k, (1, 1, repeats, 1)), jnp.tile(v, (1, 1, repeats, 1)), **positions)

    patch.setattr(llm_module, "attention", wrong)
    return llm


def wrong_rope_theta(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    return _architecture(llm, rope_theta=500000.0)


def interleaved_rope(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    right = layers.rope

    def wrong(x: Any, positions: Any, frequencies: Any) -> Any:
        pairs = jnp.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
        first, second = jnp.split(right(pairs, positions, frequencies), 2, axis=-1)
        return jnp.stack([first, second], axis=-1).reshape(x.shape)

    patch.setattr(llm_module, "rope", wrong)
    return llm


def bfloat16_angles(llm: LLM, patch: pytest.MonkeyPatch) -> LLM:
    def wrong(x: Any, positions: Any, frequencies: Any) -> Any:
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
    patch.setattr(llm_module, "rms_norm", lambda x, weight, epsilon: right(x, 1 + weight, epsilon))
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


BUGS = {
    no_bias: "qwen",
    tiled_instead_of_repeated_heads: "llama",
    wrong_rope_theta: "llama",
    interleaved_rope: "llama",
    bfloat16_angles: "llama",
    wrong_epsilon: "llama",
    no_rope_scaling: "llama-scaled",
    gelu_instead_of_silu: "llama",
    no_final_norm: "llama",
    norm_weight_plus_one: "llama",
    mask_off_by_one: "llama",
    no_attention_scale: "llama",
}
