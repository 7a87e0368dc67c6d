"""How models stretch rotary angles to longer contexts, read from the config entries that transformers writes."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, ClassVar, TypeAlias

import jax.numpy as jnp
from annotated_types import Interval
from jaxtyping import Array, Float
from typing_extensions import TypedDict

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import Count, check

Factor = Annotated[float, Interval(gt=0, le=1e6)]
Theta = Annotated[float, Interval(gt=1, le=1e12)]


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3's scaling: high frequencies stay, low frequencies are divided by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int
    attention_factor: ClassVar[float] = 1.0

    def kept(self, frequencies: Float[Array, " half"], _theta: float) -> Float[Array, " half"]:
        """The share of each frequency that is not divided by `factor`; it is linear in the turns per context."""
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        return jnp.clip((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor), 0.0, 1.0)


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al. 2023): like Llama 3's scaling, but linear in the channel, and with sharper attention."""

    factor: float
    original_max_position_embeddings: int
    attention_factor: float  # multiplies rotated queries, and rotated keys
    beta_fast: float = 32.0  # frequencies with at least this many turns per original context are kept
    beta_slow: float = 1.0  # frequencies with at most this many turns are divided by `factor`
    truncate: bool = True  # whether the bounds are rounded outwards to whole channels

    def kept(self, frequencies: Float[Array, " half"], theta: float) -> Float[Array, " half"]:
        """The share of each frequency that is not divided by `factor`; frequencies fall from 1 to about 1 / theta."""
        half, context = len(frequencies), self.original_max_position_embeddings
        both = (self.beta_fast, self.beta_slow)
        low, high = (half * math.log(context / (2 * math.pi * turns)) / math.log(theta) for turns in both)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * half - 1)
        width = high - low or 1e-3  # as in transformers
        return 1 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - low) / width, 0.0, 1.0)


@dataclass(frozen=True)
class LinearScaling:
    """Linear scaling: all angles are divided by `factor`."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def kept(self, frequencies: Float[Array, " half"], _theta: float) -> Float[Array, " half"]:
        """The share of each frequency that is not divided by `factor`: none."""
        return jnp.zeros_like(frequencies)


RopeScaling: TypeAlias = Llama3Scaling | YarnScaling | LinearScaling
SCALINGS = {"llama3": Llama3Scaling, "yarn": YarnScaling, "linear": LinearScaling}  # keys: `rope_type`


class RopeEntries(TypedDict, total=False):
    """The config entries for rotary embedding; releases of transformers put them in different places."""

    rope_theta: Theta
    rope_type: str
    type: str  # the former name of `rope_type`
    factor: Factor
    low_freq_factor: Factor
    high_freq_factor: Factor
    original_max_position_embeddings: Count
    attention_factor: Factor
    beta_fast: Factor
    beta_slow: Factor
    mscale: Factor
    mscale_all_dim: Factor
    truncate: bool
    partial_rotary_factor: Annotated[float, Interval(ge=1, le=1)]


def read_rope(theta: float, *sources: Any, limit: int, where: object) -> tuple[float, RopeScaling | None]:
    """Read the base of the frequencies and their scaling from dictionaries; later dictionaries take precedence.

    `limit` is the model's number of positions. Raises an `InputError` that begins with `where`.
    """
    where, given = f"{where}: rope_scaling", {"rope_theta": theta}
    for source in sources:
        require(isinstance(source, Mapping), f"{where} must be a dictionary, got {shown(source)}: download it again")
        given |= {key: value for key, value in source.items() if value is not None}
    for key in given:
        if key not in RopeEntries.__annotations__:
            raise InputError(f"{where} has an unknown entry {shown(key)}{nearest(key, RopeEntries.__annotations__)}")
    rope = check(given, RopeEntries, where)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return rope["rope_theta"], None
    known = ", ".join(map(repr, ("default", *SCALINGS)))
    require(kind in SCALINGS, f"{where}: rope_type {shown(kind)} is not supported, only {known}: take another model")
    if kind == "yarn":
        rope = {"original_max_position_embeddings": limit, "attention_factor": _yarn_factor(rope)} | rope
    missing = [f.name for f in fields(SCALINGS[kind]) if f.default is MISSING and f.name not in rope]
    require(not missing, f"{where} of type {kind!r} lacks {', '.join(missing)}")
    scaling = SCALINGS[kind](**{f.name: rope[f.name] for f in fields(SCALINGS[kind]) if f.name in rope})
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        least, most = vars(scaling).get(low, 0.0), vars(scaling).get(high, 1.0)
        require(least < most, f"{where}.{low} must be below {high}: download it again")
    return rope["rope_theta"], scaling


def _yarn_factor(rope: Mapping[str, Any]) -> float:
    """YaRN's default factor for queries and keys."""

    def sharpness(scale: float) -> float:
        return 0.1 * scale * math.log(max(rope.get("factor", 1.0), 1.0)) + 1

    if {"mscale", "mscale_all_dim"} <= rope.keys():
        return sharpness(rope["mscale"]) / sharpness(rope["mscale_all_dim"])
    return sharpness(1.0)
