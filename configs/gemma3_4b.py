"""Gemma 3 4B Instruct on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`).

The published folder, google/gemma-3-4b-it, holds a model of images and text, which is not read. Write its text model
with transformers: `both = Gemma3ForConditionalGeneration.from_pretrained(...)`, `text =
Gemma3ForCausalLM(both.config.text_config)`, `text.model = both.model.language_model`, `text.tie_weights()`,
`text.save_pretrained("gemma-3-4b-it-text")`, and its tokenizer next to it.
"""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 190,493,440 trainable parameters."""
    config = defaults()
    config.model.name = "gemma-3-4b-it-text"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262208,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "query_pre_attn_scalar": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 1024,
        "sliding_window_pattern": 6,  # every sixth layer sees all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "tie_word_embeddings": True,
    }
    return config
