"""A random two-layer model on the built-in problems: the whole program in seconds, for tests and for looking around."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """Random weights and a tokenizer of bytes; nothing is downloaded."""
    config = defaults()
    config.model.name = "random"
    config.model.dtype = "float32"
    config.model.architecture = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
    }
    config.path.width = 16
    config.path.translation_width = 32
    config.path.frequency_width = 32
    config.path.condition_width = 32
    config.path.lora_rank = 4
    config.data.source = "problems"
    config.data.validation_split = "validation"
    config.data.train_examples = 64
    config.data.validation_examples = 8
    config.data.max_length = 512  # bytes
    config.data.answer_length = 256  # bytes
    config.optim.peak_rate = 1e-3
    config.optim.warmup_steps = 2
    config.train.batch_size = 4
    config.train.steps = 6
    config.train.checkpoint_every = 3
    config.train.log_every = 1
    config.validation.time_bins = 2
    config.validation.budgets = (1, 3)
    config.decode.budget = 3
    config.decode.max_new_tokens = 16
    return config
