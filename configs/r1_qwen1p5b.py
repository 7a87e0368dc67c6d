"""DeepSeek R1 distilled into Qwen 2.5 Math 1.5B, with the paper's values (the defaults of `l2d_jax.config`).

Its prompt opens a thought, so answers need thoughts, and rows keep theirs. SmolTalk, the default source, has none: for
such rows take the variant `empty_thoughts`.
"""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 103,324,928 trainable parameters."""
    config = defaults()
    config.model.name = "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 151936,
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return config


def empty_thoughts(config: ConfigDict) -> None:
    """Rows without thoughts, such as SmolTalk's: the thought that the prompt opens is closed before the answer."""
    config.data.empty_thoughts = True
