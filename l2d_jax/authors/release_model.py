"""Models of the authors' PyTorch release, built by the classes of a checkout of it.

Nothing here imports JAX: the release needs a separate environment (`ENVIRONMENT`) with older libraries.
"""

import importlib
import inspect
import json
import runpy
import sys
import types
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from l2d_jax.errors import InputError

ENVIRONMENT = {"torch": "2.13.0", "transformers": "4.46.3", "torchdiffeq": "0.2.5"}  # tested with these
# The release's files import these too, and what is recorded uses nothing of them.
UNUSED = ("hydra", "omegaconf", "peft", "configargparse", "data", "pipeline", "pipeline.util", "tasks", "utils")

# The sizes of the tiny models all differ, so that no two can be exchanged unnoticed.
BASE: dict[str, Any] = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 56, "num_hidden_layers": 2}
BASE |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
BASE |= {"bos_token_id": 1, "eos_token_id": 7, "pad_token_id": None, "attention_dropout": 0.0}
SCALING: dict[str, Any] = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALING |= {"original_max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"head_dim": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
    "qwen2": {"rms_norm_eps": 1e-6, "rope_theta": 1e6, "use_sliding_window": False},
}
HYPERPARAMETERS: dict[str, Any] = {"base_params_to_freeze": "all", "minimum_training_noise": 0.0}
HYPERPARAMETERS |= {"flow_representation_dim": 12, "flow_representation_num_layers": 1}
HYPERPARAMETERS |= {"flow_representation_rescaling": "mult", "noise_rescaling": 64.0}
HYPERPARAMETERS |= {"flow_to_lm_translation_depth": 2, "flow_to_lm_hidden_size": 20}
HYPERPARAMETERS |= {"flow_to_lm_timestep_rescaling": 1.0, "flow_to_lm_rescale_in_float32": True}
HYPERPARAMETERS |= {"full_dit_modulation": True, "timestep_modulation_freq_embedding_size": 16}
HYPERPARAMETERS |= {"timestep_modulation_hidden_size": 24, "separate_flow_params": True}
HYPERPARAMETERS |= {"flow_lora_rank": 4, "flow_lora_alpha": 6.0, "nstep_x1_estimation": "sample"}
HYPERPARAMETERS |= {"nstep_temperature_schedule": 0.0, "nstep_guidance_parameter": 1.5}

# Every variant of the release: family, whether the LM head is tied, LoRA or full weights, with or without classes.
VARIANTS = {
    "_".join(filter(None, (family.removesuffix("2"), head, layers, classes))): (family, head, layers, classes)
    for family, head, layers, classes in product(FAMILIES, ("tied", "untied"), ("lora", "full"), ("", "classes"))
}


class _Unused(types.ModuleType):
    """A module that is not there, with an empty class of every name."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


@dataclass(frozen=True)
class Release:
    """The imported modules of a checkout."""

    torch: Any
    transformers: Any
    checkout: Path

    def module(self, family: str) -> Any:
        """The release's file on a model family, whose `odeint` integrates."""
        return importlib.import_module(f"flow_llms.{family}")

    def model_class(self, family: str) -> Any:
        """The release's class of a model family."""
        return getattr(self.module(family), f"Flow{family.capitalize()}ForCausalLM")

    def function(self, file: str, name: str) -> Any:
        """A function of a file of the checkout; raises `InputError` if it has none of this name."""
        found = runpy.run_path(str(self.checkout / file))
        if name not in found:
            raise InputError(f"{self.checkout / file} lacks {name}: check out commit 456871e")
        return found[name]


def open_release(checkout: Path) -> Release:
    """Import the release's model classes; raises `InputError` where the checkout or a library is missing."""
    if not (checkout / "flow_llms" / "llama.py").is_file():
        raise InputError(f"no flow_llms in {checkout}: give a checkout of github.com/SakanaAI/L2D")
    for library, version in ENVIRONMENT.items():
        try:
            found = importlib.import_module(library)
        except ImportError:
            pins = " ".join(f"{name}=={pin}" for name, pin in ENVIRONMENT.items())
            raise InputError(f"the release needs {library}: pip install {pins} in a separate environment") from None
        if library == "transformers" and not found.__version__.startswith("4.46."):
            raise InputError(f"the release needs transformers {version}, and this is {found.__version__}: install that")
    sys.modules.update({name: _Unused(name) for name in UNUSED})
    sys.path.insert(0, str(checkout.resolve()))
    try:
        importlib.import_module("flow_llms")
    except ImportError as error:
        raise InputError(f"cannot import flow_llms of {checkout} ({error}): install what it needs") from error
    sys.modules["torch"].set_num_threads(1)  # the models are tiny, and sums keep their order
    return Release(sys.modules["torch"], sys.modules["transformers"], checkout)


