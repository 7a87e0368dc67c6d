"""The configuration of a diffusion path for a language model ("Large Language Models to Diffusion Finetuning").

A folder with such a `config.json` holds the path alone, and the language model is where `base_model_name_or_path` says.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")  # whose layers the path can follow
CODE = {"AutoConfig": "configuration_l2d.L2DConfig", "AutoModelForCausalLM": "modeling_l2d.L2DForCausalLM"}


@dataclass(frozen=True)
class PathOptions:
    """The shape of the path; paper section 3."""

    width: int = 256  # of the diffusion token
    translation_width: int = 256  # hidden width of the MLP from the diffusion token to the model width
    frequency_width: int = 256  # number of cosine and sine features of t
    time_scale: float = 1.0  # what t is multiplied by before them
    condition_width: int = 256  # of the embedding of time and class
    sigma: float = 64.0  # standard deviation of the noise x_0
    start: str = "released"  # an untrained path is nothing ("released"), or the language model itself ("anchored")
    reader: str = "lm"  # who reads the context: the frozen model ("lm"), or that with the path's layers ("path")
    layers: str = "lora"  # low-rank updates of the model's layers ("lora"), or full copies of them ("dense")
    dense_init: str = "lm"  # what the copies were before the first step of training
    lora_rank: int = 32
    lora_alpha: float = 32.0  # an update is scaled by alpha / rank
    classes: int = 0  # for guidance; 0: none
    class_dropout: float = 0.2  # probability, per position, of training on the null class

    def __post_init__(self) -> None:
        choices = {"start": ("released", "anchored"), "reader": ("lm", "path"), "layers": ("lora", "dense")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"path.{name} must be one of {known}, got {getattr(self, name)!r}")


class L2DConfig(PreTrainedConfig):
    """A path's options, the language model that it belongs to, and how much it thinks unless it is told."""

    model_type = "l2d"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}

    path: dict[str, Any] | None = None  # the fields of `PathOptions`
    text_config: Any = None  # of the language model
    base_model_name_or_path: str = ""  # of the language model: a hub id, or a folder
    base_revision: str | None = None  # the commit of the hub id that the path was trained on
    stop_ids: list[int] | None = None  # tokens that end an answer, besides those that the language model names
    budget: int = 15  # evaluations of the path per token; 1: the language model alone
    solver: str = "midpoint"
    auto_map: dict[str, str] | None = None
    tie_word_embeddings: bool = False  # of the outer model, which has no table of its own

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in defaults; raises `ValueError` for an option or a language model that the code does not know."""
        unknown = set(self.path or {}) - set(PathOptions.__dataclass_fields__)
        if unknown:
            raise ValueError(f"path.{min(unknown)} is unknown to this code: update the files *_l2d.py of the folder")
        self.path = vars(PathOptions(**(self.path or {})))
        self.auto_map = CODE | (self.auto_map or {})
        self.text_config = copy.deepcopy(self.text_config)  # whose implementation of attention is about to be reset
        super().__post_init__(**kwargs)
        family = self.text_config.get_text_config().model_type
        if family not in FAMILIES:
            raise ValueError(f"a path cannot follow a language model of type {family!r}: known are {FAMILIES}")
