"""Qwen 2.5 7B Instruct on SmolTalk with the hyper-parameters of the paper (the defaults of `l2d_jax.config`)."""

from ml_collections import ConfigDict

from l2d_jax.config import defaults


def get_config() -> ConfigDict:
    """L2D with LoRA layers, rank 32: 233,008,384 trainable parameters."""
    config = defaults()
    config.model.name = "Qwen/Qwen2.5-7B-Instruct"
    config.model.architecture = {  # as in its config.json; lets --dry_run and compile work without the weights
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": 152064,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
    }
    return config


def v5e_2x2(config: ConfigDict) -> None:
    """Four chips of TPU v5e: 9.7 of 15.75 GiB (compiled, not run)."""
    config.train.accumulation = 8  # one sequence per chip at a time
    config.train.remat = "full"


def v5e_2x4(config: ConfigDict) -> None:
    """Eight chips of TPU v5e, where products need not be computed twice: 13.2 of 15.75 GiB (compiled, not run)."""
    config.train.accumulation = 4  # one sequence per chip at a time
    config.train.remat = "products"


def v5e_4x4(config: ConfigDict) -> None:
    """Sixteen chips of TPU v5e: 11.8 of 15.75 GiB (compiled, not run)."""
    config.train.accumulation = 2  # one sequence per chip at a time
    config.train.remat = "products"


def v5p_2x2x1(config: ConfigDict) -> None:
    """Four chips of TPU v5p: 35.1 of 95.74 GiB (compiled, not run)."""
    config.train.accumulation = 2  # four sequences per chip at a time
    config.train.remat = "products"


def v6e_1x1(config: ConfigDict) -> None:
    """One chip of TPU v6e: 22.0 of 31.25 GiB (compiled, not run)."""
    config.train.accumulation = 32  # one sequence at a time
    config.train.remat = "full"
