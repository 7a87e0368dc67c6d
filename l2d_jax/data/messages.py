"""Checks the messages of a conversation, from a row or a request, and converts them for chat templates.

Contents are text. A list of parts, as OpenAI's clients send it, becomes the text of its parts. A message of the
assistant that calls tools may have no content. Arguments of a call that are JSON text become an object. All other
fields of a message, such as `name` or `tool_call_id`, are passed to the template.
"""

import contextlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check_text

Message: TypeAlias = Mapping[str, Any]  # "role", "content", and other fields for the chat template

THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # field names for the thought of an answer
WEIGHT = "weight"  # field of an assistant message in OpenAI's finetuning format; 0: the message is not learnt


def read_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Check messages and convert them for a chat template, without weights; raises `InputError`."""
    require(len(messages) > 0, "a conversation needs at least one message, got none: remove it")
    return [_read_message(message, number) for number, message in enumerate(messages)]


def is_learnt(message: Message) -> bool:
    """Whether an assistant message has a loss; raises `InputError` for a weight other than 0 or 1."""
    weight = message.get(WEIGHT)
    rule = "the 'weight' of a message is 0 or 1 (no loss on an answer, or learn it)"
    require(weight is None or (not isinstance(weight, bool) and weight in (0, 1)), f"{rule}, got {shown(weight)}")
    if weight == 1 and message.get("role") != "assistant":
        raise InputError(f"only answers of the assistant are learnt, not a message of {shown(message.get('role'))}")
    return weight != 0 and message.get("role") == "assistant"


def read_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Read the JSON schemas of tools, given as a list or as JSON text; None if there are none. Raises `InputError`."""
    rule = "'tools' must be a list of JSON schemas, or a JSON text of one"
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise InputError(f"{rule}, got {shown(tools)}: fix it") from None
    if tools is None or (isinstance(tools, list | tuple) and not tools):
        return None
    if not (isinstance(tools, list | tuple) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InputError(f"{rule}, got {shown(tools)}: fix it")
    return [_plain(tool, "a tool") for tool in tools]


def _read_message(message: Any, number: int) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"a message is an object with role and content, got {shown(message)}")
    is_learnt(message)
    # transformers also drops null values: many templates would write "None".
    read = {name: _plain(value, "a message") for name, value in message.items() if value is not None and name != WEIGHT}
    thoughts = [read[name] for name in THOUGHTS if name in read]
    if thoughts:  # as in transformers: templates read different names
        read = {"thinking": thoughts[0], **read, "reasoning_content": thoughts[0]}
    if isinstance(read.get("content"), list):
        read["content"] = _join(read["content"], number)
    calls = read.get("tool_calls")
    if calls is not None:
        read["tool_calls"] = _read_calls(calls, number)
    needed = ("role",) if calls and read.get("role") == "assistant" else ("role", "content")
    for name in ("role", "content"):
        value = read.get(name)
        if not (isinstance(value, str) or (value is None and name not in needed)):
            raise InputError(f"{name!r} of every message must be text, got {shown(value)} in message {number}")
    return read


def _join(parts: list[Any], number: int) -> str:
    """Join the text parts of a content."""
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else None
        if not (kind == "text" and isinstance(part.get("text"), str)):
            rule = "'content' of every message must be text, or parts of type 'text' with a 'text'"
            raise InputError(f"{rule}, got {shown(kind or part)} in message {number}: leave it out")
    return "".join(part["text"] for part in parts)


def _read_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Read tool calls: each has the name of a function and an object of arguments."""
    if not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise InputError(f"'tool_calls' must be a list of objects, got {shown(calls)} in message {number}")
    read = []
    for call in calls:
        function = call.get("function", call)
        if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
            raise InputError(f"a tool call needs a function with a name, got {shown(call)} in message {number}")
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # the check below reports it
                arguments = json.loads(arguments) if arguments.strip() else {}
        if not isinstance(arguments, dict):
            rule = "the arguments of a tool call must be an object, or a JSON text of one"
            raise InputError(f"{rule}, got {shown(arguments)} in message {number}: fix them")
        function = {**function, "arguments": _plain(arguments, "a tool call")}
        read.append({**call, "function": function} if "function" in call else function)
    return read


def _plain(value: Any, what: str) -> Any:
    """A value of JSON's types alone, with texts that are UTF-8; of anything else, its type, as transformers has it."""
    if isinstance(value, str):
        check_text(value, f"the text of {what}")
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {_plain(name, what): _plain(part, what) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part, what) for part in value]
    return f"<{type(value).__name__}>"
