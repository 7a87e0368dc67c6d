"""The input of a request for `/v1/responses`, as the messages of a chat.

A text is a message of the user. In a list, a message stays a message. A `function_call` joins the assistant's message
before it, and a `function_call_output` becomes the message of a tool. Fields that a reply gives to an item, such as its
`id` and `status`, change nothing.
"""

from collections.abc import Mapping
from typing import Any

from l2d_jax.errors import InputError, require, shown

ROLES = ("user", "assistant", "system", "developer")
TEXTS = ("input_text", "output_text", "text")  # types of the parts of a content
OF_REPLIES = {"type", "id", "status"}  # fields that a reply gives to each item
MESSAGE = {*OF_REPLIES, "role", "content", "phase"}
PART = {"type", "text", "annotations", "logprobs", "l2d_choices"}
CALL = {*OF_REPLIES, "call_id", "name", "arguments"}
RESULT = {*OF_REPLIES, "call_id", "output"}


def read_input(value: Any) -> list[dict[str, Any]]:
    """Translate the `input` of a request; raises `InputError` for items that are no text and no function call."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    is_list = isinstance(value, list) and len(value) > 0
    require(is_list, f"input must be a text, or a list of at least one item, got {shown(value)}")
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(value):
        place = f"input[{number}]"
        require(isinstance(item, Mapping), f"{place} must be an object, got {shown(item)}")
        match item.get("type") or "message":
            case "message":
                messages.append(_message(item, place))
            case "function_call":
                _add_call(messages, item, place)
            case "function_call_output":
                messages.append(_result(item, place))
            case "item_reference":
                rule = f"{place} refers to a stored item, and this server stores none, got {shown(item.get('id'))}"
                raise InputError(f"{rule}: send the item itself")
            case other:
                rule = f"{place} must be a message, a function_call or a function_call_output"
                raise InputError(f"{rule}, got the type {shown(other)}: leave it out")
    return messages


def _message(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _check_fields(item, MESSAGE, place)
    role = item.get("role")
    is_role = isinstance(role, str) and role in ROLES
    require(is_role, f"{place}.role must be one of {', '.join(ROLES)}, got {shown(role)}")
    return {"role": role, "content": _text(item.get("content"), f"{place}.content")}


def _add_call(messages: list[dict[str, Any]], item: Mapping[str, Any], place: str) -> None:
    """Add a call to the assistant's message before it, or to a new one."""
    _check_fields(item, CALL, place)
    for name in ("call_id", "name", "arguments"):
        require(isinstance(item.get(name), str), f"{place}.{name} must be text, got {shown(item.get(name))}")
    function = {"name": item["name"], "arguments": item["arguments"]}
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})


def _result(item: Mapping[str, Any], place: str) -> dict[str, Any]:
    _check_fields(item, RESULT, place)
    call = item.get("call_id")
    require(isinstance(call, str), f"{place}.call_id must be text, got {shown(call)}")
    return {"role": "tool", "tool_call_id": call, "content": _text(item.get("output"), f"{place}.output")}


def _text(value: Any, place: str) -> str:
    """A content as one text."""
    parts = [{"type": "text", "text": value}] if isinstance(value, str) else value
    require(isinstance(parts, list), f"{place} must be a text, or a list of text parts, got {shown(value)}")
    for number, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, Mapping) else None
        is_text = kind in TEXTS and isinstance(part.get("text"), str)
        problem = f"{place}[{number}] must be an input_text or output_text with a text, got {shown(kind or part)}"
        require(is_text, f"{problem}: leave it out")
        _check_fields(part, PART, f"{place}[{number}]")
    return "".join(part["text"] for part in parts)


def _check_fields(item: Mapping[str, Any], known: set[str], place: str) -> None:
    unknown = [name for name, value in item.items() if name not in known and value is not None]
    require(not unknown, f"{place} has the unknown field {shown(unknown and unknown[0])}: leave it out")
