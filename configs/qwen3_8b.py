"""Qwen 3 8B on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`)."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 308,660,480 trainable parameters."""
    config = defaults()
    config.model.name = "Qwen/Qwen3-8B"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["Qwen3ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    }
    return config
