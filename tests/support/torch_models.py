"""Tiny random models of every family with a path, as PyTorch's class has them; import it where torch is there."""

import torch
import transformers

from l2d_jax.weights.pytorch.configuration_l2d import L2DConfig
from l2d_jax.weights.pytorch.modeling_l2d import L2DForCausalLM
from tests.support import tiny

FAMILIES = {
    "llama": {"rope_scaling": {**tiny._SCALING, "rope_theta": 10000.0}},
    "mistral": {"sliding_window": 5},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "smollm3": {"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "query_pre_attn_scalar": 12,
    },
}


def random_model(family: str, *, attention: str = "sdpa", **path):
    """A new path beside random weights, all of which are random, norms and biases too."""
    sizes = {**tiny.CONFIGS["llama"], "num_hidden_layers": 3, "max_position_embeddings": 128, "model_type": family}
    sizes |= {"bos_token_id": 1, "eos_token_id": None} | FAMILIES[family]
    sizes = {name: value for name, value in sizes.items() if name not in ("architectures", "rope_theta")}
    text = transformers.AutoConfig.for_model(**sizes)
    torch.manual_seed(0)
    lm = transformers.AutoModelForCausalLM.from_config(text, attn_implementation=attention)
    config = L2DConfig(path=vars(tiny.path_config(**path)), text_config=text)
    model = L2DForCausalLM(config, lm)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.randn(weight.shape) * tiny.scale(name)[1] + ("norm" in name and family[0] != "g"))
    return model.eval()
