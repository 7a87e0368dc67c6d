"""Reads requests of OpenAI's Responses API, `/v1/responses`: each becomes a request for a chat, with the same checks.

The server stores nothing. It accepts `store: true`, which is the default of OpenAI's clients, and replies
`store: false`. A conversation goes on if the client sends its earlier items again.
"""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from l2d_jax.config.parsing import nearest
from l2d_jax.errors import InputError, require, shown
from l2d_jax.serving.api.bodies import IGNORED, OPTIONS, parse_json
from l2d_jax.serving.api.protocol import Asked, Protocol
from l2d_jax.serving.api.response_items import read_input

# Fields that mean the same in a chat; parallel_tool_calls and top_logprobs are also repeated by the reply.
SAME = OPTIONS | {"model", "stream", "seed", "stop", "label", "trace", "frequency_penalty", "presence_penalty"}
SAME |= {"logit_bias", "score_draws", "parallel_tool_calls", "top_logprobs"}
READ = {"input", "instructions", "max_output_tokens", "text", "reasoning", "tools", "tool_choice", "include"}
# max_tool_calls limits OpenAI's own tools, which this server does not have.
ACCEPTED = IGNORED | {"max_tool_calls"}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # the values that change nothing; other values are refused
    "store": (True, False),
    "background": (False,),
    "truncation": ("disabled",),
    "stream_options": ({}, {"include_obfuscation": False}),
}
STORED = {  # fields that refer to something stored, and the remedy
    "previous_response_id": "send the earlier items in input",
    "conversation": "send its items in input",
    "prompt": "send its text in instructions and input",
}
NAMES = {  # a chat's fields, and what they are called here
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
_CHAT_NAME = re.compile(
    r"""(?<!\w)'[^']*'|"[^"]*"|\b(?:max_tokens|max_completion_tokens|response_format|reasoning_effort)\b"""
)
SUMMARIES = ("auto", "concise", "detailed")
LEVELS = (  # places of a function's fields in a chat, and here
    (r"(tools\[\d+\])\.function\b", r"\1"),
    (r"tool_choice\.allowed_tools\b", "tool_choice"),
    (r"'function': \{('name': \.\.\.)\}", r"\1"),
)
LOG_PROBS = "message.output_text.logprobs"
INCLUDABLE = {  # parts of items that this server never makes; including them changes nothing
    "web_search_call.action.sources",
    "web_search_call.results",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "reasoning.encrypted_content",
}


def read_response(protocol: Protocol, data: bytes, *, query: Mapping[str, str]) -> tuple[Asked, dict[str, Any]]:
    """Read a body; also returns the fields that the reply repeats.

    Raises `InputError`, with the names that fields have in the Responses API.
    """
    body = parse_json(data)
    require(isinstance(body, Mapping), f"the body must be a JSON object, got {shown(body)}")
    body = {name: value for name, value in body.items() if value is not None}
    chat = to_chat(body)
    with _renaming():
        asked = protocol.read_values(chat, is_chat=True, query=query)
    return asked, _repeated(body)


def to_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a body without null values into that of a chat; raises `InputError`."""
    known = SAME | READ | ACCEPTED | set(NEUTRAL) | set(STORED)
    for name in body:
        hint = f": did you mean {NAMES[name]!r}?" if name in NAMES else nearest(name[:100], known)
        require(name in known, f"unknown field {shown(name)}{hint}")
    for name, remedy in STORED.items():
        rule = f"{name} refers to something stored, and this server stores none"
        require(name not in body, f"{rule}, got {shown(body.get(name))}: {remedy}")
    for name, values in NEUTRAL.items():
        value = body.get(name, values[0])
        is_neutral = any(type(value) is type(one) and value == one for one in values)
        require(is_neutral, f"{name} {shown(value)} is not supported: leave it out")
    metadata = body.get("metadata", {})
    is_metadata = isinstance(metadata, Mapping) and all(isinstance(value, str) for value in metadata.values())
    require(is_metadata, f"metadata must map names to texts, got {shown(metadata)}")
    instructions = body.get("instructions", "")
    require(isinstance(instructions, str), f"instructions must be text, got {shown(instructions)}")
    system = [{"role": "system", "content": instructions}] if instructions else []
    chat = {name: value for name, value in body.items() if name in SAME}
    chat["messages"] = [*system, *read_input(body.get("input"))]
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    return chat | _text(body) | _effort(body) | _log_probs(body) | _tools(body)


def _text(body: Mapping[str, Any]) -> dict[str, Any]:
    """The format of the answer: a json_schema has a level less here than in a chat."""
    text = _object(body, "text", {"format", "verbosity"})
    format = text.get("format")
    require(format is None or isinstance(format, Mapping), f"text.format must be an object, got {shown(format)}")
    chat = {"verbosity": text["verbosity"]} if "verbosity" in text else {}
    if format is None:
        return chat
    if format.get("type") != "json_schema":
        return chat | {"response_format": format}
    schema = {name: value for name, value in format.items() if name != "type"}
    problem = f"text.format must have its name and schema beside its type, got {shown(format)}"
    require("json_schema" not in schema, f"{problem}: move them up one level")
    return chat | {"response_format": {"type": "json_schema", "json_schema": schema}}


def _effort(body: Mapping[str, Any]) -> dict[str, Any]:
    """The named budget. A summary of reasoning may be asked for: an answer has none."""
    reasoning = _object(body, "reasoning", {"effort", "summary"})
    summary = reasoning.get("summary")
    is_known = summary is None or (isinstance(summary, str) and summary in SUMMARIES)
    require(is_known, f"reasoning.summary must be one of {', '.join(SUMMARIES)}, got {shown(summary)}")
    return {"reasoning_effort": reasoning["effort"]} if "effort" in reasoning else {}


def _log_probs(body: Mapping[str, Any]) -> dict[str, Any]:
    """Log-probabilities are wanted if they are included, or if there should be some besides each token's."""
    include, known = body.get("include", []), {LOG_PROBS, *INCLUDABLE}
    require(isinstance(include, list), f"include must be a list, got {shown(include)}")
    for name in include:
        is_known = isinstance(name, str) and name in known
        require(is_known, f"include has no {shown(name)} here: leave it out, or take {LOG_PROBS}")
    return {"logprobs": True} if LOG_PROBS in include or body.get("top_logprobs") else {}


def _tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """Tools and their choice: the fields of a function have a level less here than in a chat."""
    tools, choice = body.get("tools", []), body.get("tool_choice", "auto")
    require(isinstance(tools, list), f"tools must be a list, got {shown(tools)}")
    chat: dict[str, Any] = {"tools": [_function(tool, f"tools[{number}]") for number, tool in enumerate(tools)]}
    if not isinstance(choice, Mapping):
        chat["tool_choice"] = choice
    elif choice.get("type") == "allowed_tools":
        named: Any = choice.get("tools")
        require(isinstance(named, list), f"tool_choice.tools must be a list, got {shown(named)}")
        functions = [_function(tool, f"tool_choice.tools[{number}]") for number, tool in enumerate(named)]
        rest = {name: value for name, value in choice.items() if name != "type"}
        chat["tool_choice"] = {"type": "allowed_tools", "allowed_tools": rest | {"tools": functions}}
    else:
        chat["tool_choice"] = _function(choice, "tool_choice")
    return chat


def _function(tool: Any, place: str) -> dict[str, Any]:
    kind = tool.get("type") if isinstance(tool, Mapping) else tool
    require(kind == "function", f"{place} must be of the type function, got {shown(kind)}: leave it out")
    require("function" not in tool, f"{place}.function is a level too much: give its fields in {place}")
    require(isinstance(tool.get("name"), str), f"{place}.name must be text, got {shown(tool.get('name'))}")
    fields = {name: value for name, value in tool.items() if name != "type" and value is not None}
    return {"type": "function", "function": fields}


def _object(body: Mapping[str, Any], field: str, known: set[str]) -> dict[str, Any]:
    """A field whose value is an object, without null values."""
    value = body.get(field, {})
    require(isinstance(value, Mapping), f"{field} must be an object, got {shown(value)}")
    given = {name: one for name, one in value.items() if one is not None}
    for name in given:
        problem = f"{field} has no {shown(name)} here"
        require(name in known, f"{problem}: leave it out")
    return given


def _repeated(body: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a reply repeats."""
    text = {name: value for name, value in body.get("text", {}).items() if value is not None}
    repeated = {
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata", {}),
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": {"effort": body.get("reasoning", {}).get("effort"), "summary": None},
        "store": False,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": body.get("tool_choice", "auto"),
        "tools": body.get("tools", []),
        "top_logprobs": body.get("top_logprobs", 0),
        "truncation": "disabled",
    }
    return repeated | {name: body[name] for name in ("user", "safety_identifier", "prompt_cache_key") if name in body}


@contextmanager
def _renaming() -> Iterator[None]:
    """Within, an `InputError` that names a chat's field is raised with the field's name here. Quoted values stay."""
    try:
        yield
    except InputError as error:
        line = _CHAT_NAME.sub(lambda found: NAMES.get(found[0], found[0]), str(error))
        for place, own in LEVELS:
            line = re.sub(place, own, line)
        raise InputError(line) from error
