"""The text of answers that are still being generated, and the search for stop strings in it.

The cost of a token depends neither on the length of the answer nor on the length of the stop strings: only the newest
tokens are converted to text, and each character is compared once (Knuth, Morris and Pratt).
"""

import functools
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from copy import copy
from types import MappingProxyType

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import text_ids
from l2d_jax.errors import InputError, shown
from l2d_jax.files import check_text

PARTIAL = "\ufffd"  # shown for invalid bytes, and for a character whose bytes are not complete yet
LAST = 8  # number of tokens before a stop string among which one that ends at a full character is looked for
GARBLED = 3  # largest number of wrong characters at the start of a text whose first token begins within a character
CONTEXT = 16  # tokens decoded in front of new ones, because a decoder may drop the first space of a text
WINDOW, LONGEST_WINDOW = 48, 512  # window sizes at which old tokens are dropped: if that is safe, and in any case
NO_MARKERS: Mapping[int, str] = MappingProxyType({})


class StopSearch:
    """Finds stop strings in an answer that arrives token by token, and holds back what may begin a stop string.

    The answer ends before the stop string that begins first, however the text is divided into tokens.
    """

    def __init__(self, stops: Sequence[str], tokenizer: PreTrainedTokenizerFast | None) -> None:
        """`stops` are texts or names of special tokens; raises `InputError` for one that no answer can contain."""
        self._matches: list[_Match] = []
        self._stop_ids: list[int] = []
        for stop in stops:
            if tokenizer is None:
                raise InputError("stop strings need a tokenizer, and the model folder has none: add its files")
            check_text(stop, "a stop string")
            if stop and to_text(text_ids([stop], tokenizer)[0], tokenizer) == stop:
                self._matches.append(_Match(stop))
            elif stop in tokenizer.added_tokens_encoder:
                self._stop_ids.append(tokenizer.added_tokens_encoder[stop])
            else:
                problem = f"the stop string {shown(stop)} cannot occur in an answer: special tokens are left out of it"
                raise InputError(f"{problem}: give ordinary text or a single special token")
        self._tokenizer = tokenizer
        self._start()

    def _start(self) -> None:
        self._text = None if self._tokenizer is None else GrowingText(self._tokenizer)
        self._ends: deque[tuple[int, int]] = deque()  # (tokens, characters) of prefixes that are still held back
        self._released, self._length = 0, 0  # numbers of tokens and characters that `add` has returned

    def again(self) -> "StopSearch":
        """A search for the same strings in another answer."""
        other = copy(self)
        other._matches = [match.again() for match in self._matches]
        other._start()
        return other

    def add(self, ids: Sequence[int], *, is_last: bool) -> tuple[list[int], str, bool]:
        """Add new tokens to the answer.

        Returns the tokens that can no longer belong to a stop string; the text before the stop string in the token
        where the string begins (this token is not returned); and whether a stop string has ended the answer.
        """
        end = min((ids.index(stop) for stop in self._stop_ids if stop in ids), default=len(ids))
        has_stop_id = end < len(ids)
        if not self._matches or self._text is None:
            return list(ids[:end]), "", has_stop_id
        is_last = is_last or has_stop_id
        new = self._text.add(ids[:end], is_last=is_last)
        for match in self._matches:
            match.read(new)
        if self._text.is_whole:
            self._ends.append((len(self._text.ids), self._text.length))
        found = min(match.found for match in self._matches)
        begun = math.inf if is_last else min(match.begun for match in self._matches)
        if found < math.inf and found <= begun:
            kept, rest = self._cut(int(found))
            return kept, rest, True
        before = self._released
        while self._ends and self._ends[0][1] <= min(found, begun):
            self._released, self._length = self._ends.popleft()
        if is_last:
            self._released = len(self._text.ids)
        return self._text.ids[before : self._released], "", has_stop_id

    def _cut(self, place: int) -> tuple[list[int], str]:
        """Cut the answer at a place of its text: the remaining tokens before it, and the text after them up to it.

        The tokens end at a full character, so that they give the same text as within the answer.
        """
        assert self._text is not None
        ids, text, first = self._text.ids, self._text.shown, self._released
        context = ids[max(0, first - CONTEXT) : first]
        before = self._length - len(to_text(context, self._tokenizer))

        def end(count: int) -> tuple[int, bool]:
            said = to_text([*context, *ids[first : first + count]], self._tokenizer)
            return before + len(said), not said.endswith(PARTIAL)

        low, high = 0, len(ids) - first
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if end(middle)[0] <= place else (low, middle - 1)
        for count in range(low, max(0, low - LAST), -1):
            length, is_whole = end(count)
            if is_whole and length <= place:
                return ids[first : first + count], text[length:place]
        return [], text[self._length : place]


