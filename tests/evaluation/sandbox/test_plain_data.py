import collections
import enum
import math
import os
import random
import struct

import pytest

from l2d_jax.evaluation.sandbox.isolated import plain_data
from l2d_jax.evaluation.sandbox.isolated.plain_data import (
    Channel,
    ClosedError,
    MalformedError,
    NotPlainError,
    TooLargeError,
)

PLAIN = [
    None,
    True,
    0,
    -(2**63),
    10**5000,
    1.5,
    -0.0,
    math.inf,
    "line\nü\ud800\0",
    b"\0\xff",
    bytearray(b"x"),
    1 - 2j,
    complex(0.0, -0.0),
    [],
    (1, [2, (3,)]),
    {(1, 2): {"a": None}, 1: 2.0, None: 3},
    {1, frozenset({2})},
    int,
    {"int": "7"},
]


def there_and_back(value):
    return plain_data.decode_plain(plain_data.load_message(plain_data.dump_message(plain_data.encode_plain(value))))


def shown(value):
    """With the types of all that is in it."""
    if isinstance(value, set | frozenset):
        return type(value), sorted(map(repr, map(shown, value)))
    if isinstance(value, list | tuple):
        return type(value), [*map(shown, value)]
    if isinstance(value, dict):
        return dict, [shown(pair) for pair in value.items()]
    if isinstance(value, float | complex):
        return type(value), struct.pack("dd", value.real, value.imag)  # the sign of zero and of NaN included
    return type(value), hex(value) if type(value) is int else repr(value)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: ascii(value)[:20] if value != 10**5000 else "large")
def test_plain_data_comes_back(value):
    assert shown(there_and_back(value)) == shown(value)


def a_value(draw: random.Random, depth: int, *, is_key: bool = False) -> object:
    """Random plain data, whose strings are mostly of surrogates and other rare characters."""

    def characters():
        return "".join(chr(draw.choice([0, 9, 34, 92, 0xD83D, 0xDE00, 0x1F600, 0xFFFF, 0x2028, 97])) for _ in items)

    def numbers():
        return draw.choice([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 5e-324, draw.gauss(0, 1e300)])

    items = range(draw.randrange(5))
    simple = [
        lambda: draw.choice([None, True, False, int, str]),
        lambda: draw.choice([1, -1]) * draw.getrandbits(draw.choice([1, 62, 63, 64, 65, 20_000])),
        numbers,
        lambda: complex(numbers(), numbers()),
        characters,
        lambda: draw.randbytes(len(items)),
    ]
    nested = [
        lambda: tuple(a_value(draw, depth - 1, is_key=is_key) for _ in items),
        lambda: frozenset(a_value(draw, depth - 1, is_key=True) for _ in items),
    ]
    if not is_key:
        simple.append(lambda: bytearray(draw.randbytes(len(items))))
        nested += [
            lambda: [a_value(draw, depth - 1) for _ in items],
            lambda: {a_value(draw, depth - 1, is_key=True) for _ in items},
            lambda: {a_value(draw, depth - 1, is_key=True): a_value(draw, depth - 1) for _ in items},
        ]
    return draw.choice(simple + nested if depth else simple)()


def test_whatever_is_plain_arrives_as_it_was_sent():
    draw = random.Random(0)
    for _ in range(2000):
        value = a_value(draw, 4)
        assert shown(there_and_back(value)) == shown(value)


class Claim:
    """Whatever it is asked, it claims to be 42."""

    def _is_42(self, *other):
        return 42

    def __str__(self):
        return "42"

    def items(self):
        return [(42, 42)]

    def __iter__(self):
        return iter([42])

    __eq__ = __le__ = __neg__ = __add__ = __int__ = __index__ = __hash__ = _is_42


@pytest.mark.parametrize("kind", [int, float, complex, str, bytes, bytearray, list, tuple, dict, set, frozenset])
def test_a_subclass_is_sent_as_the_value_it_holds(kind):
    claimed = type("Claimed", (Claim, kind), {})()
    assert shown(there_and_back(claimed)) == shown(kind())


def test_useful_subclasses_are_plain():
    point = collections.namedtuple("Point", "x y")(1, 2)
    color = enum.IntEnum("Color", "red")
    assert shown(there_and_back([collections.Counter("aab"), point, color.red])) == shown([{"a": 2, "b": 1}, (1, 2), 1])


@pytest.mark.parametrize(
    "value", [object(), len, iter([]), range(3), type("New", (), {}), Claim(), [Claim()], {1: len}]
)
def test_what_is_not_plain_is_refused(value):
    with pytest.raises(NotPlainError):
        plain_data.encode_plain(value)


def test_depth_is_bounded():
    value = []
    for _ in range(plain_data.DEPTH - 1):
        value = [value]
    assert there_and_back(value) == value
    with pytest.raises(NotPlainError, match="nested more than 100 deep"):
        plain_data.encode_plain([value])
    with pytest.raises(MalformedError):
        plain_data.decode_plain([value])


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"int": "1", "set": []},
        {"int": 1},
        {"int": "x"},
        {"object": []},
        {"set": [[]]},
        {"dict": [[1]]},
        {"dict": ["ab"]},
        {"dict": [[[], 1]]},
        {"complex": [1, 2]},
        {"complex": [1.0]},
        {"nan": "00"},
        {"bytes": "f"},
        {"type": "object"},
        {"tuple": {}},
        [{"list": []}],
    ],
    ids=str,
)
def test_what_encode_does_not_write_is_malformed(message):
    with pytest.raises(MalformedError):
        plain_data.decode_plain(message)


@pytest.fixture
def pipe():
    reader, writer = os.pipe()
    yield Channel(reader, writer, limit=64), writer
    os.close(reader)


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", ClosedError),
        (b"\0\0", ClosedError),
        (b"\0\0\0\4[", ClosedError),
        (b"\0\0\0\x41", TooLargeError),
        (b"\xff\xff\xff\xff", TooLargeError),
        (b"\0\0\0\2[]", MalformedError),
        (b"\0\0\0\2\xff}", MalformedError),
        (b"\0\0\0\x40" + b"[" * 64, MalformedError),
    ],
    ids=repr,
)
def test_a_channel_believes_nothing(pipe, sent, error):
    channel, writer = pipe
    os.write(writer, sent)
    os.close(writer)
    with pytest.raises(error):
        channel.receive()


def test_a_channel_sends_what_is_received(pipe):
    channel, writer = pipe
    channel.send({"one": [1]})
    channel.send({"two": 2})
    assert [channel.receive(), channel.receive()] == [{"one": [1]}, {"two": 2}]
    with pytest.raises(TooLargeError):
        channel.send({"three": "3" * 64})
    os.close(writer)
    with pytest.raises(ClosedError):
        channel.send({"four": 4})


def test_json_nested_beyond_recursion_is_malformed():
    reader, writer = os.pipe()
    content = b"[" * 50_000
    os.write(writer, len(content).to_bytes(4, "big") + content)
    with pytest.raises(MalformedError):
        Channel(reader, writer, limit=2**20).receive()
    os.close(reader)
    os.close(writer)
