"""Architecture: the fields that each kind of `config.json` gives, and what is refused."""

import dataclasses

import pytest

from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture, RopeScaling
from tests.support import tiny


def test_fields_of_llama() -> None:
    read = tiny.architecture("llama-scaled")
    assert dataclasses.asdict(read) == {
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
    assert Architecture.from_hf(new).rope_scaling == RopeScaling(**scaling)
    plain = Architecture.from_hf(raw | {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}})
    assert (plain.rope_theta, plain.rope_scaling) == (7.0, None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "unsupported architecture GemmaForCausalLM: supported are Llama"),
        ({"architectures": None}, "unsupported architecture none"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu': take another model"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ({"vocab_size": None}, "vocab_size must be a valid integer, got None"),
        ({"hidden_size": 0}, "hidden_size must be greater than or equal to 1, got 0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a valid integer, got True"),
        ({"intermediate_size": "48"}, "intermediate_size must be a valid integer, got '48'"),
        ({"num_attention_heads": 2**40}, "num_attention_heads must be less than 2147483648, got 1099511627776"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 7}, "head_dim must be even and positive, got 7"),
        ({"head_dim": -8}, "head_dim must be greater than or equal to 1, got -8"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "rope_type 'yarn' is not supported"),
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
