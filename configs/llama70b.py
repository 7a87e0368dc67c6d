"""Llama 3.3 70B Instruct on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`).

R1-distilled Llama 70B (deepseek-ai/DeepSeek-R1-Distill-Llama-70B) has the same architecture.
"""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 1,389,401,344 trainable parameters."""
    config = defaults()
    config.model.name = "meta-llama/Llama-3.3-70B-Instruct"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    }
    return config
