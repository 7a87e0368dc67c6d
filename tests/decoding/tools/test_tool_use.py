"""Tools and tool_choice, as OpenAI's clients send them."""

import pytest

from l2d_jax.decoding.tools.tool_use import read_tool_use
from l2d_jax.errors import InputError
from tests.support.tool_templates import NUMBER, TOOLS, WEATHER, function


def named(name):
    return {"type": "function", "function": {"name": name}}


def allowed(mode, *names):
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


def test_which_tools_may_be_called():
    both = {"get_weather": WEATHER, "get": NUMBER}
    for choice, schemas, is_required, is_single in (
        (None, both, False, False),
        ("auto", both, False, False),
        ("required", both, True, False),
        ("none", {}, False, False),
        (named("get"), {"get": NUMBER}, True, True),
        (allowed("auto", "get"), {"get": NUMBER}, False, False),
        (allowed("required", "get", "get_weather"), both, True, False),
    ):
        use = read_tool_use(TOOLS, choice)
        assert (use.schemas, use.is_required, use.is_single) == (schemas, is_required, is_single)
        assert use.tools == TOOLS  # the prompt has all of them
        assert read_tool_use(TOOLS, choice, parallel=False).is_single
    assert [read_tool_use(none, choice) for none in (None, []) for choice in (None, "none", "auto")] == [None] * 6


def test_a_function_without_parameters_takes_none():
    use = read_tool_use(
        [function("now"), function("any", {}), function("plan", {"properties": {"a": {}}, "$defs": {}})]
    )
    assert use.schemas["now"] == {"type": "object", "properties": {}, "additionalProperties": False}
    assert use.schemas["any"] == {"type": "object"}
    assert use.schemas["plan"] == {"type": "object", "properties": {"a": {}}, "$defs": {}}


@pytest.mark.parametrize(
    ("tools", "choice", "problem"),
    [
        ([{}], None, "tools[0].type must be 'function', got None"),
        ([{"type": "custom", "custom": {"name": "a"}}], None, "unknown field tools[0].custom"),
        ([{"type": "function"}], None, "tools[0].function must be an object, got None"),
        (
            [function("a b")],
            None,
            "tools[0].function.name must have 1 to 64 letters, digits, '_', '-' or '.', got 'a b'",
        ),
        ([function("a"), function("a")], None, "two tools have the name 'a'"),
        (
            [function("a", {"type": "string"})],
            None,
            "tools[0].function.parameters must be a JSON schema of type 'object'",
        ),
        ([function("a", [])], None, "tools[0].function.parameters must be a JSON schema"),
        ([function("a", strict="yes")], None, "tools[0].function.strict must be true or false"),
        ([function("a", descriptions="x")], None, "unknown field tools[0].function.descriptions: did you mean 'descr"),
        ([function(f"f{n}") for n in range(129)], None, "at most 128 tools, got 129"),
        ({"a": 1}, None, "'tools' must be a list of JSON schemas"),
        (TOOLS, "any", "tool_choice must be one of none, auto, required, got 'any'"),
        (
            TOOLS,
            named("get_wether"),
            "tool_choice names 'get_wether', which is not a tool: did you mean 'get_weather'?",
        ),
        (TOOLS, {"name": "get"}, "tool_choice must be like {'type': 'function', 'function': {'name': ...}}, got"),
        (TOOLS, 3, "tool_choice must be text or an object, got 3"),
        (TOOLS, allowed("auto"), "tool_choice.allowed_tools.tools must name at least one tool"),
        (TOOLS, allowed("none", "get"), "tool_choice.allowed_tools.mode must be auto or required, got 'none'"),
        (TOOLS, allowed("auto", "x"), "tool_choice.allowed_tools.tools names 'x', which is not a tool"),
        (None, "required", "tool_choice 'required' needs tools, and the request has none"),
    ],
)
def test_what_is_refused(tools, choice, problem):
    with pytest.raises(InputError) as refused:
        read_tool_use(tools, choice)
    assert problem in str(refused.value)


def test_parallel_tool_calls_is_a_flag():
    with pytest.raises(InputError, match="parallel_tool_calls must be true or false, got 1: leave it out"):
        read_tool_use(TOOLS, None, parallel=1)
