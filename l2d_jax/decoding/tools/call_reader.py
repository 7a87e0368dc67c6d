"""Reads calls of tools from the text of an answer, as it grows or at once.

Around names and arguments, whitespace does not matter. What is no call stays text. Text before a call loses its
whitespace at the end, which the template writes with the call. A call that is cut off before its arguments is left out.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import THOUGHT, stop_ids
from l2d_jax.decoding.tools.call_format import ID, OPTIONAL_ID, CallFormat, find_call_format
from l2d_jax.decoding.tools.json_object import JsonObject

NAME = re.compile(r"\s*([a-zA-Z0-9_.-]*)")
IDENTITY = re.compile(r"[^\s\"'<>\[\]{},]*")  # the id of a call
PARTIAL = -1  # the end of a match that may still come
Stage = Literal["text", "opening", "name", "middle", "arguments", "after"]


class ToolCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: str  # JSON text; incomplete if the answer was cut


class Part(NamedTuple):
    """New text of an answer, or the next characters of the arguments of a call."""

    text: str
    call: int | None = None  # number of the call; None: text
    name: str | None = None  # name of the called tool, in the first part of a call


def parse_tool_calls(answer: str, tokenizer: PreTrainedTokenizerFast) -> tuple[str, list[ToolCall]]:
    """Divide an answer of `generate(..., tools=...)` into its text and its calls, in the format of the chat template.

        text, calls = l2d_jax.parse_tool_calls(model.generate("Weather in Bern?", tools=tools), model.tokenizer)
        json.loads(calls[0].arguments)

    A call that is cut off before its arguments is left out; arguments that are cut off are no JSON. Raises
    `InputError` for a chat template that knows no tools.
    """
    reader = CallReader(find_call_format(tokenizer, stop_ids(tokenizer)))
    reader.add(answer, is_last=True)
    return reader.text, reader.calls


class CallReader:
    """Divides an answer that arrives in pieces into text and calls."""

    def __init__(self, form: CallFormat) -> None:
        self._form = form
        openings, self._middles, self._closings = map(_variants, (form.opening, form.middle, form.closing))
        tagged = [_bare(form.tag) + opening for opening in openings] if form.tag else []
        self._heads = [*tagged, *(openings if form.is_bare else [])]
        self._betweens = [] if form.between is None else _variants(form.between)
        self._first: Stage = "name" if form.is_name_first else "arguments"
        self._stage: Stage = "text"
        self._rest = ""  # text that is not read yet
        self._head = ""  # text of a call that is not certain yet
        self._is_start = True  # whether a call may begin here without a tag
        self._name, self._object = "", JsonObject()  # name and arguments of the newest call
        self._early = ""  # arguments that came before the name
        self._texts: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [ToolCall(name, "".join(arguments)) for name, arguments in self._calls]

    @property
    def is_complete(self) -> bool:
        """Whether there are calls, and the last one has all of its arguments."""
        return len(self._calls) > 0 and self._stage in ("text", "after")

    def add(self, new: str, *, is_last: bool = False) -> list[Part]:
        """Add new text; returns the parts that are certain by now. After the last text, nothing is held back."""
        self._rest += new
        parts, before = list[Part](), None
        while before != (now := (self._stage, len(self._rest), self._is_start)):
            before = now
            for part in self._read(is_last=is_last):
                parts.append(part)
                self._keep(part)
        return parts

    def _keep(self, part: Part) -> None:
        if part.call is None:
            self._texts.append(part.text)
        elif part.name is not None:
            self._calls.append((part.name, [part.text]))
        else:
            self._calls[-1][1].append(part.text)

    def _read(self, *, is_last: bool) -> Iterator[Part]:
        """Read what comes next, as far as it is certain."""
        match self._stage:
            case "text":
                yield from self._read_text(is_last=is_last)
            case "opening":
                yield from self._skip(self._heads, self._first, is_last=is_last)
            case "middle":
                after: Stage = "arguments" if self._form.is_name_first else "name"
                yield from self._skip(self._middles, after, is_last=is_last)
            case "name":
                yield from self._read_name(is_last=is_last)
            case "arguments":
                yield from self._read_arguments()
            case "after":
                self._read_end(is_last=is_last)

    def _read_text(self, *, is_last: bool) -> Iterator[Part]:
        """Read text up to a call."""
        form, thought = self._form, THOUGHT[1]
        if self._is_start and self._rest.strip():
            end = _match(self._heads if form.is_bare else [_bare(form.tag)], self._rest)
            if end != PARTIAL or is_last:
                self._is_start = False
                self._stage = "opening" if end not in (None, PARTIAL) else "text"
            return
        marks = ([thought] if form.is_bare and form.has_thoughts else []) + ([form.tag] if form.tag else [])
        marks = [] if form.begins else marks
        place, mark = min(((self._rest.index(one), one) for one in marks if one in self._rest), default=(-1, ""))
        if place < 0:
            begun = [size for one in marks for size in range(1, len(one)) if self._rest.endswith(one[:size])]
            certain = self._rest if is_last else self._rest[: len(self._rest) - max(begun, default=0)].rstrip()
            yield from self._tell(0 if self._calls and certain.isspace() else len(certain))
        elif mark == thought:
            yield from self._tell(place + len(mark))
            self._is_start = True
        else:
            yield from self._tell(len(self._rest[:place].rstrip()))
            self._stage = "opening"

    def _read_name(self, *, is_last: bool) -> Iterator[Part]:
        """Read the name of a called tool, and tell it with arguments that came before."""
        found = NAME.match(self._rest)
        assert found is not None
        if found.end() == len(self._rest) and not is_last:
            return
        self._name = found[1]
        if not found[1]:
            yield from self._give_up()
        elif self._form.is_name_first:
            self._take(found.end(), "middle")
        else:
            self._take(found.end(), "after")
            yield Part(self._early, len(self._calls), self._name)

    def _read_arguments(self) -> Iterator[Part]:
        """Read the next characters of an object of arguments."""
        is_begun = self._object.is_begun
        if not is_begun:
            self._head += self._rest[: len(self._rest) - len(self._rest.lstrip())]
            self._rest = self._rest.lstrip()
        if not self._rest:
            return
        if not (is_begun or self._rest.startswith("{")):
            yield from self._give_up()
            return
        new = self._rest[: self._object.add(self._rest)]
        is_told = self._form.is_name_first
        self._take(len(new), "arguments" if not self._object.is_complete else "after" if is_told else "middle")
        if not is_told:
            self._early += new
        elif is_begun:
            yield Part(new, len(self._calls) - 1)
        else:
            yield Part(new, len(self._calls), self._name)

    def _read_end(self, *, is_last: bool) -> None:
        """Read what follows a call: another one, or the end of all."""
        self._head, self._early, self._object = "", "", JsonObject()
        following, end = _match(self._betweens, self._rest), _match(self._closings, self._rest)
        if following == PARTIAL and not is_last:
            return
        if following not in (None, PARTIAL):
            self._take(following, self._first)
        elif end != PARTIAL or is_last:
            self._rest = "" if PARTIAL in (following, end) and end in (None, PARTIAL) else self._rest[end or 0 :]
            self._stage = "text" if self._rest else "after"

    def _skip(self, patterns: Sequence[str], after: Stage, *, is_last: bool) -> Iterator[Part]:
        """Skip one of several texts; without any of them, this was no call."""
        end = _match(patterns, self._rest)
        if end is None:
            yield from self._give_up()
        elif end != PARTIAL:
            self._take(end, after)
        elif is_last:
            self._rest = ""

    def _take(self, end: int, after: Stage) -> None:
        self._head, self._rest, self._stage = self._head + self._rest[:end], self._rest[end:], after

    def _tell(self, end: int) -> Iterator[Part]:
        """Tell the next characters as text."""
        if end:
            yield Part(self._rest[:end])
            self._rest = self._rest[end:]

    def _give_up(self) -> Iterator[Part]:
        """Tell the beginning of what was no call as text."""
        told = self._head or self._rest[:1]
        self._rest = self._rest if self._head else self._rest[1:]
        self._head, self._early, self._object, self._stage = "", "", JsonObject(), "text"
        yield Part(told)


def _bare(text: str) -> str:
    return "".join(text.split())


def _variants(text: str) -> list[str]:
    """A text of a format without its whitespace, with and without the ids that models may leave out."""
    return list(dict.fromkeys([_bare(text), _bare(OPTIONAL_ID.sub("", text))]))


def _match(patterns: Sequence[str], text: str) -> int | None:
    """The end of the longest pattern that begins a text, whitespace aside; `PARTIAL` if the text ends first."""
    ends = {_end_of_pattern(pattern, text) for pattern in patterns} - {None}
    return max((end for end in ends if end is not None), default=None)


def _end_of_pattern(pattern: str, text: str) -> int | None:
    place = 0
    for character in pattern:
        while place < len(text) and text[place].isspace():
            place += 1
        if character == ID and (found := IDENTITY.match(text, place)) is not None:
            place = found.end()
        elif place < len(text) and text[place] == character:
            place += 1
            continue
        if place == len(text):
            return PARTIAL
        if character != ID:
            return None
    return place
