"""The shape of a language model, read from the `config.json` of Hugging Face.

Llama 3.x, Qwen 2/2.5, SmolLM2 and R1-distilled Qwen are one backbone; they differ in the values of these fields.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NotRequired

from annotated_types import Interval
from typing_extensions import TypedDict

from l2d_jax.errors import InputError, shorten, shown
from l2d_jax.files import Count, check

SUPPORTED = {"LlamaForCausalLM": False, "Qwen2ForCausalLM": True}  # class name -> biases on q, k and v


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretching of rotary angles to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


Factor = Annotated[float, Interval(gt=0, le=1e6)]


class _Rope(TypedDict, total=False):
    """The entries for rotary embedding, wherever a release of transformers puts them."""

    rope_theta: Annotated[float, Interval(gt=1, le=1e12)]
    rope_type: str
    type: str  # the former name of `rope_type`
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Count


class _HFConfig(TypedDict):
    """The entries of `config.json` that are read; null stands for the default, as in transformers."""

    vocab_size: Count
    hidden_size: Count
    intermediate_size: Count
    num_hidden_layers: Annotated[int, Interval(ge=1, le=10_000)]
    num_attention_heads: Count
    num_key_value_heads: NotRequired[Count | None]
    head_dim: NotRequired[Count | None]
    max_position_embeddings: NotRequired[Count | None]
    rms_norm_eps: NotRequired[Annotated[float, Interval(gt=0, lt=1)] | None]
    tie_word_embeddings: NotRequired[bool | None]
    hidden_act: NotRequired[Literal["silu"] | None]
    attention_bias: NotRequired[Literal[False] | None]
    mlp_bias: NotRequired[Literal[False] | None]
    use_sliding_window: NotRequired[Literal[False] | None]
    rope_theta: NotRequired[float | None]
    rope_scaling: NotRequired[dict[str, Any] | None]
    rope_parameters: NotRequired[dict[str, Any] | None]


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
    def from_hf(cls, raw: Mapping[str, Any], *, where: object = "config.json") -> "Architecture":
        """Read a parsed `config.json`; raises `InputError` that names what is unsupported, missing or out of range."""
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in SUPPORTED:
            given = shorten(str("none" if names is None else name or names), 60)
            raise InputError(f"{where}: unsupported architecture {given}: supported are {', '.join(SUPPORTED)}")
        remedy = "take another model, or download it again"
        checked = check(dict(raw), _HFConfig, where, remedy=remedy)
        found = {key: value for key, value in checked.items() if value is not None}
        heads, kv_heads = found["num_attention_heads"], found.get("num_key_value_heads", found["num_attention_heads"])
        if heads % kv_heads:
            raise InputError(
                f"{where}: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
            )
        head_dim = found.get("head_dim", found["hidden_size"] // heads)
        if head_dim % 2 or not head_dim:
            raise InputError(
                f"{where}: head_dim must be even and positive, got {head_dim}: rotary embedding turns pairs"
            )
        # transformers 5 writes both under rope_parameters; earlier releases wrote two keys.
        rope = {"rope_theta": found.get("rope_theta", 10000.0)} | found.get("rope_scaling", {})
        rope = check(rope | found.get("rope_parameters", {}), _Rope, f"{where}: rope_scaling")
        values = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6} | found
        values |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "qkv_bias": SUPPORTED[name]}
        values |= {"rope_theta": rope["rope_theta"], "rope_scaling": _rope_scaling(rope, where)}
        values["tied"] = found.get("tie_word_embeddings", False)
        return cls(**{field: values[field] for field in cls.__dataclass_fields__})


def _rope_scaling(rope: Mapping[str, Any], where: object) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise InputError(f"{where}: rope_type {shown(kind)} is not supported, only 'default' and 'llama3'")
    fields = RopeScaling.__dataclass_fields__
    missing = [key for key in fields if key not in rope]
    if missing:
        raise InputError(f"{where}: rope_scaling of type 'llama3' lacks {', '.join(missing)}")
    if rope["low_freq_factor"] >= rope["high_freq_factor"]:
        raise InputError(f"{where}: rope_scaling.low_freq_factor must be below high_freq_factor: download it again")
    return RopeScaling(**{key: rope[key] for key in fields})
