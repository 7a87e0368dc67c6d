"""Stop strings and streamed text against their plain definitions, whatever the tokenizer and the pieces."""

import random
import time
from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import byte_tokenizer, text_ids
from l2d_jax.decoding.stop_strings import GrowingText, StopSearch, to_text
from l2d_jax.errors import InputError
from tests.support.marks import slow
from tests.support.tiny_tokenizers import (
    merging_tokenizer,
    piece_tokenizer,
    random_text,
    stripping_tokenizer,
)

TOKENIZERS = {
    "bytes": byte_tokenizer,
    "merges": merging_tokenizer,
    "pieces": piece_tokenizer,
    "stripping": stripping_tokenizer,
}


@pytest.fixture(scope="module", params=TOKENIZERS)
def words(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    return TOKENIZERS[request.param]()


def pieces(ids: list[int], rng: random.Random) -> Iterator[tuple[list[int], bool]]:
    """The tokens in random pieces, and whether each is the last."""
    start = 0
    while start < len(ids):
        size = rng.randrange(1, 12)
        yield ids[start : start + size], start + size >= len(ids)
        start += size


def answered(ids: list[int], search: StopSearch, words: PreTrainedTokenizerFast, rng: random.Random) -> tuple[str, str]:
    """The text of an answer as a stream shows it, and as its tokens say it."""
    growing, kept, streamed, rest = GrowingText(words), list[int](), list[str](), ""
    for piece, is_last in pieces(ids, rng):
        tokens, rest, is_ended = search.add(piece, is_last=is_last)
        kept += tokens
        streamed.append(growing.add(tokens, is_last=is_last or is_ended, rest=rest))
        if is_ended:
            break
    assert "".join(streamed) == growing.shown
    return growing.shown, to_text(kept, words) + rest


@pytest.mark.parametrize("seed", [*range(30), *slow(*range(30, 90))])
def test_an_answer_ends_before_the_stop_string_that_begins_first(words: PreTrainedTokenizerFast, seed: int) -> None:
    """Random texts, of which every third has random bytes in it, with stop strings that they have or might have."""
    rng = random.Random(seed)
    text = random_text(rng, rng.randrange(1, 300 if seed % 10 == 0 else 40))
    ids = text_ids([text], words)[0]
    for _ in range(rng.randrange(1, 30) if seed % 3 == 0 else 0):
        ids.insert(rng.randrange(len(ids) + 1), rng.randrange(3, 256))
    whole = to_text(ids, words)
    assert seed % 3 == 0 or whole.strip() == text.strip()
    assert answered(ids, StopSearch((), words), words, rng) == (whole, whole)
    stops = [random_text(rng, rng.randrange(1, 4))]
    for _ in range(rng.randrange(3)):
        place = rng.randrange(len(text))
        stops.append(text[place : place + rng.randrange(1, 8)])
    if not all(to_text(text_ids([stop], words)[0], words) == stop for stop in stops):
        return  # one that this tokenizer writes differently is refused
    wanted = min((whole.split(stop)[0] for stop in stops), key=len)
    assert answered(ids, StopSearch(stops, words), words, rng) == (wanted, wanted)


@pytest.mark.parametrize("size", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("said", "stops", "wanted"),
    [
        ("ab。cd", ["。"], "ab"),
        ("ab。cd", ["cd", "。c"], "ab"),
        ("ab🎉", ["🎉"], "ab"),
        ("ab🎊🎉c", ["🎉"], "ab🎊"),
        ("abcabcd", ["abcd", "c"], "ab"),
        ("abcd", ["abcd", "c"], ""),
        ("abce", ["abcd", "c"], "ab"),
        ("abc", ["abcd", "c"], "ab"),
        ("é", ["e"], "é"),
    ],
)
def test_stop_strings_of_several_bytes_and_within_each_other(
    size: int, said: str, stops: list[str], wanted: str
) -> None:
    """No half of a character stays; the one that begins first wins, though another ends before it."""
    words, ids = byte_tokenizer(), list(said.encode())
    search, growing = StopSearch(stops, words), GrowingText(words)
    for start in range(0, len(ids), size):
        is_last = start + size >= len(ids)
        tokens, rest, is_ended = search.add(ids[start : start + size], is_last=is_last)
        growing.add(tokens, is_last=is_last or is_ended, rest=rest)
        if is_ended:
            break
    assert (growing.shown, is_ended) == (wanted, wanted != said)


def test_an_answer_that_ends_within_a_character() -> None:
    """Its bytes are shown as no character, once, and are none of a stop string."""
    words = byte_tokenizer()
    for stops in ([], ["。"]):
        ids = list("ab。".encode())[:-1]
        assert answered(ids, StopSearch(stops, words), words, random.Random(0)) == ("ab\ufffd", "ab\ufffd")


def test_text_is_given_as_soon_as_it_is_complete() -> None:
    """No stream waits for a stop string that has not begun."""
    words = byte_tokenizer()
    search, growing = StopSearch(["x" * 1000], words), GrowingText(words)
    shown = [
        growing.add(search.add(list(part), is_last=False)[0], is_last=False) for part in (b"one ", b"t\xc3", b"\xa9")
    ]
    assert shown == ["one ", "", "té"]


def test_bytes_that_no_character_has_do_not_change_those_around_them() -> None:
    """transformers shows neighbouring byte tokens as broken altogether, also those that a stream has shown."""
    words = piece_tokenizer()
    ids = [words.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "東".encode() + b"\xff"]
    assert to_text(ids, words) == "東\ufffd"


@pytest.mark.parametrize("stop", ["\udfff", "a\ud800", "x" * 2000 + "<|im_end|>"])
def test_stop_strings_that_are_refused_are_refused_in_one_short_line(stop: str) -> None:
    with pytest.raises(InputError) as caught:
        StopSearch([stop], byte_tokenizer())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("size", [1, 8])
def test_long_answers_and_long_stop_strings_take_linear_time(size: int) -> None:
    """Four of 1,900 characters that nearly occur all the time; 0.06 s in pieces of 8 tokens on a free core."""
    words, took = byte_tokenizer(), []
    stops = [("ab" * 950)[:1899] + end for end in "xyzw"]
    search = StopSearch(stops, words)
    for length in (2000, 8000):
        ids = list(b"ab" * (length // 2))
        other, growing, began = search.again(), GrowingText(words), time.process_time()
        for start in range(0, length, size):
            is_last = start + size >= length
            growing.add(other.add(ids[start : start + size], is_last=is_last)[0], is_last=is_last)
        took.append(time.process_time() - began)
        assert growing.shown == "ab" * (length // 2)
    assert took[1] < 4
    assert took[1] < 16 * took[0]  # four times as much, and not the cube of it


def test_a_long_answer_of_nothing_that_is_text() -> None:
    """Broken bytes, ids that the tokenizer lacks and special tokens keep no growing window."""
    words = byte_tokenizer()
    for token in (0xFF, 0xE6, 300, 257):
        growing = GrowingText(words)
        for _ in range(3000):
            growing.add([token], is_last=False)
        growing.add([], is_last=True)
        assert len(growing._window) < 600
        assert growing.shown == to_text([token] * 3000, words)
