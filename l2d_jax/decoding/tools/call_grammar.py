"""The grammar of an answer that may call tools, in llguidance's dialect of Lark.

Free text never contains the tag that opens calls. Once the tag is there, only well-formed calls follow. Each text of a
format may have less whitespace than the template writes, and a call may lack the id of the template. Added tokens, such
as <tool_call>, are written as tokens, never letter by letter. After the calls, the answer ends.
"""

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import THOUGHT
from l2d_jax.decoding.tools.call_format import ID, OPTIONAL_ID, CallFormat
from l2d_jax.decoding.tools.tool_use import ToolUse

ANYTHING = "(?s:.*)"
GAP = r"[ \n]"  # whitespace that models may write before a call
IDENTITY = "[a-zA-Z0-9_.:-]{1,64}"  # the id of a call


def call_grammar(
    use: ToolUse,
    form: CallFormat,
    tokenizer: PreTrainedTokenizerFast,
    *,
    stop_ids: Sequence[int],
    json_options: dict[str, Any],
    text: str | None = None,
) -> str:
    """Write the grammar of answers with tools.

    Args:
      use: the tools, and which calls an answer may have.
      form: how calls are written.
      tokenizer: its added tokens are written as tokens.
      stop_ids: tokens that end an answer; they are no part of it.
      json_options: llguidance's options for JSON.
      text: a rule for the text of an answer without calls; None: any text.
    """
    return "\n".join(_Rules(use, form, tokenizer, stop_ids).lines(json_options, text))


def begun_calls(use: ToolUse, form: CallFormat) -> list[str]:
    """For each tool, an answer up to the first character of arguments; one for all tools if names come last."""
    thought = THOUGHT[1] if form.opens_thought and (use.is_required or form.is_bare) else ""
    before = thought + ("" if form.is_bare else form.tag) + form.opening
    names = [name + form.middle for name in use.schemas] if form.is_name_first else [""] * use.may_call
    return [before + name + "{" for name in names]


