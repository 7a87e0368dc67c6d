"""The tools of a request, and which of them its answer may or must call: OpenAI's `tools` and `tool_choice`."""

import re
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from l2d_jax.config.parsing import nearest
from l2d_jax.data.messages import read_tools
from l2d_jax.errors import require, shown

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")  # of a request
MOST = 128  # tools of a request
NAME = re.compile(r"[a-zA-Z0-9_.-]{1,64}")
MODES = ("none", "auto", "required")
OF_FUNCTION = ("name", "description", "parameters", "strict")


@dataclass(frozen=True)
class ToolUse:
    """The tools of a request, and which calls an answer may have."""

    tools: Sequence[Mapping[str, Any]]  # as the chat template gets them
    schemas: Mapping[str, Any]  # for each tool that may be called, by its name, the JSON schema of its arguments
    is_required: bool = False  # whether the answer must be calls
    is_single: bool = False  # whether it has at most one call

    @property
    def may_call(self) -> bool:
        """Whether the answer may be calls."""
        return len(self.schemas) > 0


def read_tool_use(tools: Any, choice: Any = None, *, parallel: Any = None) -> ToolUse | None:
    """Read OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`; None if there are no tools.

    Raises `InputError` for tools that are no functions, for a name that occurs twice, for parameters that are no JSON
    schema of an object, and for a choice that names no tool.
    """
    is_flag = parallel is None or isinstance(parallel, bool)
    require(is_flag, f"parallel_tool_calls must be true or false, got {shown(parallel)}: leave it out")
    read = read_tools(tools)
    if read is None:
        rule = f"tool_choice {shown(choice)} needs tools, and the request has none: give them, or leave it out"
        require(choice in (None, "none", "auto"), rule)
        return None
    require(len(read) <= MOST, f"a request has at most {MOST} tools, got {len(read)}: leave some out")
    schemas = dict[str, Any]()
    for number, tool in enumerate(read):
        name, schema = _function(tool, f"tools[{number}]")
        require(name not in schemas, f"two tools have the name {name!r}: rename one")
        schemas[name] = schema
    names, is_required, is_one = _choose(choice, schemas)
    return ToolUse(read, {name: schemas[name] for name in names}, is_required, is_one or parallel is False)


def take_tool_use(options: MutableMapping[str, Any]) -> ToolUse | None:
    """Take the fields that `read_tool_use` reads out of `options`; raises `InputError` as that does."""
    tools, choice, parallel = (options.pop(name, None) for name in FIELDS)
    return read_tool_use(tools, choice, parallel=parallel)


def _function(tool: Mapping[str, Any], place: str) -> tuple[str, Any]:
    """The name of a tool, and the schema of its arguments."""
    _check_keys(tool, ("type", "function"), place)
    kind = tool.get("type")
    require(kind == "function", f"{place}.type must be 'function', got {shown(kind)}: declare the tool as one")
    function = tool.get("function")
    require(isinstance(function, Mapping), f"{place}.function must be an object, got {shown(function)}: write {{...}}")
    assert isinstance(function, Mapping)
    _check_keys(function, OF_FUNCTION, f"{place}.function")
    name, schema, strict = function.get("name"), function.get("parameters"), function.get("strict")
    is_name = isinstance(name, str) and NAME.fullmatch(name) is not None
    rule = f"{place}.function.name must have 1 to 64 letters, digits, '_', '-' or '.'"
    require(is_name, f"{rule}, got {shown(name)}: rename it")
    about = function.get("description")
    is_text = about is None or isinstance(about, str)
    require(is_text, f"{place}.function.description must be text, got {shown(about)}: write one")
    is_flag = strict is None or isinstance(strict, bool)
    require(is_flag, f"{place}.function.strict must be true or false, got {shown(strict)}: leave it out")
    if schema is None:  # a function without parameters, as OpenAI has it
        schema = {"properties": {}, "additionalProperties": False}
    is_object = isinstance(schema, Mapping) and schema.get("type", "object") == "object"
    rule = f"{place}.function.parameters must be a JSON schema of type 'object'"
    require(is_object, f"{rule}, got {shown(schema)}: describe an object of arguments")
    return str(name), {"type": "object", **schema}


def _choose(choice: Any, schemas: Mapping[str, Any]) -> tuple[Sequence[str], bool, bool]:
    """The names of the tools that may be called, whether one must be called, and whether only one call is made."""
    if choice is None or isinstance(choice, str):
        mode = "auto" if choice is None else choice
        remedy = "name a tool as {'type': 'function', 'function': {'name': ...}}"
        require(mode in MODES, f"tool_choice must be one of {', '.join(MODES)}, got {shown(mode)}: {remedy}")
        return [] if mode == "none" else [*schemas], mode == "required", False
    require(isinstance(choice, Mapping), f"tool_choice must be text or an object, got {shown(choice)}: name a tool")
    kind = choice.get("type")
    if kind == "allowed_tools":
        _check_keys(choice, ("type", "allowed_tools"), "tool_choice")
        allowed = choice.get("allowed_tools")
        require(isinstance(allowed, Mapping), f"tool_choice.allowed_tools must be an object, got {shown(allowed)}")
        _check_keys(allowed, ("mode", "tools"), "tool_choice.allowed_tools")
        mode, listed = allowed.get("mode"), allowed.get("tools")
        place = "tool_choice.allowed_tools"
        require(mode in ("auto", "required"), f"{place}.mode must be auto or required, got {shown(mode)}: give one")
        is_list = isinstance(listed, list) and len(listed) > 0
        require(is_list, f"{place}.tools must name at least one tool, got {shown(listed)}: name one")
        names = {_named(one, f"{place}.tools", schemas) for one in listed}
        return [name for name in schemas if name in names], mode == "required", False
    return [_named(choice, "tool_choice", schemas)], True, True


def _named(choice: Any, place: str, schemas: Mapping[str, Any]) -> str:
    """The tool that {"type": "function", "function": {"name": NAME}} names."""
    is_function = isinstance(choice, Mapping) and choice.get("type") == "function"
    function = choice.get("function") if is_function else None
    name = function.get("name") if isinstance(function, Mapping) else None
    rule = f"{place} must be like {{'type': 'function', 'function': {{'name': ...}}}}"
    require(isinstance(name, str), f"{rule}, got {shown(choice)}: name a tool")
    assert isinstance(name, str)
    require(name in schemas, f"{place} names {shown(name)}, which is not a tool{nearest(name[:100], schemas)}")
    return name


def _check_keys(section: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in section:
        require(key in known, f"unknown field {place}.{shown(key).strip(chr(39))}{nearest(str(key)[:100], known)}")
