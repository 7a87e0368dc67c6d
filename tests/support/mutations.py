"""Seeded damage to files: of bytes, and of values in JSON, in lines of JSON and in the headers of tensor files."""

import json
import random
import struct
from collections.abc import Callable, Iterator
from typing import Any

NUMBERS = ["0", "-1", "1", "3", "1.5", "NaN", "Infinity", "1e400", "-1e400", f"{10**30}", "1e9", "1e-320", f"{2**63}"]
VALUES = [*NUMBERS, '"x"', '""', '"\\u0000"', '"\\ud800"', '"' + "y" * 300 + '"', "null", "true", "[]", "{}", "[[1]]"]
DEEP = ["[" * 20_000, "[" * 300 + "]" * 300, '{"a":' * 5000]
Mutation = Callable[[bytes, random.Random], bytes]


def of_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip a bit, delete, insert, overwrite, repeat or swap ranges, or cut off."""
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    b = min(b, a + rng.choice((1, 1, 2, 8, 40)))
    kind = rng.randrange(8)
    if kind <= 1 and a < len(data):
        return data[:a] + bytes([data[a] ^ 1 << rng.randrange(8)]) + data[a + 1 :]
    if kind == 2:
        return data[:a] + data[b:]
    if kind == 3:
        return data[:a] + rng.randbytes(b - a + 1) + data[a:]
    if kind == 4:
        return data[:a] + rng.randbytes(b - a) + data[b:]
    if kind == 5:
        return data[:a]
    if kind == 6:
        return data[:b] + data[a:]
    c = rng.randrange(len(data) - (b - a) + 1)
    low, high, size = min(a, c), max(a, c), b - a
    if low + size > high:
        return data[:a] + data[a:b][::-1] + data[b:]
    return (
        data[:low] + data[high : high + size] + data[low + size : high] + data[low : low + size] + data[high + size :]
    )


def _places(node: Any, rng: random.Random) -> list[Any]:
    """The keys on the way to a node: each level is as likely as the next, however many children it has."""
    way: list[Any] = []
    while isinstance(node, dict | list) and node and (not way or rng.random() < 0.75):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        way.append(key)
        node = node[key]
    return way


def of_json(data: bytes, rng: random.Random) -> bytes:
    """Replace, remove, repeat, rename or exchange a value somewhere in a JSON text, or nest it too deep."""
    whole = json.loads(data)
    way = _places(whole, rng)
    node = whole
    for key in way[:-1]:
        node = node[key]
    key, kind, mark = way[-1], rng.randrange(10), "@MARK@"
    text = rng.choice(VALUES)
    if kind == 0:
        text = rng.choice(DEEP)
    elif kind == 1:
        del node[key]
        return json.dumps(whole).encode()
    elif kind == 2 and isinstance(node, dict):
        value = json.dumps(node.pop(key))
        node[mark] = 0
        name = json.dumps(key)
        return json.dumps(whole).replace(f'"{mark}": 0', f"{name}: {value}, {name}: {text}").encode()
    elif kind == 3 and isinstance(node, dict):
        node[key + rng.choice("xs_ ")] = node.pop(key)
        return json.dumps(whole).encode()
    elif kind == 4:
        other = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        node[key], node[other] = node[other], node[key]
        return json.dumps(whole).encode()
    elif kind == 5 and isinstance(node[key], int | float):
        text = json.dumps(node[key] * rng.choice((2, -1, 10, 0.5)) + rng.choice((0, 1, -1)))
    node[key] = mark
    return json.dumps(whole).replace(f'"{mark}"', text).encode()


STRANGE = ["null", "5", '"x"', "[]", "{}", "1e999", f"{10**30}", '"' + "y" * 10_000 + '"', "true"]


def every_value(data: bytes) -> Iterator[tuple[str, bytes]]:
    """A JSON text with each of its values removed, or replaced by something strange, and what was done."""

    def ways(node: Any, way: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        children = node.items() if isinstance(node, dict) else enumerate(node[:2]) if isinstance(node, list) else ()
        for key, child in children:
            yield (*way, key)
            yield from ways(child, (*way, key))

    for way in ways(json.loads(data), ()):
        for text in (None, *STRANGE):
            whole = node = json.loads(data)
            for key in way[:-1]:
                node = node[key]
            node[way[-1]] = "@MARK@"
            if text is None:
                del node[way[-1]]
            yield (
                f"{'.'.join(map(str, way))} {(text or 'removed')[:40]}",
                json.dumps(whole).replace('"@MARK@"', text or "").encode(),
            )


def of_json_or_bytes(data: bytes, rng: random.Random) -> bytes:
    return (of_json if rng.random() < 0.6 else of_bytes)(data, rng)


def of_lines(data: bytes, rng: random.Random) -> bytes:
    """Damage a line of JSON, or the bytes of the whole file; two lines may change places, or one be said twice."""
    lines = data.splitlines(keepends=True)
    i, kind = rng.randrange(len(lines)), rng.randrange(10)
    if kind == 0:
        return of_bytes(data, rng)
    if kind == 1:
        lines.insert(i, rng.choice(lines))
    elif kind == 2:
        lines[i] = rng.choice(["3", "[]", "null", '"x"', "{}", "", "\xff", *DEEP]).encode("latin-1") + b"\n"
    elif kind == 3:
        j = rng.randrange(len(lines))
        lines[i], lines[j] = lines[j], lines[i]
    else:
        lines[i] = of_json_or_bytes(lines[i].rstrip(b"\n"), rng) + b"\n"
    return b"".join(lines)


def of_safetensors_header(data: bytes, rng: random.Random) -> bytes:
    """Damage the header of a safetensors file, with or without the length that fits."""
    size = 8 + int.from_bytes(data[:8], "little")
    if rng.random() < 0.4:
        return of_bytes(data[:size], rng) + data[size:]
    header = of_json(data[8:size], rng)
    return len(header).to_bytes(8, "little") + header + data[size:]


def of_gguf_header(data: bytes, rng: random.Random, *, names: list[str]) -> bytes:
    """Damage the bytes before the tensors of a GGUF file, or redirect or retype an entry of its table of tensors."""
    fields = []  # places of extents, kinds and offsets
    for name in names:
        at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
        count = int.from_bytes(data[at : at + 4], "little")
        fields.append([(at, 4), *((at + 4 + 8 * i, 8) for i in range(count))])
        fields[-1] += [(at + 4 + 8 * count, 4), (at + 8 + 8 * count, 8)]
    end = fields[-1][-1][0] + 8
    if rng.random() < 0.4:
        return of_bytes(data[:end], rng) + data[end:]
    entry = rng.choice(fields)
    at, size = rng.choice([*entry, *entry[-2:], entry[-1]])
    other = rng.choice(fields)
    values = [int.from_bytes(data[place : place + width], "little") for place, width in other]
    old = int.from_bytes(data[at : at + size], "little")
    chosen = rng.choice(
        [values[-1], values[-2], old + 32, old - 32, old + 4, 0, 1, 2, 24, 25, 26, 28, 30, 2**31, 2**63]
    )
    if rng.random() < 0.2 and size == 8:  # two entries exchange their offsets
        (a, _), (b, _) = sorted((entry[-1], other[-1]))
        if a != b:
            return data[:a] + data[b : b + 8] + data[a + 8 : b] + data[a : a + 8] + data[b + 8 :]
    return data[:at] + (chosen % 2 ** (8 * size)).to_bytes(size, "little") + data[at + size :]
