"""How a path and its language model are made, saved and loaded with transformers.

A folder has only the path, and its config names the language model, called its base. If the language model differs from
the base, because it was resized, trained or merged with an adapter, or if there is no base, the folder has both.
"""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from .configuration_l2d import CODE, L2DConfig, PathOptions
from .path_l2d import DiffusionPath, with_path
from .reading_l2d import Reader

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
CONFIG_OPTIONS = ("budget", "solver", "stop_ids")  # options that a caller may set when loading
SAMPLE = 8  # entries at both ends of each weight of the language model that are compared to detect changes


class PathBesideModel(PreTrainedModel):
    """The frozen language model `lm` and its `path`, with transformers' methods to save, load and resize."""

    config_class = L2DConfig
    main_input_name = "input_ids"
    supports_gradient_checkpointing = True
    _supports_sdpa = _supports_flash_attn = _supports_attention_backend = True
    _can_compile_fullgraph = True
    _keep_in_fp32_modules_strict = ("path",)
    _skip_keys_device_placement = ("past_key_values",)

    def __init__(self, config: L2DConfig, lm: PreTrainedModel | None = None) -> None:
        """Make a new path for a language model; without `lm`, the language model has random weights."""
        super().__init__(config)
        self.lm = AutoModelForCausalLM.from_config(config.text_config) if lm is None else lm
        for module in () if lm is None else lm.modules():
            module._is_hf_initialized = True  # do not overwrite its weights with initial values
        self.lm.requires_grad_(False).eval()
        if len(devices := {weight.device for weight in self.lm.parameters()}) > 1:
            places = ", ".join(sorted(map(str, devices)))[:80]
            raise ValueError(f"the language model must be on one device, not on {places}: give device_map={{'': 0}}")
        config.text_config = self.lm.config
        decoder = self.lm.get_decoder()
        self.options = PathOptions(**config.path)
        self.path = DiffusionPath(self.options, decoder.layers, decoder.config.hidden_size).to(self.lm.device)
        # These are not submodules: their weights belong to `lm` and `path`.
        layers = [nn.ModuleList(map(with_path, decoder.layers, self.path.layers)) for _ in ("path", "reader")]
        self._layers = (layers[0],)
        self._reader = (Reader(decoder, layers[1] if self.options.reader == "path" else decoder.layers),)
        self._table: tuple[Any, Tensor] | None = None
        self._base = {} if lm is None else self._fingerprint()
        self.post_init()
        self.generation_config = self.lm.generation_config

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise a module of the path that is missing in the file of weights."""
        if module is self:
            for changes, layer in zip(self.path.layers, self.lm.get_decoder().layers, strict=True):
                changes.copy_from(layer)
        elif hasattr(module, "reset_parameters") and any(module is part for part in self.path.modules()):
            module.reset_parameters()

    def train(self, mode: bool = True) -> Any:
        """Switch the path and adapters to training mode; the language model stays in evaluation mode."""
        super().train(mode)
        self.lm.eval()
        for module in self.lm.modules():
            if hasattr(module, "base_layer"):  # an adapter of PEFT
                module.train(mode)
        return self

    def get_input_embeddings(self) -> nn.Module:
        """The input embeddings of the language model."""
        return self.lm.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the input embeddings of the language model; the path's vocabulary map applies to the new rows."""
        self.lm.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """The language model's head."""
        return self.lm.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the language model's head."""
        self.lm.set_output_embeddings(new_embeddings)

    def get_decoder(self) -> Any:
        """The language model's decoder."""
        return self.lm.get_decoder()

    def resize_token_embeddings(self, *given: Any, **options: Any) -> nn.Module:
        """Resize the language model's embeddings and head; new rows get vocabulary vectors like all others."""
        table = self.lm.resize_token_embeddings(*given, **options)
        self.lm.requires_grad_(False)
        self.vocab_size = len(table.weight)
        return table

    def _set_gradient_checkpointing(
        self, enable: bool = True, gradient_checkpointing_func: Any = None, every_n_layers: int = 1
    ) -> None:
        """Recompute the path's layers in the backward pass; the language model is not affected.

        Raises `ValueError` if only some of the layers are to be recomputed.
        """
        if every_n_layers != 1:
            raise ValueError("the path's layers are all computed again, or none: give every_n_layers=1")
        super()._set_gradient_checkpointing(enable, gradient_checkpointing_func)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *given: Any, config: Any = None, **options: Any
    ) -> Any:
        """Load the path in a folder or repository, and the language model that its config names.

        Hub options apply to the path. Other options, such as `dtype`, `device_map`, `quantization_config` and
        `attn_implementation`, apply to the language model, whose custom code is never run. Raises `ValueError` for
        tensors that do not fit.
        """
        name = pretrained_model_name_or_path
        hub = {option: options.pop(option) for option in HUB_OPTIONS if option in options}
        for ours in ("trust_remote_code", "adapter_kwargs", "_from_auto", "code_revision"):
            options.pop(ours, None)
        if not isinstance(config, PreTrainedConfig):
            place = name if config is None else config
            kind = L2DConfig.get_config_dict(place, **hub)[0].get("model_type")
            if kind != L2DConfig.model_type:
                raise ValueError(f"{str(place)[-120:]} holds a model of type {str(kind)[:40]!r}, not a path")
            config = L2DConfig.from_pretrained(place, **hub)
        for option in CONFIG_OPTIONS:
            setattr(config, option, options.pop(option, getattr(config, option)))
        if not config.base_model_name_or_path:
            loaded = super().from_pretrained(name, *given, config=config, **hub, **options)
            (loaded[0] if isinstance(loaded, tuple) else loaded).lm.requires_grad_(False)
            return loaded
        if unknown := {"state_dict", "key_mapping", "gguf_file"} & set(options):
            raise ValueError(f"{min(unknown)} is not supported for a path without its language model in the folder")
        options.setdefault("attn_implementation", config._attn_implementation)
        suffix, with_info = options.pop("variant", None), options.pop("output_loading_info", False)
        nearby = os.path.join(name, config.base_model_name_or_path)
        if os.path.isdir(nearby):  # absolute, so that it is found after the model is saved elsewhere
            config.base_model_name_or_path = os.path.abspath(nearby)
        base = config.base_model_name_or_path
        where = {option: hub[option] for option in ("cache_dir", "local_files_only", "token") if option in hub}
        lm = AutoModelForCausalLM.from_pretrained(
            base, revision=config.base_revision or "main", trust_remote_code=False, **where, **options
        )
        model = cls(config, lm)
        tensors = _load(name, f"model.{suffix}.safetensors" if suffix else SAFE_WEIGHTS_NAME, hub)
        try:
            model.path.load_state_dict({name.removeprefix("path."): tensor for name, tensor in tensors.items()})
        except RuntimeError as error:  # its message names what is missing, unknown or misshaped
            raise ValueError(f"the path in {name} does not fit its config or {base}: {error}"[:300]) from None
        model._find_stops(name, hub)
        model.eval()
        info = {key: set() for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
        return (model, info | {"error_msgs": []}) if with_info else model

    def _find_stops(self, name: Any, hub: Mapping[str, Any]) -> None:
        """Set the generation options: the folder's or else the language model's, with the config's stop ids."""
        if cached_file(name, GENERATION_CONFIG_NAME, _raise_exceptions_for_missing_entries=False, **hub) is not None:
            self.generation_config = GenerationConfig.from_pretrained(name, **hub)
        ends = self.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
        self.generation_config.eos_token_id = list(dict.fromkeys([*ends, *(self.config.stop_ids or [])])) or None

    def save_pretrained(
        self,
        save_directory: str | os.PathLike[str],
        is_main_process: bool = True,
        state_dict: dict[str, Tensor] | None = None,
        **options: Any,
    ) -> None:
        """Write the path, its config and this code, and also the language model if it differs from the base.

        The options are those of transformers. Raises `ValueError` for a model with a PEFT adapter.
        """
        if any(hasattr(module, "base_layer") for module in self.modules()):
            raise ValueError("the model has a PEFT adapter: save it with PEFT, or call merge_and_unload() first")
        base, ours = self.config.base_model_name_or_path, self.state_dict() if state_dict is None else state_dict
        is_alone = bool(base) and not self._is_changed()
        if is_alone:
            ours = {name: tensor for name, tensor in ours.items() if name.startswith("path.")}
        self.config.base_model_name_or_path = base if is_alone else ""
        self.config.auto_map = dict(CODE)
        try:
            super().save_pretrained(save_directory, is_main_process, ours, **options)
        finally:
            self.config.base_model_name_or_path = base
        for file in Path(__file__).parent.glob("*_l2d.py") if is_main_process else ():
            if file.parent.resolve() != Path(save_directory).resolve():
                shutil.copyfile(file, Path(save_directory, file.name))

    def _fingerprint(self) -> dict[str, Tensor]:
        """The first and last entries of each weight of the language model."""
        weights = ((name, weight.detach().reshape(-1)) for name, weight in self.lm.named_parameters())
        return {name: torch.cat([weight[:SAMPLE], weight[-SAMPLE:]]).cpu() for name, weight in weights}

    def _is_changed(self) -> bool:
        """Whether weights of the language model, or their shapes, have changed since it was loaded."""
        now = self._fingerprint()
        if now.keys() != self._base.keys():
            return True
        return any(not torch.equal(self._base[name].to(value.dtype), value) for name, value in now.items())


def _load(name: Any, file: str, hub: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read the tensors of a file, or of the files in its index."""
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **hub)
    if found is not None:
        return load_file(found)
    index = cached_file(name, f"{file}.index.json", **hub)
    tensors: dict[str, Tensor] = {}
    for part in get_checkpoint_shard_files(name, index, **hub)[0]:
        tensors |= load_file(part)
    return tensors
