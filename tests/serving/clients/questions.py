"""What the tests of all clients ask: short questions whose answers end under any weights."""

from typing import Any

QUESTION = [{"role": "user", "content": "What is 12 * 4?"}]
TURNS = [*QUESTION, {"role": "assistant", "content": "48"}, {"role": "user", "content": "And 12 * 5?"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Oslo", "Rome"]}, "days": {"type": "integer", "minimum": 1, "maximum": 3}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "book", "description": "Book a trip.", "parameters": SCHEMA}}
ONE_CALL: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}


def is_trip(value: Any) -> bool:
    """Whether a value follows `SCHEMA`."""
    return set(value) == {"city", "days"} and value["city"] in ("Oslo", "Rome") and value["days"] in (1, 2, 3)