def build_tiny(release: Release, variant: str, *, seed: int) -> tuple[Any, dict[str, Any]]:
    """A random base and a random path of a variant, and the path's hyper-parameters."""
    if variant not in VARIANTS:
        raise InputError(f"no variant {variant!r}: take one of {', '.join(VARIANTS)}")
    family, head, layers, classes = VARIANTS[variant]
    release.torch.manual_seed(seed)
    sizes = BASE | FAMILIES[family] | {"tie_word_embeddings": head == "tied"}
    sizes["rope_scaling"] = SCALING if (family, head) == ("llama", "untied") else None
    config = release.transformers.AutoConfig.for_model(family, **sizes)
    base = release.transformers.AutoModelForCausalLM.from_config(config)
    options = HYPERPARAMETERS | {"separate_flow_params_with_lora": layers == "lora"}
    options["guidance_modulation_num_classes"] = 3 if classes else 0
    with release.torch.no_grad():
        _randomise_base(release.torch, base)
        model = release.model_class(family)(model_or_model_id=base, **options)
        _randomise_path(release.torch, model)
    return model.float().eval(), {"family": family, "l2d_kwargs": keywords(release, family) | options}


def open_model(release: Release, base: Path, weights: Path, hyperparameters: Path) -> tuple[Any, dict[str, Any]]:
    """A base in a folder with a trained path, and the path's hyper-parameters."""
    raw = json.loads(hyperparameters.read_text())
    family = json.loads((base / "config.json").read_text()).get("model_type")
    if family not in FAMILIES:
        raise InputError(f"{base}/config.json has model_type {family!r}: the release knows {', '.join(FAMILIES)}")
    loaded = release.transformers.AutoModelForCausalLM.from_pretrained(base, torch_dtype=release.torch.float32)
    options = keywords(release, family)
    options |= {name: value for name, value in raw.get("l2d_kwargs", raw).items() if name in options}
    model = release.model_class(family)(model_or_model_id=loaded, **options)
    if weights.suffix == ".safetensors":
        state = importlib.import_module("safetensors.torch").load_file(weights)
    else:
        state = release.torch.load(weights, map_location="cpu", weights_only=True)
    state = state.get("model_state_dict", state)
    try:
        model.load_state_dict(state, strict=True)
    except RuntimeError as error:
        raise InputError(f"{weights} does not fit {base} ({' '.join(str(error).split())[:200]})") from error
    return model.float().eval(), {"family": family, "l2d_kwargs": options}


def keywords(release: Release, family: str) -> dict[str, Any]:
    """The hyper-parameters that the release's class takes, with its own defaults."""
    parameters = inspect.signature(release.model_class(family)).parameters
    others = ("model_or_model_id", "model_loading_kwargs", "default_generation_nstep")
    return {name: parameter.default for name, parameter in parameters.items() if name not in others}


def _randomise_base(torch: Any, base: Any) -> None:
    """Weights of the size that trained models have; logits have a standard deviation near 2."""
    width = base.config.hidden_size
    for name, parameter in base.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
        elif parameter.ndim == 1:
            parameter.copy_(0.3 * torch.randn_like(parameter))
        else:
            scale = 2 / width**0.5 if "embed" in name or "lm_head" in name else parameter.shape[1] ** -0.5
            parameter.copy_(scale * torch.randn_like(parameter))


def _randomise_path(torch: Any, model: Any) -> None:
    """Values in place of the zeros that training starts from, so that no part can be left out unnoticed."""
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn_like(parameter)
        if "modulation_head.mlp.2" in name or name.endswith(".B"):
            parameter.copy_(0.2 * noise)
        elif "timestep_embedder" in name or "data_label" in name:
            parameter.copy_((0.05 if name.endswith("bias") else 0.3) * noise)
        elif ".flow_" in name and "_proj" in name and not name.endswith(".A"):  # full weights start from the LM's
            parameter.add_(0.1 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.05 * noise)
