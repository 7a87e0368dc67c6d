"""Builds frozen dataclasses of options from nested dictionaries. An option that does not fit raises one clear line.

A number is declared with its range, `width: Annotated[int, Interval(ge=1, le=65536)]`, and `check_value` is the one
place that compares a value with its declaration: in dictionaries, in dataclasses, and on command lines.
"""

import dataclasses
import difflib
import operator
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from annotated_types import Interval

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check_path

FINITE = Interval(ge=-sys.float_info.max, le=sys.float_info.max)  # of numbers that declare no range


def from_dict(cls: type, values: Any, *, prefix: str) -> Any:
    """Build a dataclass from a nested dictionary, checking names, types and ranges; errors name `prefix` and option."""
    if not isinstance(values, Mapping):
        raise InputError(f"{prefix} must be a section of options, got {shown(values)} of type {type(values).__name__}")
    declared = typing.get_type_hints(cls, include_extras=True)
    arguments = {}
    for name, value in values.items():
        if name not in declared:
            raise InputError(f"unknown option {prefix}.{name}{nearest(str(name), declared)}")
        arguments[name] = check_value(value, declared[name], f"{prefix}.{name}")
    for f in dataclasses.fields(cls):
        if f.name not in arguments and f.default is f.default_factory is dataclasses.MISSING:
            raise InputError(f"option {prefix}.{f.name} is missing: give it")
    return cls(**arguments)


def check_fields(section: Any, *, prefix: str) -> None:
    """Raise `InputError` unless each field of a dataclass fits its declaration; for its `__post_init__`."""
    for name, declared in typing.get_type_hints(type(section), include_extras=True).items():
        check_value(getattr(section, name), declared, f"{prefix}.{name}")


def check_value(value: Any, declared: Any, name: str, *, interval: Interval = FINITE) -> Any:
    """Check a value, and convert it to its declared type without loss, as command lines and JSON need.

    Raises `InputError`, which begins with `name`. NaN lies in no range, and infinity only in one that ends with it.
    """
    if dataclasses.is_dataclass(declared):
        kind = typing.cast(type, declared)
        return value if isinstance(value, kind) else from_dict(kind, value, prefix=name)
    origin, options = typing.get_origin(declared), typing.get_args(declared)
    if origin is Annotated:
        interval = next((mark for mark in options[1:] if isinstance(mark, Interval)), interval)
        return check_value(value, options[0], name, interval=interval)
    if origin is Literal:
        require(value in options, f"{name} must be one of {', '.join(map(repr, options))}, got {shown(value)}")
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in options:
            return None
        words = [word for option in options if typing.get_origin(option) is Literal for word in typing.get_args(option)]
        if words and isinstance(value, str):
            require(value in words, f"{name} must be a number or {', '.join(map(repr, words))}, got {shown(value)}")
            return value
        return check_value(value, options[0], name)
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(check_value(item, options[0], f"{name}[{i}]") for i, item in enumerate(value))
    if origin is Mapping and isinstance(value, Mapping):
        return dict(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and (declared is float or (declared is int and isinstance(value, int))):
        ends = {name: getattr(interval, name) for name in ("gt", "ge", "lt", "le")}  # NaN lies between no two
        is_inside = all(end is None or getattr(operator, kind)(value, end) for kind, end in ends.items())
        require(is_inside, f"{name} must be {range_text(interval)}, got {shown(value)}")
        return declared(value)
    if isinstance(value, str) and declared is str:
        check_path(value, name)  # each text of the options is a name or a path
        return value
    if declared not in (int, float) and isinstance(declared, type) and isinstance(value, declared):
        return value
    raise InputError(f"{name} must be of type {type_text(declared)}, got {shown(value)} of type {type(value).__name__}")


def range_text(interval: Interval) -> str:
    """An interval as mathematics writes it, such as "in [0, 1)"."""
    if interval is FINITE:
        return "finite"
    low = f"[{interval.ge}" if interval.gt is None else f"({interval.gt}"
    high = f"{interval.le}]" if interval.lt is None else f"{interval.lt})"
    return f"in {low}, {high}"


def type_text(declared: Any) -> str:
    """A declared type as the source code writes it, without its range; it is no union."""
    origin, options = typing.get_origin(declared), typing.get_args(declared)
    if origin is Annotated:
        return type_text(options[0])
    if origin is tuple:
        return f"tuple[{type_text(options[0])}, ...]"
    return declared.__name__ if isinstance(declared, type) and origin is None else str(declared)


def nearest(name: str, names: Iterable[str]) -> str:
    """The end of an error message about an unknown name: the closest known name, or all known names."""
    names = sorted(names)
    if not names:
        return ": it has none"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f": did you mean {close[0]!r}?" if close else f": choose from {', '.join(names)}"