class _Rules:
    """The rules of a grammar. START is the first free text of an answer, TEXT any other."""

    def __init__(
        self, use: ToolUse, form: CallFormat, tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int]
    ) -> None:
        self._use, self._form = use, form
        added = tokenizer.added_tokens_decoder.items()
        plain = {number for number, token in added if not token.special and _is_tag(token.content)}
        self._tokens = {token.content: number for number, token in added if token.special or number in plain}
        has_order = form.has_thoughts and (form.is_bare or use.is_required)  # thoughts come before calls
        self._thought = THOUGHT if has_order else None
        marks = [form.tag] if form.tag else []
        self._marks = [*marks, *(THOUGHT if has_order else ())]
        own = {self._tokens.get(mark) for mark in self._marks} | set(stop_ids)
        thoughts = {self._tokens[mark] for mark in THOUGHT if form.has_thoughts and mark in self._tokens}
        self._free = sorted((plain | thoughts) - own)  # tokens of free text that llguidance does not take for text

    def lines(self, json_options: dict[str, Any], text: str | None) -> list[str]:
        """The lines of the grammar."""
        use, form = self._use, self._form
        rules = ["%llguidance {}", f"start: {' | '.join(self._starts(text))}", *self._text_rules()]
        rules += [] if text is None or use.is_required else [f"formatted: {text}"]
        if not use.may_call:
            return rules
        several = f" ({self._items(form.between)} call)*" if form.between is not None and not use.is_single else ""
        gap = " " * 4 if form.is_bare else ""  # in one terminal with the opening: free text would swallow it
        rules.append(f"calls: {self._items(gap + form.opening)} call{several} {self._items(form.closing)}")
        rules.append(f"call: {' | '.join(f'call_{number}' for number in range(len(use.schemas)))}")
        middle = self._items(form.middle)
        for number, (name, schema) in enumerate(use.schemas.items()):
            parts = [json.dumps(name), f"%json {json.dumps({**schema, 'x-guidance': json_options})}"]
            first, second = parts if form.is_name_first else reversed(parts)
            rules.append(f"call_{number}: {first} {middle} {second}")
        return rules

    def _starts(self, text: str | None) -> list[str]:
        """What an answer may be."""
        use, form = self._use, self._form
        tag = self._mark(form.tag) if form.tag else ""
        thought = ""
        if self._thought is not None:
            thought = "until_thought GAP? "
            thought = thought if form.opens_thought else f"({self._mark(THOUGHT[0])} {thought})? "
        starts = []
        if not use.is_required:
            starts.append("formatted" if text is not None else f"{thought if form.is_bare else ''}plain")
        if use.may_call:
            can_think = text is None or use.is_required
            before = thought if can_think and (use.is_required or form.is_bare) else ""
            starts += [f"{before}calls"] if form.is_bare else []
            if tag and text is None and not use.is_required:
                starts.append(f"{before}until_tag calls")
            elif tag:
                starts.append(f"{before}GAP? {tag} calls")
        return starts

    def _mark(self, mark: str) -> str:
        """A tag in a rule."""
        return f"<[{self._tokens[mark]}]>" if mark in self._tokens else json.dumps(mark)

    def _text_rules(self) -> Iterable[str]:
        """Rules for free text, and for free text up to a tag."""
        free = ",".join(map(str, self._free))
        excluded = [f"{ANYTHING}{_escape(mark)}{ANYTHING}" for mark in self._marks]
        openings = self._openings() if self._form.is_bare else []
        start = [*excluded, *(f"{GAP}*{opening}{ANYTHING}" for opening in openings)]
        yield _terminal("TEXT", excluded)
        yield _terminal("START", start)
        yield f"GAP: /{GAP}{{1,4}}/"
        more = f"(<[{free}]> TEXT?)*" if free else ""
        yield f"plain: START? {more}"
        if self._use.may_call and self._form.tag:
            gap = f"(START? <[{free}]> (TEXT? <[{free}]>)*)?" if free else ""
            yield from self._until("tag", self._form.tag, text="plain", gap=gap)
        if self._thought is not None:
            gap = f"(TEXT? <[{free}]>)*" if free else ""
            yield from self._until("thought", THOUGHT[1], text=f"{gap} TEXT?", gap=gap)

    def _until(self, name: str, mark: str, *, text: str, gap: str) -> Iterable[str]:
        """A rule for text up to a mark: a token after `text`, or letters that end the text after `gap`."""
        if mark in self._tokens:
            yield f"until_{name}: {text} {self._mark(mark)}"
            return
        others = [f"{ANYTHING}{_escape(other)}{ANYTHING}" for other in self._marks if other != mark]
        yield _terminal(f"UNTIL_{name.upper()}", others, match=f"{ANYTHING}{_escape(mark)}")
        yield f"ends_{name}[lazy]: UNTIL_{name.upper()}"
        yield f"until_{name}: {gap} ends_{name}"

    def _openings(self) -> list[str]:
        """The openings of bare calls, as expressions, with and without the ids that may be left out."""
        texts = [self._form.opening, OPTIONAL_ID.sub("", self._form.opening)]
        return [_loose(text).replace(_escape(ID), IDENTITY) for text in dict.fromkeys(texts)]

    def _items(self, text: str) -> str:
        """A text of the format, as the body of a rule."""
        place, items = 0, []
        for found in OPTIONAL_ID.finditer(text):
            items += [self._exact(text[place : found.start()]), f"({self._exact(found[0])})?"]
            place = found.end()
        return " ".join([*items, self._exact(text[place:])]).strip()

    def _exact(self, text: str) -> str:
        """A text without optional fields."""
        names = sorted((name for name in self._tokens if name in text), key=len, reverse=True)
        items = []
        for piece in re.split("|".join(map(re.escape, [*names, ID])).join("()"), text):
            if piece == ID:
                items.append(f"/{IDENTITY}/")
            elif piece in self._tokens:
                items.append(f"<[{self._tokens[piece]}]>")
            elif piece.strip():
                items.append(f"/{_loose(piece)}/")
            elif piece:
                items.append(f"/[ \\n]{{1,{len(piece)}}}/?")
        return " ".join(items)


def _is_tag(name: str) -> bool:
    """Whether llguidance reads an added token with this text as a token, and not as text."""
    return name.startswith("<") and name.endswith(">")


def _terminal(name: str, excluded: Sequence[str], *, match: str = "(?s:.+)") -> str:
    return " & ".join([f"{name}: /{match}/", *(f"~/{one}/" for one in excluded)])


def _loose(text: str) -> str:
    """An expression for a text in which whitespace may be missing."""
    parts = re.split(r"(\s+)", text)
    return "".join(f"[ \\n]{{0,{len(part)}}}" if part.isspace() else _escape(part) for part in parts)


def _escape(text: str) -> str:
    return "".join(one if one.isalnum() or one in "<>_" else f"\\x{{{ord(one):X}}}" for one in text)
