"""The shape of a language model, read from a Hugging Face `config.json`.

All models share one backbone and differ in the values of a few fields. `SUPPORTED` says, for each class of
transformers, what it fixes and which extra fields it reads. A field that the class does not read is refused if it might
change the mathematics.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

from annotated_types import Interval
from typing_extensions import TypedDict

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError, require, shorten, shown
from l2d_jax.files import Count, Positive, check, package_table
from l2d_jax.model.rope_scaling import RopeScaling, Theta, YarnScaling, read_rope

REMEDY = "take another model, or download it again"
Fields: TypeAlias = Mapping[str, Any]  # of config.json
Activation: TypeAlias = Literal["silu", "gelu_pytorch_tanh"]


@dataclass(frozen=True)
class Family:
    """Facts about a model class of transformers."""

    model_type: str
    reads: Sequence[str] = ()  # the entries of `_OwnConfig` that it reads
    defaults: Fields = field(default_factory=dict)  # defaults that differ from those of other classes
    qkv_bias: bool = False
    qk_norm: bool = False
    output_norms: bool = False
    norm_offset: float = 0.0
    scales_embedding: bool = False


SUPPORTED = {name: Family(**facts) for name, facts in package_table("model/families.toml").items()}


class _HFConfig(TypedDict):
    """The entries of `config.json` that all classes read; null means the default, as in transformers."""

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
    hidden_act: NotRequired[Activation | None]
    attention_bias: NotRequired[Literal[False] | None]
    mlp_bias: NotRequired[Literal[False] | None]
    rope_theta: NotRequired[float | None]
    rope_scaling: NotRequired[dict[str, Any] | None]
    rope_parameters: NotRequired[dict[str, Any] | None]


class _OwnConfig(TypedDict, total=False):
    """The entries that a class reads only if its `Family` says so."""

    use_sliding_window: bool | None
    sliding_window: Count | None  # null: no window
    max_window_layers: Annotated[int, Interval(ge=0)] | None
    sliding_window_pattern: Count | None
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None
    no_rope_layers: list[Literal[0, 1]] | None
    no_rope_layer_interval: Count | None
    hidden_activation: Activation | None
    query_pre_attn_scalar: Positive | None
    rope_local_base_freq: Theta | None


# Names of fields that may change the mathematics; harmless exceptions (training, kernels); values that change nothing.
_SUSPECT = re.compile("soft_?cap|multiplier|scal|norm|rope|rotary|window|layer_types|attention|attn|bias|expert|activ")
_HARMLESS = re.compile("^_|dropout|implementation|^max_window_layers$")
_NEUTRAL: tuple[Any, ...] = (None, False, [], {})


@dataclass(frozen=True)
class Architecture:
    """Sizes and constants of the backbone, mostly under the names of `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int  # with YaRN, the stretched length
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied: bool
    qkv_bias: bool
    qk_norm: bool = False  # norms of each head's queries and keys, before rotary embedding
    output_norms: bool = False  # norms of the outputs of attention and MLP
    norm_offset: float = 0.0  # added to the weights of all norms
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    query_scale: float = 1.0  # in addition to head_dim ** -0.5
    windows: tuple[int, ...] = ()  # per layer: number of latest keys that a query sees, 0: all; empty: no windows
    ropes: tuple[Literal["global", "local", "none"], ...] = ()  # per layer; empty: all global
    local_rope_theta: float = 0.0  # for local layers, whose angles are not scaled

    @classmethod
    def from_hf(cls, raw: Fields, *, where: object = "config.json") -> "Architecture":
        """Read a parsed `config.json`; raises `InputError` for what is unsupported, missing or out of range."""
        names = raw.get("architectures")
        name = names[0] if isinstance(names, list) and names else None
        if not isinstance(name, str) or name not in SUPPORTED:
            given = shorten(str("none" if names is None else name or names), 60)
            hint = nearest(given, SUPPORTED)
            known = ", ".join(SUPPORTED) + (hint if "did you mean" in hint else "")
            raise InputError(f"{where}: unsupported architecture {given}: supported are {known}")
        family = SUPPORTED[name]
        own = {key: value for key, value in raw.items() if key in family.reads}
        checked = check(dict(raw), _HFConfig, where, remedy=REMEDY) | check(own, _OwnConfig, where, remedy=REMEDY)
        for key, value in raw.items():
            if key not in checked and _SUSPECT.search(key) and not _HARMLESS.search(key) and value not in _NEUTRAL:
                problem = f"{where}: {shown(key)} {shown(value)} may change the mathematics, and is unknown for {name}"
                raise InputError(f"{problem}: {REMEDY}")
        found = {**family.defaults, **{key: value for key, value in checked.items() if value is not None}}
        if not found.get("use_sliding_window", True) or checked.get("sliding_window", 0) is None:
            found.pop("sliding_window", None)
        heads, kv_heads = found["num_attention_heads"], found.get("num_key_value_heads", found["num_attention_heads"])
        rule = f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}"
        require(heads % kv_heads == 0, f"{where}: {rule}")
        head_dim = found.get("head_dim", found["hidden_size"] // heads)
        rule = f"head_dim must be even and positive, got {head_dim}: rotary embedding turns pairs"
        require(head_dim > 0 and head_dim % 2 == 0, f"{where}: {rule}")
        values = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False} | found
        values |= {"num_key_value_heads": kv_heads, "head_dim": head_dim, "tied": values["tie_word_embeddings"]}
        values |= {name: value for name, value in vars(family).items() if name in cls.__dataclass_fields__}
        values |= _read_ropes(found, values["max_position_embeddings"], where) | _read_layers(found, where)
        if isinstance(scaling := values["rope_scaling"], YarnScaling):
            stretched = int(scaling.factor * scaling.original_max_position_embeddings)
            values["max_position_embeddings"] = max(values["max_position_embeddings"], stretched)
        values["activation"] = found.get("hidden_activation", found.get("hidden_act", "silu"))
        values["embedding_scale"] = found["hidden_size"] ** 0.5 if family.scales_embedding else 1.0
        values["query_scale"] = (head_dim / found.get("query_pre_attn_scalar", head_dim)) ** 0.5
        return cls(**{name: values[name] for name in cls.__dataclass_fields__})

    def options(self) -> dict[str, Any]:
        """The fields by name, without options at their defaults, which earlier releases of this project lack."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}


def _read_ropes(found: Fields, limit: int, where: object) -> dict[str, Any]:
    """Read the fields of rotary embeddings, which transformers 5 writes under rope_parameters and earlier ones do not.

    For a class with local layers, rope_parameters has a section for each kind of layer.
    """
    theta, sections, local = found.get("rope_theta", 10000.0), found.get("rope_parameters", {}), 0.0
    if "rope_local_base_freq" in found:
        known = {"full_attention", "sliding_attention"}
        require(sections.keys() <= known, f"{where}: rope_parameters must have the sections {', '.join(sorted(known))}")
        given = sections.get("sliding_attention") or {}
        local, scaling = read_rope(found["rope_local_base_freq"], given, limit=limit, where=where)
        require(scaling is None, f"{where}: rope_parameters of sliding_attention must be of rope_type 'default'")
        sections = sections.get("full_attention") or {}
    theta, scaling = read_rope(theta, found.get("rope_scaling", {}), sections, limit=limit, where=where)
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _read_layers(found: Fields, where: object) -> dict[str, Any]:
    """Read the fields that have an entry for each layer."""
    count, is_windowed = found["num_hidden_layers"], "sliding_window" in found
    interval = found.get("no_rope_layer_interval", count + 1)
    has_rope = found.get("no_rope_layers") or [int((layer + 1) % interval > 0) for layer in range(count)]
    sliding = [is_windowed] * count  # unless entries say which layers
    if "no_rope_layer_interval" in found:
        sliding = [is_windowed and not has for has in has_rope]
    elif "sliding_window_pattern" in found:
        sliding = [(layer + 1) % found["sliding_window_pattern"] > 0 for layer in range(count)]
    elif "max_window_layers" in found:
        sliding = [is_windowed and layer >= found["max_window_layers"] for layer in range(count)]
    if types := found.get("layer_types"):
        sliding = [kind == "sliding_attention" for kind in types]
    for name, entries in (("no_rope_layers", has_rope), ("layer_types", sliding)):
        require(len(entries) == count, f"{where}: {name} has {len(entries)} entries for {count} layers: {REMEDY}")
    problem = f"{where}: layers of sliding_attention, but no sliding_window, or use_sliding_window is False"
    require(not any(sliding) or is_windowed, f"{problem}: {REMEDY}")
    near = "local" if "rope_local_base_freq" in found else "global"
    kinds = zip(has_rope, sliding, strict=True)
    ropes = tuple("none" if not has else near if is_near else "global" for has, is_near in kinds)
    windows = tuple(found["sliding_window"] if is_near else 0 for is_near in sliding)
    return {"windows": windows if any(sliding) else (), "ropes": ropes if set(ropes) != {"global"} else ()}
