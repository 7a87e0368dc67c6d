"""PEFT's `adapter_config.json`: which layers are adapted, with which rank and scale.

PEFT selects layers by full names (it writes "all-linear" this way), by ends of names, by regular expressions and by
layer numbers. `rank_pattern` and `alpha_pattern` give some layers another rank or alpha. The rules here are those of
peft 0.21 (`tuners/tuners_utils.py`, `check_target_module_exists`; `utils/other.py`, `get_pattern_key`). An option that
is unknown here must have a value that means "off".
"""

import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypeAlias

import regex
from annotated_types import Interval, Len
from typing_extensions import TypedDict

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check, read_json
from l2d_jax.weights.hub import HUB_ID

CONFIG = "adapter_config.json"
ALL_LINEAR = "all-linear"
SECONDS = 10.0  # limit on core seconds for the regular expressions of a file; 560, one per layer, take 1.3
MERGE = "merge it into its base by PEFT's merge_and_unload, and give that folder"
# Initialisations of A and B that leave the base unchanged, unlike PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA.
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
REQUIRED = {"peft_type": "LORA", "bias": "none"}  # the only values that are supported
# Options that do not affect the sum of base and update: PEFT ignores fan_in_fan_out for linear layers.
HARMLESS = {"auto_mapping", "base_model_name_or_path", "revision", "inference_mode", "task_type", "peft_version"}
HARMLESS |= {"lora_dropout", "fan_in_fan_out", "runtime_config", "megatron_core", "qalora_group_size"}
HARMLESS |= {"loftq_config", "eva_config", "corda_config", "lora_ga_config", "ensure_weight_tying"}
OFF: tuple[Any, ...] = (None, False, [], {}, "")

Rank: TypeAlias = Annotated[int, Interval(ge=1, le=2**16)]
Alpha: TypeAlias = Annotated[float, Interval(gt=0, le=1e6)]
Names: TypeAlias = list[str] | str


class _PeftConfig(TypedDict):
    """The entries that are read."""

    r: Rank
    lora_alpha: Alpha
    target_modules: Annotated[Names, Len(1)]
    exclude_modules: NotRequired[Names | None]
    layers_to_transform: NotRequired[list[int] | int | None]
    layers_pattern: NotRequired[Names | None]
    rank_pattern: NotRequired[dict[str, Rank] | None]
    alpha_pattern: NotRequired[dict[str, Alpha] | None]
    use_rslora: NotRequired[bool | None]
    init_lora_weights: NotRequired[bool | str | None]


class _Base(TypedDict):
    """The entries that name the base."""

    base_model_name_or_path: NotRequired[str | None]
    revision: NotRequired[str | None]


def adapter_base(folder: Path) -> str | None:
    """The base that an adapter's config names, or None; org/name@revision if it has a hub revision.

    Raises `InputError`.
    """
    found = check(read_json(folder / CONFIG), _Base, folder / CONFIG, remedy="name the base of the adapter")
    name, revision = found.get("base_model_name_or_path"), found.get("revision")
    is_on_hub = name and HUB_ID.fullmatch(name) and "@" not in name and not os.path.exists(name)
    return f"{name}@{revision}" if is_on_hub and revision else name or None


def product_scale(rank: int, alpha: float, *, rank_stabilized: bool) -> float:
    """The factor of B A: alpha / rank, or alpha / sqrt(rank) (Kalajdzievski 2023)."""
    return alpha / (math.sqrt(rank) if rank_stabilized else rank)