class _Match:
    """A stop string, and how much of it matches the end of the text."""

    def __init__(self, stop: str) -> None:
        self._stop = stop
        self._borders = [0]  # for each prefix, the length of its longest proper prefix that is also its suffix
        for place in range(1, len(stop)):
            border = self._borders[-1]
            while border and stop[border] != stop[place]:
                border = self._borders[border - 1]
            self._borders.append(border + (stop[border] == stop[place]))
        self._start()

    def _start(self) -> None:
        self._length, self._matched = 0, 0  # length of the text; matched characters of the string at its end
        self.found: int | float = math.inf  # place where the string begins; infinite: it has not occurred

    def again(self) -> "_Match":
        """A match of the same string in another text."""
        other = copy(self)
        other._start()
        return other

    def read(self, text: str) -> None:
        """Read more text, up to the first occurrence."""
        stop, borders, matched = self._stop, self._borders, self._matched
        for place, character in enumerate(text if self.found == math.inf else "", self._length + 1):
            while matched and stop[matched] != character:
                matched = borders[matched - 1]
            matched += stop[matched] == character
            if matched == len(stop):
                self.found = place - matched
                return
        self._length, self._matched = self._length + len(text), matched

    @property
    def begun(self) -> int | float:
        """The place where an occurrence begins that further characters may complete."""
        return math.inf if self.found < math.inf else self._length - self._matched


class GrowingText:
    """The text of an answer that arrives token by token, in pieces of complete characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, *, markers: Mapping[int, str] = NO_MARKERS) -> None:
        """`markers` are the special tokens that the text shows."""
        self._tokenizer, self._markers = tokenizer, markers
        self.ids: list[int] = []
        self.length = 0  # length of the text, in characters
        self.is_whole = True  # whether the tokens so far end at a full character
        self._pieces: list[str] = []
        self._window: list[int] = []  # the newest tokens
        self._sent = 0  # characters of the window's text that have been returned

    @property
    def shown(self) -> str:
        """The text so far."""
        self._pieces = ["".join(self._pieces)]
        return self._pieces[0]

    def add(self, ids: Sequence[int], *, is_last: bool, rest: str = "") -> str:
        """Add new tokens, and `rest`, the text of a token that was cut; returns what they add to the text."""
        self.ids += ids
        self._window += ids
        text = to_text(self._window, self._tokenizer, markers=self._markers)
        self.is_whole = is_last or not text.endswith(PARTIAL)
        if not self.is_whole:
            text = text.removesuffix(PARTIAL)
        new, self._sent = text[self._sent :] + rest, max(self._sent, len(text))
        if len(self._window) > WINDOW:
            self._shorten(text)
        self.length += len(new)
        self._pieces.append(new)
        return new

    def _shorten(self, text: str) -> None:
        """Drop the oldest tokens of the window, whose text is `text`, if the text of the others stays the same."""
        window = self._window[-CONTEXT:]
        shorter = to_text(window, self._tokenizer, markers=self._markers)
        shorter = shorter if self.is_whole else shorter.removesuffix(PARTIAL)
        is_same = len(shorter) > GARBLED and text.endswith(shorter[GARBLED:])
        if is_same or len(self._window) > LONGEST_WINDOW:
            self._window, self._sent = window, self._sent - len(text) + len(shorter)


def to_text(
    ids: Sequence[int], tokenizer: PreTrainedTokenizerFast | None, *, markers: Mapping[int, str] = NO_MARKERS
) -> str:
    """Convert an answer to text, without special tokens other than `markers`. The tokenizer must not be None.

    Tokens of single bytes are joined and shown character by character. transformers shows none of them as soon as one
    byte fits no character, and so would take back text that a stream has already shown.
    """
    if not markers.keys().isdisjoint(ids):
        groups = itertools.groupby(ids, lambda token: token if token in markers else None)
        texts = [
            to_text([*group], tokenizer) if marker is None else markers[marker] * len([*group])
            for marker, group in groups
        ]
        return "".join(texts)
    assert tokenizer is not None
    backend, single = tokenizer.backend_tokenizer, _single_bytes(tokenizer)
    if single.isdisjoint(ids):
        text = backend.decode(list(ids), skip_special_tokens=True)
    else:
        text = backend.decoder.decode(_join_bytes(ids, tokenizer, single))
    # No clean-up as in transformers, which turns "a" and " ." into "a.": a stream cannot take a space back.
    assert isinstance(text, str)
    return text


def _join_bytes(ids: Sequence[int], tokenizer: PreTrainedTokenizerFast, single: frozenset[int]) -> list[str]:
    """The texts of tokens without special ones; neighbouring byte tokens are joined."""
    special = tokenizer.added_tokens_decoder
    shown = (token for token in ids if not (token in special and special[token].special))
    tokens: list[str] = []
    for is_byte, group in itertools.groupby(shown, single.__contains__):
        texts = [text for token in group if (text := tokenizer.backend_tokenizer.id_to_token(token)) is not None]
        tokens += [bytes(int(text[3:5], 16) for text in texts).decode(errors="replace")] if is_byte else texts
    return tokens


@functools.lru_cache(maxsize=8)
def _single_bytes(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """The ids of the tokens <0x00> to <0xFF>, if the tokenizer's decoder reads them as bytes."""
    backend = tokenizer.backend_tokenizer
    if b"ByteFallback" not in (backend.decoder.__getstate__() if backend.decoder else b""):
        return frozenset()
    return frozenset(token for byte in range(256) if (token := backend.token_to_id(f"<0x{byte:02X}>")) is not None)
