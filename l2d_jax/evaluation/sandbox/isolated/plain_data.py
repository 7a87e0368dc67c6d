"""Plain data between two processes that do not trust each other: values of builtin types, as JSON.

None, bool, str, float, lists and ints of up to 64 bits are written as in JSON. Other types become an object with one
key, the name of the type; so does NaN, to keep its sign. A value of a subclass is sent as the plain value it contains,
so none of its methods reaches the reader. The builtin types themselves are plain data; functions, instances and
generators are not.
"""

import json
import math
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

DEPTH = 100  # levels of nested containers
_LARGE = 2**63
_BASES = (int, str, float, list, tuple, dict, set, frozenset, bytes, bytearray, complex)  # bool has no subclasses
_TYPES: dict[str, Any] = {kind.__name__: kind for kind in (bool, *_BASES)}

# How a value of each type is written as text, and read back. Here and in `encode_plain`, methods of the builtin types
# are called, so overrides in subclasses do not matter.
_TEXTS: dict[str, tuple[Callable[[Any], str], Callable[[str], Any]]] = {
    "int": (lambda value: int.__format__(value, "x"), lambda text: int(text, 16)),
    "float": (lambda value: _pack(float.__float__(value)), lambda text: _unpack(text, 1)[0]),
    "complex": (
        lambda value: _pack(complex.real.__get__(value), complex.imag.__get__(value)),
        lambda text: complex(*_unpack(text, 2)),
    ),
    "bytes": (bytes.hex, bytes.fromhex),
    "bytearray": (bytearray.hex, bytearray.fromhex),
    "type": (lambda value: str(value.__name__), lambda text: _TYPES[text]),
}


class NotPlainError(TypeError):
    """The value is not plain data; the message names its type."""


class MalformedError(ValueError):
    """The bytes are not a message of this format."""


class TooLargeError(ValueError):
    """The message is larger than the limit."""


class ClosedError(EOFError):
    """The other end of the pipe is closed."""


def encode_plain(value: Any, depth: int = DEPTH) -> Any:
    """Turn plain data into a value that JSON can hold; raises `NotPlainError`."""
    if value is None or type(value) in (bool, str) or (type(value) is float and value == value):
        return value
    if depth == 0:
        raise NotPlainError(f"containers nested more than {DEPTH} deep")
    is_type = type(value) is type and value in _TYPES.values()
    kind: Any = type if is_type else next((kind for kind in _BASES if isinstance(value, kind)), None)
    if kind is None:
        raise NotPlainError(type(value).__name__)
    if kind is str:
        return str.__str__(value)
    if kind is int and -_LARGE < int.__int__(value) < _LARGE:
        return int.__int__(value)
    if kind is float and not math.isnan(float.__float__(value)):
        return float.__float__(value)
    if kind is dict:
        return {"dict": [encode_plain(list(pair), depth) for pair in dict.items(value)]}
    if kind.__name__ in _TEXTS:
        return {kind.__name__: _TEXTS[kind.__name__][0](value)}
    items = [encode_plain(item, depth - 1) for item in kind.__iter__(value)]
    return items if kind is list else {kind.__name__: items}


def decode_plain(value: Any, depth: int = DEPTH) -> Any:
    """The inverse of `encode_plain`; raises `MalformedError` for anything that `encode_plain` does not write."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > 0 and type(value) is list:
        return [decode_plain(item, depth - 1) for item in value]
    if depth > 0 and type(value) is dict and len(value) == 1:
        [(name, content)] = value.items()
        try:
            if type(content) is str:
                return _TEXTS[name][1](content)
            if type(content) is list and name in ("tuple", "set", "frozenset"):
                return _TYPES[name](decode_plain(content, depth))
            if type(content) is list and name == "dict" and all(type(pair) is list for pair in content):
                return dict(decode_plain(pair, depth) for pair in content)
        except (LookupError, ValueError, TypeError, struct.error) as error:
            raise MalformedError(f"not a {name}") from error
    raise MalformedError("not plain data")


def _pack(*values: float) -> str:
    return struct.pack(f">{len(values)}d", *values).hex()


def _unpack(text: str, count: int) -> tuple[float, ...]:
    return struct.unpack(f">{count}d", bytes.fromhex(text))


def dump_message(message: Any) -> bytes:
    """Write JSON that keeps lone surrogates: escaped, two of them would be read back as one character."""
    return json.dumps(message, ensure_ascii=False).encode("utf-8", "surrogatepass")


def load_message(data: bytes) -> Any:
    """The inverse of `dump_message`; raises `MalformedError`."""
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise MalformedError("not JSON") from error


class Channel:
    """Messages over two pipes: four bytes of length, then JSON."""

    def __init__(self, incoming: int, outgoing: int, *, limit: int):
        self._incoming, self._outgoing, self._limit = incoming, outgoing, limit

    def send(self, message: dict[str, Any]) -> None:
        """Write a message; raises `TooLargeError` or `ClosedError`."""
        data = dump_message(message)
        if len(data) > self._limit:
            raise TooLargeError(f"{len(data)} bytes")
        data = len(data).to_bytes(4, "big") + data
        try:
            while data:
                data = data[os.write(self._outgoing, data) :]
        except OSError as error:
            raise ClosedError from error

    def receive(self, *, seconds: float | None = None) -> dict[str, Any]:
        """Read a message; raises `ClosedError`, `TooLargeError`, `MalformedError`, after `seconds` `TimeoutError`."""
        end = None if seconds is None else time.monotonic() + seconds
        length = int.from_bytes(self._read(4, end), "big")
        if length > self._limit:
            raise TooLargeError(f"{length} bytes")
        message = load_message(self._read(length, end))
        if type(message) is not dict:
            raise MalformedError("not an object")
        return message

    def _read(self, count: int, end: float | None) -> bytes:
        data = bytearray()
        waiting = select.poll()  # unlike select(), it takes descriptors beyond 1023
        waiting.register(self._incoming, select.POLLIN)
        while len(data) < count:
            if end is not None and not waiting.poll(max(0.0, end - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(self._incoming, min(count - len(data), 2**20))
            if not part:
                raise ClosedError
            data += part
        return bytes(data)
