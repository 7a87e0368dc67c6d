"""Plain data between two processes that do not trust each other: values of exact builtin types, as JSON.

None, bool, str, float, lists and ints of up to 64 bits are JSON's own; other types become an object with one key, the
name of the type, and so does NaN, which has a sign. A value of a subclass is sent as the plain value it holds, so that
none of its methods reaches the reader. The builtin types themselves are plain data; functions, instances and generators
are not.
"""

import json
import os
import select
import struct
import time
from collections.abc import Callable
from typing import Any

DEPTH = 100  # levels of nested containers
_LARGE = 2**63
_PLAIN = (bool, int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in _PLAIN}


class NotPlainError(TypeError):
    """A value that is not plain data; the message names its type."""


class MalformedError(ValueError):
    """Bytes that are not a message of this format."""


class TooLargeError(ValueError):
    """A message beyond the limit."""


class ClosedError(EOFError):
    """The other end of the pipe is closed."""


def encode_plain(value: Any, depth: int = DEPTH) -> Any:
    """Plain data as a value that JSON can hold; raises `NotPlainError`."""
    if value is None or type(value) in (bool, str) or (type(value) is float and value == value):
        return value
    if depth == 0:
        raise NotPlainError(f"containers nested more than {DEPTH} deep")
    for kind, write in _WRITERS:
        if isinstance(value, kind):
            return write(value, depth - 1)
    if type(value) is type and _TYPES.get(value.__name__) is value:
        return {"type": value.__name__}
    raise NotPlainError(type(value).__name__)


def _encode_all(values: Any, depth: int) -> list[Any]:
    return [encode_plain(value, depth) for value in values]


def _encode_int(value: int) -> Any:
    exact = int.__int__(value)
    return exact if -_LARGE < exact < _LARGE else {"int": int.__format__(exact, "x")}


def _encode_float(value: float) -> Any:
    exact = float.__float__(value)
    return exact if exact == exact else {"nan": struct.pack(">d", exact).hex()}


def _encode_complex(exact: complex) -> str:
    return struct.pack(">dd", exact.real, exact.imag).hex()


# The methods are those of the builtin types, whatever a subclass overrides.
_WRITERS: tuple[tuple[type, Callable[[Any, int], Any]], ...] = (
    (int, lambda value, _: _encode_int(value)),
    (str, lambda value, _: str.__str__(value)),
    (float, lambda value, _: _encode_float(value)),
    (list, lambda value, depth: _encode_all(list.__iter__(value), depth)),
    (tuple, lambda value, depth: {"tuple": _encode_all(tuple.__iter__(value), depth)}),
    (dict, lambda value, depth: {"dict": [_encode_all(pair, depth) for pair in dict.items(value)]}),
    (set, lambda value, depth: {"set": _encode_all(set.__iter__(value), depth)}),
    (frozenset, lambda value, depth: {"frozenset": _encode_all(frozenset.__iter__(value), depth)}),
    (bytes, lambda value, _: {"bytes": bytes.hex(value)}),
    (bytearray, lambda value, _: {"bytearray": bytearray.hex(value)}),
    (complex, lambda value, _: {"complex": _encode_complex(complex.__pos__(value))}),
)


def decode_plain(value: Any, depth: int = DEPTH) -> Any:
    """The inverse of `encode_plain`; raises `MalformedError` for anything that `encode_plain` does not write."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if depth > 0 and type(value) is list:
        return [decode_plain(item, depth - 1) for item in value]
    if depth > 0 and type(value) is dict and len(value) == 1:
        [(kind, content)] = value.items()
        read, holds = _READERS.get(kind, (None, None))
        if read is not None and type(content) is holds:
            try:
                return read(content, depth - 1)
            except (LookupError, ValueError, TypeError, struct.error) as error:
                raise MalformedError(f"not a {kind}") from error
    raise MalformedError("not plain data")


def _decode_all(values: list[Any], depth: int) -> list[Any]:
    return [decode_plain(value, depth) for value in values]


def _decode_dict(pairs: list[Any], depth: int) -> dict[Any, Any]:
    if not all(type(pair) is list for pair in pairs):
        raise MalformedError("not pairs")
    return dict(_decode_all(pair, depth) for pair in pairs)


_READERS: dict[str, tuple[Callable[[Any, int], Any], type]] = {
    "int": (lambda content, _: int(content, 16), str),
    "nan": (lambda content, _: struct.unpack(">d", bytes.fromhex(content))[0], str),
    "tuple": (lambda content, depth: tuple(_decode_all(content, depth)), list),
    "dict": (_decode_dict, list),
    "set": (lambda content, depth: set(_decode_all(content, depth)), list),
    "frozenset": (lambda content, depth: frozenset(_decode_all(content, depth)), list),
    "bytes": (lambda content, _: bytes.fromhex(content), str),
    "bytearray": (lambda content, _: bytearray.fromhex(content), str),
    "complex": (lambda content, _: complex(*struct.unpack(">dd", bytes.fromhex(content))), str),
    "type": (lambda content, _: _TYPES[content], str),
}


def dump_message(message: Any) -> bytes:
    """JSON in which each surrogate stays one: escaped, two of them would be read as one character."""
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
