"""The formats of rows: which columns a row may have, and how it becomes a conversation.

If a row has the columns of several formats, the first in `FORMATS` counts. A pair of texts becomes a message of the
user and an answer, and goes through the chat template, just as a prompt does in generation.
"""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from l2d_jax.data.messages import Message
from l2d_jax.errors import InputError, require, shorten, shown

SHAREGPT = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "model": "assistant"}
SHAREGPT |= {"system": "system", "tool": "tool", "observation": "tool"}
CALL = "function_call"  # in ShareGPT's rows, a tool call of the assistant, as JSON


class Conversation(NamedTuple):
    """The content of a row."""

    messages: Sequence[Message]
    tools: Any  # JSON schemas, or a JSON text of them; None: no tools


def conversation_of(row: Mapping[str, Any]) -> Conversation:
    """Convert a row to a conversation; raises `InputError`."""
    for columns, read in FORMATS.items():
        if all(row.get(name) is not None for name in columns):
            return Conversation(read(row), row.get("tools"))
    for columns in FORMATS:  # report the missing value
        if has_columns(row, columns):
            name = next(name for name in columns if row[name] is None)
            kind = "a list of messages" if len(columns) == 1 else "text"
            raise InputError(f"{name!r} must be {kind}, got None: leave that row out")
    raise AssertionError(row)


def has_columns(found: Collection[str], columns: Collection[str]) -> bool:
    """Whether all `columns` are in `found`."""
    return set(columns) <= set(found)


def check_columns(found: Collection[str], name: str) -> None:
    """Raise `InputError`, which says how to convert rows, if they match no format."""
    known = ", ".join(" and ".join(columns) for columns in FORMATS)
    there = shorten(", ".join(sorted(found)), 35)
    rule = f"rows need {known}, but {shorten(name, 35)} has {there}"
    pairs = "[{'prompt': r['a'], 'completion': r['b']} for r in map(json.loads, open(F))]"
    remedy = f"datasets.Dataset.from_list({pairs}).to_json(F2)"
    require(any(has_columns(found, columns) for columns in FORMATS), f"{rule}: {remedy}")


def _messages(row: Mapping[str, Any], name: str = "messages") -> list[Message]:
    messages = row[name]
    if not (isinstance(messages, list) and all(isinstance(message, Mapping) for message in messages)):
        raise InputError(f"{name!r} must be a list of objects with role and content, got {shown(messages)}")
    return messages


def _pair(question: Any, answer: Any, row: Mapping[str, Any]) -> list[Message]:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return _with_system(messages, row)


def _with_system(messages: list[Any], row: Mapping[str, Any]) -> list[Message]:
    """Put the text of the column `system`, if a row has one, before the messages."""
    text = row.get("system")
    return [{"role": "system", "content": text}, *messages] if text not in (None, "") else messages


def _prompt_and_completion(row: Mapping[str, Any]) -> list[Message]:
    """TRL's columns: texts or messages. Only messages of the completion are learnt, as in TRL."""
    prompt, completion = row["prompt"], row["completion"]
    if isinstance(prompt, str) and isinstance(completion, str):
        return _pair(prompt, completion, row)
    before = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _messages(row, "prompt")
    before = [{**one, "weight": 0} if one.get("role") == "assistant" else one for one in before]
    if isinstance(completion, str):
        return _with_system([*before, {"role": "assistant", "content": completion}], row)
    return _with_system([*before, *_messages(row, "completion")], row)


def _instruction(row: Mapping[str, Any]) -> list[Message]:
    """Alpaca's columns: the input, if there is one, follows the instruction after an empty line."""
    instruction, given = row["instruction"], row.get("input")
    if isinstance(instruction, str) and isinstance(given, str) and given.strip():
        instruction = f"{instruction}\n\n{given}"
    elif not isinstance(given, str | None):
        raise InputError(f"'input' must be text, got {shown(given)}")
    return _pair(instruction, row["output"], row)


def _conversations(row: Mapping[str, Any]) -> list[Message]:
    """ShareGPT's turns, or messages under that name."""
    turns = _messages(row, "conversations")
    return _with_system([turn if "from" not in turn else _turn(turn) for turn in turns], row)


def _turn(turn: Message) -> Message:
    speaker, text = turn["from"], turn.get("value")
    others = {name: value for name, value in turn.items() if name not in ("from", "value")}
    if speaker == CALL:
        try:
            call = json.loads(text) if isinstance(text, str) else text
        except (ValueError, RecursionError):
            raise InputError(f"a turn of {CALL!r} must be a call as JSON, got {shown(text)}: fix it") from None
        return {**others, "role": "assistant", "tool_calls": [{"type": "function", "function": call}]}
    known = f"a turn of 'conversations' is from one of {', '.join([*SHAREGPT, CALL])}"
    require(isinstance(speaker, str) and speaker in SHAREGPT, f"{known}, got {shown(speaker)}: rename it")
    return {**others, "role": SHAREGPT[speaker], "content": text}


FORMATS: dict[tuple[str, ...], Callable[[Mapping[str, Any]], list[Message]]] = {
    ("messages",): _messages,
    ("conversations",): _conversations,
    ("prompt", "completion"): _prompt_and_completion,
    ("instruction", "output"): _instruction,
    ("question", "answer"): lambda row: _pair(row["question"], row["answer"], row),
}
TEXTS = (*(name for columns in FORMATS for name in columns), "input", "system", "tools")  # the content of a row
COLUMNS = (*TEXTS, "class", "working")  # all columns that are read
PLACE = "place"  # column with the number of a row in its file, if some rows were taken away
