"""Builds frozen dataclasses of options from nested dictionaries; an option that does not fit is one clear line."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from l2d_jax.errors import InputError


def require(condition: bool, message: str) -> None:  # noqa: FBT001 (like the condition of an assert)
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def from_dict(cls: type, values: Any, *, prefix: str) -> Any:
    """Build a dataclass from a nested dictionary, checking names and types; errors name `prefix` and the option."""
    if not isinstance(values, Mapping):
        raise InputError(f"{prefix} must be a section of options, got {values!r} of type {type(values).__name__}")
    types_by_name = typing.get_type_hints(cls)
    arguments = {}
    for name, value in values.items():
        if name not in types_by_name:
            raise InputError(f"unknown option {prefix}.{name}{nearest(str(name), types_by_name)}")
        arguments[name] = _cast(value, types_by_name[name], f"{prefix}.{name}")
    for f in dataclasses.fields(cls):
        if f.name not in arguments and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"option {prefix}.{f.name} is missing: give it")
    return cls(**arguments)


def _cast(value: Any, expected: Any, name: str) -> Any:
    """`value` as the declared type, by the lossless conversions that a command line and JSON need."""
    if dataclasses.is_dataclass(expected):
        return from_dict(typing.cast(type, expected), value, prefix=name)
    origin, options = typing.get_origin(expected), typing.get_args(expected)
    if origin is Literal:
        require(value in options, f"{name} must be one of {', '.join(map(repr, options))}, got {value!r}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        return _cast(value, next(o for o in options if o is not type(None)), name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_cast(item, options[0], f"{name}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    if expected is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(expected, type) and isinstance(value, expected) and not (expected is int and isinstance(value, bool)):
        return value
    wanted = expected.__name__ if isinstance(expected, type) and origin is None else str(expected)
    raise InputError(f"{name} must be of type {wanted}, got {value!r} of type {type(value).__name__}")


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the known name that is closest, or all of them."""
    names = sorted(names)
    if not names:
        return ": it has none"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose from {', '.join(names)}"