@dataclass(frozen=True)
class PeftConfig:
    """A checked `adapter_config.json`."""

    file: Path
    raw: Mapping[str, Any]
    found: Mapping[str, Any]  # the entries of `_PeftConfig`
    _ends: float  # deadline for regular expressions, by `time.process_time`
    _compiled: dict[str, Any] = field(default_factory=dict)  # compiled regular expressions

    @classmethod
    def open(cls, folder: Path) -> "PeftConfig":
        """Read and check the config of an adapter; raises `InputError` if it is malformed or not supported."""
        file = folder / CONFIG
        raw = read_json(file)
        for name, value in REQUIRED.items():
            if raw.get(name, value) != value:
                raise InputError(f"{file}: {name} = {shown(raw[name])} is not supported, only {value!r}: {MERGE}")
        known = {*_PeftConfig.__annotations__, *REQUIRED, *HARMLESS}
        for name, value in raw.items():
            if name not in known and value not in OFF:
                raise InputError(f"{file}: {shown(name)} = {shown(value)} is not supported: {MERGE}")
        found = check(raw, _PeftConfig, file, remedy="give it as PEFT saves it")
        start = found.get("init_lora_weights")
        if (start.lower() if isinstance(start, str) else start) not in PLAIN_STARTS:
            problem = f"{file}: init_lora_weights = {shown(start)} trains on a changed base"
            raise InputError(f"{problem}: save it by PEFT's path_initial_model_for_weight_conversion, as plain LoRA")
        return cls(file, raw, found, time.process_time() + SECONDS)

    @property
    def rank_stabilized(self) -> bool:
        """Whether updates are divided by the square root of their rank."""
        return bool(self.found.get("use_rslora"))

    def selects(self, layer: str) -> bool:
        """Whether PEFT adapts a linear layer of the decoder blocks, by its name in the model."""
        targets, excluded = self.found["target_modules"], self.found.get("exclude_modules")
        if excluded and self._is_named(layer, excluded):
            return False
        if targets == ALL_LINEAR:
            return True
        if not self._is_named(layer, targets):
            return False
        numbers = self.found.get("layers_to_transform")
        if isinstance(targets, str) or layer in targets or numbers in (None, []):
            return True
        number = self._layer_number(layer)
        return number is not None and number in (numbers if isinstance(numbers, list) else [numbers])

    def ranks(self, layer: str) -> list[int]:
        """The possible ranks of a layer's update: PEFT uses the first match, but sorts the patterns when saving."""
        return self._by_pattern("rank_pattern", layer) or [self.found["r"]]

    def scale(self, layer: str, rank: int) -> float:
        """The factor of a layer's update."""
        alpha = [*self._by_pattern("alpha_pattern", layer), self.found["lora_alpha"]][0]
        return product_scale(rank, alpha, rank_stabilized=self.rank_stabilized)

    def _is_named(self, layer: str, names: Names) -> bool:
        """Whether a regular expression matches the whole name, or a list contains the name or an end of it."""
        if isinstance(names, str):
            return self._match(names, layer) is not None
        parts = layer.split(".")
        return not {".".join(parts[i:]) for i in range(len(parts))}.isdisjoint(names)

    def _layer_number(self, layer: str) -> int | None:
        patterns = self.found.get("layers_pattern") or [r"[^.]*"]
        for pattern in [patterns] if isinstance(patterns, str) else patterns:
            if found := self._match(rf"(?:^|.*?\.){pattern}\.(?P<number>\d+)\..*", layer):
                return int(found["number"])
        return None

    def _by_pattern(self, option: str, layer: str) -> list[Any]:
        """The values of all patterns that match the layer's name or an end of it."""
        patterns: Mapping[str, Any] = self.found.get(option) or {}
        return [value for key, value in patterns.items() if self._match(rf"(.*\.)?({key})", layer)]

    def _match(self, pattern: str, text: str) -> Any:
        """Match a whole text; raises `InputError` for an invalid pattern, or one that takes too long."""
        left = self._ends - time.process_time()
        try:
            require(left > 0, f"{self.file}: its regular expressions take too long: write out the names of the layers")
            if pattern not in self._compiled:  # EVA writes a pattern per layer, more than the library caches
                self._compiled[pattern] = regex.compile(pattern)
            return self._compiled[pattern].fullmatch(text, timeout=left)
        except TimeoutError:
            return self._match(pattern, text)  # this raises
        except (regex.error, RecursionError, OverflowError) as error:
            problem = f"{self.file}: {shown(pattern)} is no regular expression ({error})"
            raise InputError(f"{problem}: write out the names of the layers") from None
