"""SmolLM2 135M Instruct on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`)."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 37,620,864 trainable parameters."""
    config = defaults()
    config.model.name = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "tie_word_embeddings": True,
    }
    return config


def dense(config: ConfigDict) -> None:
    """The path with full copies of the LM's layers instead of LoRA ("full f_d")."""
    config.path.layers = "dense"
