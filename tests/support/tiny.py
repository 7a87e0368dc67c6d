"""Tiny models of every kind, of which every parameter is random: zeros and ones hide what a program leaves out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import Config, LoraConfig, ModelConfig, PathConfig, TrainConfig
from l2d_jax.data.batch import Batch
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.model.lora import LLMAdapter
from l2d_jax.training.methods import method_of
from l2d_jax.training.step import Objective

WINDOW = 5  # tokens: shorter than the rows of the tests

_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
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
    "tie_word_embeddings": False,
}
_QWEN = {
    **_LLAMA,
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rope_theta": 1e6,
    "rms_norm_eps": 1e-6,
}
_SMOLLM3 = {
    **_LLAMA,
    "architectures": ["SmolLM3ForCausalLM"],
    "model_type": "smollm3",
    **dict.fromkeys(
        ("bos_token_id", "eos_token_id", "pad_token_id")
    ),  # those of transformers are not in the vocabulary
}
_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

# The keys of `config.json` of each kind.
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "llama-tied": {**_LLAMA, "tie_word_embeddings": True},
    "llama-scaled": {**_LLAMA, "tie_word_embeddings": True, "rope_scaling": _SCALING},
    "llama-wide-heads": {**_LLAMA, "head_dim": 16},  # not hidden_size / num_attention_heads
    "qwen": _QWEN,
    "qwen-tied": {**_QWEN, "tie_word_embeddings": True},
    "qwen-late-windows": {**_QWEN, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    "qwen3": {**_LLAMA, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "qwen3-yarn": {
        **_LLAMA,
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "max_position_embeddings": 256,
        "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
    },
    "mistral": {
        **_LLAMA,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 16,
        "sliding_window": WINDOW,
    },
    "smollm3": {
        **_SMOLLM3,
        "num_hidden_layers": 3,
        "tie_word_embeddings": True,
        "no_rope_layers": [1, 0, 1],
    },
    "smollm3-yarn": {  # of which layers without rope have no part; these have the windows
        **_SMOLLM3,
        "num_hidden_layers": 4,
        "use_sliding_window": True,
        "sliding_window": WINDOW,
        "no_rope_layer_interval": 2,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128},
    },
    "gemma3": {
        **_LLAMA,
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "num_hidden_layers": 3,
        "head_dim": 16,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
        "tie_word_embeddings": True,
    },
}


def architecture(kind: str) -> Architecture:
    return Architecture.from_hf(CONFIGS[kind])


def path_config(**changes: Any) -> PathConfig:
    """Small widths that all differ, so that no two can be exchanged unnoticed."""
    sizes = {"width": 16, "translation_width": 20, "frequency_width": 12, "condition_width": 24}
    return PathConfig(**{**sizes, "lora_rank": 4, "lora_alpha": 6.0, **changes})


def scale(name: str) -> tuple[float, float]:
    """Mean and standard deviation of a parameter, of the size that trained models have where it matters.

    Embeddings are so small that the epsilon of the first norm shows, norms are about one, and so are logits.
    """
    if "norm" in name:
        return 1.0, 0.3
    if "embed" in name:
        return 0.0, 0.06
    return (0.0, 0.12) if "head" in name else (0.0, 0.3)


def randomise(declared: Any, *, seed: int = 0) -> Any:
    """A tree of arrays in place of a tree of declarations (or of arrays)."""
    rng = np.random.default_rng(seed)

    def values(path: Any, leaf: Any) -> jax.Array:
        mean, deviation = scale(jax.tree_util.keystr(path))
        return jnp.asarray(rng.normal(mean, deviation, leaf.shape).astype(leaf.dtype))

    return jax.tree_util.tree_map_with_path(values, declared)


def llm(kind: str = "llama", *, dtype: Any = jnp.float32, seed: int = 0) -> LLM:
    return randomise(LLM.declare(architecture(kind), dtype=dtype), seed=seed)


def path(kind: str = "llama", *, seed: int = 1, **changes: Any) -> DiffusionPath:
    """A path for `llm(kind)`; `changes` are options of its config."""
    return randomise(DiffusionPath.declare(path_config(**changes), architecture(kind)), seed=seed)


def adapter(kind: str = "llama", *, seed: int = 2, **changes: Any) -> LLMAdapter:
    """Updates of the layers of `llm(kind)`; `changes` are options of its config."""
    config = LoraConfig(**{"rank": 3, "alpha": 6.0, **changes})
    return randomise(LLMAdapter.declare(config, architecture(kind)), seed=seed)


def config(train: TrainConfig, *, dtype: Any = "float32") -> Config:
    return Config(model=ModelConfig(name="unused", dtype=dtype), train=train, lora=LoraConfig(rank=3, alpha=6.0))


def objective(train: TrainConfig) -> Objective:
    """The loss of a step, by the method that the options name."""
    return method_of(config(train)).loss


def model(kind: str = "llama", **changes: Any) -> Model:
    return Model.build(llm(kind), path(kind, **changes))


def tokens(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(_LLAMA["vocab_size"], size=shape), jnp.int32)


def batch(examples: int = 2, length: int = 10, answers: int = 4, *, classes: int = 1, seed: int = 0) -> Batch:
    """Examples whose answers have `answers` tokens, one fewer from row to row down to one."""
    rng = np.random.default_rng(seed)
    text = rng.integers(_LLAMA["vocab_size"], size=(examples, length + 1))
    queries = np.tile(np.arange(length - answers, length), (examples, 1))
    counts = np.maximum(answers - np.arange(examples), 1)
    return Batch(
        tokens=jnp.asarray(text[:, :-1], jnp.int32),
        queries=jnp.asarray(queries, jnp.int32),
        targets=jnp.asarray(np.take_along_axis(text, queries + 1, axis=1), jnp.int32),
        weights=jnp.asarray(np.arange(answers) < counts[:, None], jnp.float32),
        classes=jnp.asarray(rng.integers(classes, size=examples), jnp.int32),
    )


def positions(tokens: jax.Array) -> jax.Array:
    """Of sequences without padding."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
