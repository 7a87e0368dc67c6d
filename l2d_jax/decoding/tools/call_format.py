"""How a chat template writes the calls of tools: found by rendering calls of two invented tools.

Most templates write a name and an object of arguments within fixed text, such as Qwen's

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Bern"}}
    </tool_call>

`find_call_format` takes such a text apart, so no model is known by its name. A tag opens the calls: an added token, or
a word such as <tool_call>. Where a template writes bare JSON, as Llama 3's, a call must begin the answer.
"""

import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import THOUGHT, find_template, render_chat
from l2d_jax.errors import InputError, require, shown

ID = "\ue000"  # stands for the id of a call in the texts of a format
OPTIONAL_ID = re.compile(rf',\s*"[^"]*"\s*:\s*"{ID}"|"[^"]*"\s*:\s*"{ID}"\s*,\s*')  # models may leave this field out
PYTHON_TAG = "<|python_tag|>"  # Llama 3's models may write it before a call; their templates leave it out
TAG = re.compile(r"<[^<>{}\s]+>|\[[^\[\]{}\s]+\]")
ASKED = [{"role": "user", "content": "Hi"}]
NAMES, IDS, VALUES = ("invented_a", "invented_b"), ("callAAAA1", "callBBBB2"), ("value_a", "value_b")
PARAMETERS = {"type": "object", "properties": {"word": {"type": "string", "description": "A word."}}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": PARAMETERS}}
    for name in NAMES
]


@dataclass(frozen=True)
class CallFormat:
    """The texts around the names and arguments of calls; `ID` stands for the id of a call."""

    tag: str  # text that opens calls; "": none does
    is_bare: bool  # whether calls may begin an answer without the tag
    opening: str  # text after the tag, before the first call
    middle: str  # text between name and arguments, or between arguments and name
    closing: str  # text after the last call
    between: str | None  # text between two calls; None: the template writes one call alone
    is_name_first: bool  # whether the name comes before the arguments
    has_thoughts: bool  # whether the template knows thoughts
    opens_thought: bool  # whether its prompt opens one
    markers: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))  # special tokens of these texts
    begins: bool = False  # whether calls can only begin an answer, whatever the tag


def find_call_format(tokenizer: PreTrainedTokenizerFast, stop_ids: Sequence[int]) -> CallFormat:
    """The format in which the chat template for tools writes calls.

    Raises `InputError` for a template that leaves out tools or their calls, and for one that writes something else than
    names and JSON objects.
    """
    return _find(tokenizer, find_template(tokenizer, tools=TOOLS), tuple(stop_ids))


@functools.lru_cache(maxsize=8)
def _find(tokenizer: PreTrainedTokenizerFast, template: str, stop_ids: tuple[int, ...]) -> CallFormat:
    options: dict[str, Any] = {"tools": TOOLS, "template": template}
    prompt = render_chat(ASKED, tokenizer, prompt=True, **options)
    stops = [str(tokenizer.convert_ids_to_tokens(token)) for token in stop_ids]
    opening, middle, closing, is_name_first = _split(_answer(tokenizer, prompt, options, 1), stops, count=1)
    between = None
    with contextlib.suppress(InputError):  # the template writes one call alone
        two = _split(_answer(tokenizer, prompt, options, 2), stops, count=2)
        is_regular = (two[0], two[1], two[3], two[4], two[5]) == (opening, middle, middle, closing, is_name_first)
        between = two[2] if is_regular else None
    opens_thought = prompt.rstrip().endswith(THOUGHT[0])
    tag = _tag(opening, tokenizer)
    is_clear = tag != "" or opening[:1] in ("{", "[")
    problem = f"the chat template must open a tool call by a tag or by JSON, got {shown(opening)}"
    require(is_clear, f"{problem}: take one that does")
    found = PYTHON_TAG if not tag and PYTHON_TAG in tokenizer.added_tokens_encoder else tag
    has_thoughts = THOUGHT[1] in template or opens_thought
    thought = THOUGHT if has_thoughts and not tag else ()  # after a thought, bare calls may begin
    texts = "".join((found, opening, middle, closing, between or "", *thought))
    special = {number: token.content for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    return CallFormat(
        tag=found,
        is_bare=not tag,
        opening=opening[len(tag) :],
        middle=middle,
        closing=closing,
        between=between,
        is_name_first=is_name_first,
        has_thoughts=has_thoughts,
        opens_thought=opens_thought,
        markers={number: text for number, text in special.items() if text in texts},
    )


def _answer(tokenizer: PreTrainedTokenizerFast, prompt: str, options: dict[str, Any], count: int) -> str:
    """The text that the template writes for an answer with `count` calls, after its prompt and any thought."""
    calls = [
        {"id": IDS[n], "type": "function", "function": {"name": NAMES[n], "arguments": {"word": VALUES[n]}}}
        for n in range(count)
    ]
    message = {"role": "assistant", "tool_calls": calls}
    try:
        text = render_chat([*ASKED, message], tokenizer, prompt=False, **options)
    except InputError:  # some templates want a content
        text = render_chat([*ASKED, {**message, "content": ""}], tokenizer, prompt=False, **options)
    begun = prompt if text.startswith(prompt) else prompt.rstrip().removesuffix(THOUGHT[0])
    problem = f"the chat template does not write tool calls after its prompt, which ends with {shown(prompt[-20:])}"
    require(text.startswith(begun), f"{problem}: take one that does")
    return text[len(begun) :].rpartition(THOUGHT[1])[2].lstrip()


def _split(answer: str, stops: Sequence[str], *, count: int) -> tuple[Any, ...]:
    """The texts around names and arguments, and whether names come first; raises `InputError`."""
    found = list[tuple[int, int]]()
    for number in range(count):
        answer = answer.replace(IDS[number], ID)
        for sought in (re.escape(NAMES[number]), rf'\{{\s*"word"\s*:\s*"{VALUES[number]}"\s*\}}'):
            places = [match.span() for match in re.finditer(sought, answer)]
            rule = "the chat template must write a tool call as a name and a JSON object of arguments"
            require(len(places) == 1, f"{rule}, got {shown(answer)}: take one that does")
            found += places
    edges = [0, *(place for span in sorted(found) for place in span), len(answer)]
    texts = [answer[start:end] for start, end in zip(edges[::2], edges[1::2], strict=True)]
    ends = [texts[-1].index(stop) for stop in stops if stop in texts[-1]]
    texts[-1] = texts[-1][: min(ends, default=None)].rstrip()
    return (*texts, found[0] < found[1])


def _tag(opening: str, tokenizer: PreTrainedTokenizerFast) -> str:
    """The text that opens calls; "" for bare JSON."""
    names = [name for name in tokenizer.added_tokens_encoder if opening.startswith(name) and name[0] in "<["]
    word = TAG.match(opening)
    return max([*names, word[0] if word else ""], key=len) if names or word else ""
