"""LoRA adapters of the models of `tiny`: by PEFT itself, and as it would write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from l2d_jax.weights.peft import AdapterConfig, adapter_shapes
from tests.support import tiny
from tests.support.exports import transformers_logits


def write_adapter(folder: Path, kind: str, *, modules: Any = ("q_proj", "v_proj"), **options: Any) -> Path:
    """An adapter with few options in its config."""
    folder.mkdir()
    rng = np.random.default_rng(5)
    shapes = adapter_shapes(AdapterConfig(3, 6.0, tuple(modules)), tiny.architecture(kind))
    save_file(
        {n: rng.normal(0, 0.3, s).astype(np.float32) for n, s in shapes.items()}, folder / "adapter_model.safetensors"
    )
    raw = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 3, "lora_alpha": 6.0, "target_modules": [*modules]}
    (folder / "adapter_config.json").write_text(json.dumps(raw | options))
    return folder


def save_by_peft(folder: Path, base: Path, **options: Any) -> Any:
    """Let PEFT add an adapter to a model and save it, all of it random; the logits of its model."""
    import peft
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    config = peft.LoraConfig(task_type="CAUSAL_LM", **{"r": 3, "lora_alpha": 6, "lora_dropout": 0.1, **options})
    adapted = peft.get_peft_model(plain, config)
    random = torch.Generator().manual_seed(0)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data = 0.3 * torch.randn(parameter.shape, generator=random)
    adapted.save_pretrained(folder)
    return transformers_logits(adapted)
