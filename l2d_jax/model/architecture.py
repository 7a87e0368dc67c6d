"""The shape of a language model, read from the `config.json` of Hugging Face.

Llama 3.x, Qwen 2/2.5, SmolLM2 and R1-distilled Qwen are one backbone; they differ in the values of these fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from l2d_jax.errors import InputError

SUPPORTED = {"LlamaForCausalLM": False, "Qwen2ForCausalLM": True}  # class name -> biases on q, k and v


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary angles to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of the backbone, under the names of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> "Architecture":
        """Read a parsed `config.json`; raises `InputError` that names what is unsupported or missing."""
        name = (raw.get("architectures") or ["none"])[0]
        if name not in SUPPORTED:
            raise InputError(f"unsupported architecture {name}: supported are {', '.join(SUPPORTED)}")
        _refuse(raw, "hidden_act", "silu")
        _refuse(raw, "attention_bias", False)
        _refuse(raw, "mlp_bias", False)
        _refuse(raw, "use_sliding_window", False)
        sizes = {}
        for key in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        ):
            sizes[key] = _size(raw, key)
        kv_heads = _size({"num_key_value_heads": sizes["num_attention_heads"], **raw}, "num_key_value_heads")
        if sizes["num_attention_heads"] % kv_heads:
            raise InputError(
                f"config.json: num_attention_heads {sizes['num_attention_heads']} is not a multiple of "
                f"num_key_value_heads {kv_heads}"
            )
        width = sizes["hidden_size"] // sizes["num_attention_heads"]
        head_dim = width if raw.get("head_dim") is None else _size(raw, "head_dim")
        if head_dim % 2:
            raise InputError(f"config.json: head_dim must be even, got {head_dim}: rotary embedding turns pairs")
        # transformers 5 writes both under rope_parameters; earlier releases wrote two keys.
        rope = {"rope_theta": raw.get("rope_theta", 10000.0), **(raw.get("rope_scaling") or {})}
        rope |= raw.get("rope_parameters") or {}
        return cls(
            **sizes,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_theta=float(rope["rope_theta"]),
            rope_scaling=_rope_scaling(rope),
            tied=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=SUPPORTED[name],
        )


def _size(raw: Mapping[str, Any], key: str) -> int:
    value = raw.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 2**31:
        raise InputError(f"config.json: {key} must be a positive integer, got {value!r}")
    return value


def _refuse(raw: Mapping[str, Any], key: str, supported: Any) -> None:
    value = raw.get(key, supported)
    if value is not None and value != supported:
        raise InputError(f"config.json: {key} = {value!r} is not supported, only {supported!r}")


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"config.json: rope_type {kind!r} is not supported, only 'default' and 'llama3'")
    fields = RopeScaling.__dataclass_fields__
    missing = [key for key in fields if key not in rope]
    if missing:
        raise InputError(f"config.json: rope_scaling of type 'llama3' lacks {', '.join(missing)}")
    return RopeScaling(**{key: rope[key] for key in fields})
