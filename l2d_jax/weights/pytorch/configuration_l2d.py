"""The configuration of a diffusion path for a language model ("Large Language Models to Diffusion Finetuning").

A folder with such a `config.json` has only the path; `base_model_name_or_path` names the language model.
"""

import copy
from dataclasses import dataclass
from typing import Any, ClassVar

from transformers import AutoConfig, PreTrainedConfig
from transformers.configuration_utils import SubConfigSpec

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma3_text")  # families that a path can use
CODE = {"AutoConfig": "configuration_l2d.L2DConfig", "AutoModelForCausalLM": "modeling_l2d.L2DForCausalLM"}


@dataclass(frozen=True)
class PathOptions:
    """The shape of the path; paper section 3."""

    width: int = 256  # width of the diffusion token
    translation_width: int = 256  # hidden width of the MLP from the diffusion token to the model width
    frequency_width: int = 256  # number of cosine and sine features of t
    time_scale: float = 1.0  # t is multiplied by this before the features are computed
    condition_width: int = 256  # width of the embedding of time and class
    sigma: float = 64.0  # standard deviation of the noise x_0
    start: str = "released"  # an untrained path corrects nothing ("released") or equals the language model ("anchored")
    reader: str = "lm"  # the context is read by the frozen model ("lm"), or by it with the path's layers ("path")
    layers: str = "lora"  # low-rank updates of the model's layers ("lora"), or full copies of them ("dense")
    dense_init: str = "lm"  # initial values of the copies in training
    lora_rank: int = 32
    lora_alpha: float = 32.0  # an update is scaled by alpha / rank
    classes: int = 0  # number of classes for guidance; 0: none
    class_dropout: float = 0.2  # probability, per position, of training on the null class

    def __post_init__(self) -> None:
        choices = {"start": ("released", "anchored"), "reader": ("lm", "path"), "layers": ("lora", "dense")}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"path.{name} must be one of {known}, got {getattr(self, name)!r}")


class L2DConfig(PreTrainedConfig):
    """A path's options, its language model, and the default budget."""

    model_type = "l2d"
    sub_configs_defaults: ClassVar[dict[str, Any]] = {"text_config": SubConfigSpec(AutoConfig, model_type="llama")}

    path: dict[str, Any] | None = None  # the fields of `PathOptions`
    text_config: Any = None  # config of the language model
    base_model_name_or_path: str = ""  # hub id or folder of the language model
    base_revision: str | None = None  # commit of the hub id on which the path was trained
    stop_ids: list[int] | None = None  # tokens that end an answer, in addition to those of the language model
    budget: int = 15  # evaluations of the path per token; 1: the language model alone
    solver: str = "midpoint"
    auto_map: dict[str, str] | None = None
    tie_word_embeddings: bool = False  # the outer model has no embedding table

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in defaults; raises `ValueError` for an option or a language model that this code does not know."""
        unknown = set(self.path or {}) - set(PathOptions.__dataclass_fields__)
        if unknown:
            raise ValueError(f"path.{min(unknown)} is unknown to this code: update the files *_l2d.py of the folder")
        self.path = vars(PathOptions(**(self.path or {})))
        self.auto_map = CODE | (self.auto_map or {})
        self.text_config = copy.deepcopy(self.text_config)  # its attention implementation is about to be reset
        super().__post_init__(**kwargs)
        family = self.text_config.get_text_config().model_type
        if family not in FAMILIES:
            raise ValueError(f"a path cannot follow a language model of type {family!r}: known are {FAMILIES}")
