"""Architecture: the fields that each kind of `config.json` gives, and what is refused."""

import math

import pytest

from l2d_jax.errors import InputError
from l2d_jax.model.architecture import SUPPORTED, Architecture
from l2d_jax.model.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling
from tests.support import tiny


def test_fields_of_llama() -> None:
    read = tiny.architecture("llama-scaled")
    assert read.options() == {  # none that was added later: fingerprints of earlier releases stay
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_scaling": {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        "tied": True,
        "qkv_bias": False,
    }


def test_qwen_has_biases() -> None:
    assert tiny.architecture("qwen").qkv_bias
    assert not tiny.architecture("llama").qkv_bias


def test_heads_follow_from_the_width_where_they_are_not_given() -> None:
    raw = {k: v for k, v in tiny.CONFIGS["llama"].items() if k not in ("head_dim", "num_key_value_heads")}
    assert Architecture.from_hf(raw).head_dim == 8
    assert Architecture.from_hf(raw).num_key_value_heads == 4
    assert Architecture.from_hf(raw | {"head_dim": None}).head_dim == 8


def test_rope_is_read_in_the_layouts_of_old_and_new_transformers() -> None:
    scaling = {
        "factor": 2.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 3.0,
        "original_max_position_embeddings": 32,
    }
    raw = {k: v for k, v in tiny.CONFIGS["llama"].items() if k != "rope_theta"}
    old = raw | {"rope_theta": 5e5, "rope_scaling": {"type": "llama3", **scaling}}
    new = raw | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaling}}
    assert Architecture.from_hf(old) == Architecture.from_hf(new)
    assert Architecture.from_hf(new).rope_theta == 5e5
    assert Architecture.from_hf(new).rope_scaling == Llama3Scaling(**scaling)
    plain = Architecture.from_hf(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM: supported are Llama.*: did you mean 'Gemma3F"),
        ({"architectures": None}, "unsupported architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu' or 'gelu_pytorch_tanh', got 'gelu': take another model"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        (
            {"use_sliding_window": True},
            "'use_sliding_window' True may change the mathematics, and is unknown for Llama",
        ),
        ({"sliding_window": 64}, "'sliding_window' 64 may change the mathematics, and is unknown for LlamaForCausalLM"),
        ({"attn_logit_softcapping": 30.0}, "'attn_logit_softcapping' 30.0 may change the mathematics"),
        ({"residual_multiplier": 0.5}, "'residual_multiplier' 0.5 may change the mathematics"),
        ({"rope_interleaved": True}, "'rope_interleaved' True may change"),
        ({"no_rope_layers": [1, 0]}, "may change the mathematics, and is unknown for LlamaForCausalLM: take another"),
        ({"vocab_size": None}, "vocab_size must be a valid integer, got None"),
        ({"hidden_size": 0}, "hidden_size must be greater than or equal to 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a valid integer, got True"),
        ({"intermediate_size": "48"}, "intermediate_size must be a valid integer, got '48'"),
        ({"num_attention_heads": 2**40}, "num_attention_heads must be less than 2147483648, got 1099511627776"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even and positive, got 7"),
        ({"head_dim": -8}, "head_dim must be greater than or equal to 1, got -8"),
        (
            {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
            "rope_type 'longrope' is not supported, only 'default', 'llama3', 'yarn', 'linear'",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "of type 'yarn' lacks factor"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1.0}}, "beta_slow must be below beta_fast"),
        ({"rope_scaling": {"factors": [2.0]}}, "unknown entry 'factors': did you mean 'factor'"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be greater than or equal to 1"),
        ({"rope_parameters": {"full_attention": {}}}, "unknown entry 'full_attention'"),
        ({"hidden_size": 3, "head_dim": None}, "head_dim must be even and positive, got 0"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be less than or equal to 10000"),
        ({"max_position_embeddings": "many"}, "max_position_embeddings must be a valid integer, got 'many'"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be less than 1, got nan"),
        ({"rope_theta": float("inf")}, "rope_scaling: rope_theta must be less than or equal to"),
        ({"rope_scaling": [8.0]}, "rope_scaling must be a valid dictionary"),
        (
            {"rope_scaling": tiny.CONFIGS["llama-scaled"]["rope_scaling"] | {"factor": "8"}},
            "factor must be a valid number",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "lacks low_freq_factor, high_freq_factor"),
    ],
)
def test_what_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        Architecture.from_hf(tiny.CONFIGS["llama"] | change)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3", {"attention_bias": True}, "attention_bias must be False"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"]}, "layer_types.* must be"),
        ("qwen3", {"layer_types": ["sliding_attention"] * 2}, "layers of sliding_attention, but no sliding_window, or"),
        ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        ("smollm3", {"no_rope_layers": [1, 0, 2]}, "no_rope_layers.* must be 0 or 1, got 2"),
        ("gemma3", {"final_logit_softcapping": 30.0}, "'final_logit_softcapping' 30.0 may change the mathematics"),
        ("gemma3", {"use_bidirectional_attention": True}, "'use_bidirectional_attention' True may change"),
        ("gemma3", {"hidden_activation": "gelu"}, "hidden_activation must be 'silu' or 'gelu_pytorch_tanh'"),
        ("gemma3", {"sliding_window": None}, "but no sliding_window"),
        ("gemma3", {"sliding_window_pattern": 0}, "sliding_window_pattern must be greater"),
        ("gemma3", {"rope_parameters": {"rope_theta": 5.0}}, "must have the sections full_attention, sliding_att"),
        ("gemma3", {"rope_parameters": {"full_attention": 5}}, "rope_scaling must be a dictionary, got 5"),
        (
            "gemma3",
            {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "sliding_attention must be of rope_type 'default'",
        ),
    ],
)
def test_what_is_refused_of_a_family(kind: str, change: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Architecture.from_hf(tiny.CONFIGS[kind] | change)
    assert "\n" not in str(caught.value)


def test_fields_of_the_families() -> None:
    """Those that are not as Llama's."""
    plain = tiny.architecture("llama").options().keys()
    found = {kind: tiny.architecture(kind).options() for kind in tiny.CONFIGS}
    own = {kind: {k: v for k, v in options.items() if k not in plain} for kind, options in found.items()}
    w = tiny.WINDOW
    assert own["qwen"] == own["llama-scaled"] == {}
    assert own["qwen-late-windows"] == {"windows": (0, w)}
    assert own["qwen3"] == own["qwen3-yarn"] == {"qk_norm": True}
    assert own["mistral"] == {"windows": (w, w)}
    assert own["smollm3"] == {"ropes": ("global", "none", "global")}
    assert own["smollm3-yarn"] == {"ropes": ("global", "none") * 2, "windows": (0, w) * 2}
    assert own["gemma3"] == {
        "qk_norm": True,
        "output_norms": True,
        "norm_offset": 1.0,
        "activation": "gelu_pytorch_tanh",
        "embedding_scale": 32**0.5,
        "query_scale": (16 / 24) ** 0.5,
        "windows": (w, 0, w),
        "ropes": ("local", "global", "local"),
        "local_rope_theta": 1e4,
    }
    assert tiny.architecture("gemma3").rope_scaling == LinearScaling(8.0)
    yarn = tiny.architecture("qwen3-yarn")
    assert yarn.rope_scaling == YarnScaling(4.0, 256, 0.1 * math.log(4.0) + 1)
    assert yarn.max_position_embeddings == 1024  # stretched


def test_where_a_config_is_silent() -> None:
    """The defaults of transformers; a window of null is none."""
    mistral = {k: v for k, v in tiny.CONFIGS["mistral"].items() if k != "sliding_window"}
    assert Architecture.from_hf(mistral).windows == (4096, 4096)
    assert Architecture.from_hf(mistral | {"sliding_window": None}).windows == ()
    family = SUPPORTED["Gemma3ForCausalLM"]
    gemma = {k: v for k, v in tiny.CONFIGS["gemma3"].items() if k not in {*family.reads, *family.defaults}}
    read = Architecture.from_hf(gemma | {"num_hidden_layers": 6})
    assert (read.head_dim, read.tied, read.rope_theta, read.local_rope_theta) == (256, True, 1e6, 1e4)
    assert (read.windows, read.query_scale) == ((4096,) * 5 + (0,), 1.0)
    qwen = tiny.CONFIGS["qwen3"] | {"sliding_window": 64, "max_window_layers": 1}
    assert Architecture.from_hf(qwen).windows == ()  # not in use
    assert Architecture.from_hf(qwen | {"use_sliding_window": True}).windows == (0, 64)
    harmless = {"attention_dropout": 0.1, "_attn_implementation": "eager", "use_mrope": False, "max_window_layers": 28}
    assert Architecture.from_hf(tiny.CONFIGS["llama"] | harmless) == tiny.architecture("llama")
