"""SmolLM3 3B on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`)."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 172,456,192 trainable parameters."""
    config = defaults()
    config.model.name = "HuggingFaceTB/SmolLM3-3B"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["SmolLM3ForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 5000000.0,
        "no_rope_layer_interval": 4,  # every fourth layer has no rotary embedding
        "tie_word_embeddings": True,
    }
    return config
