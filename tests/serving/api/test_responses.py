"""Requests of the Responses API: bodies become those of a chat."""

import json
import random
from typing import Any

import httpx2 as httpx
import pytest

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError
from l2d_jax.serving.access import Access
from l2d_jax.serving.api.bodies import read_body
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.api.response_events import ResponseReply
from l2d_jax.serving.api.responses import read_response, to_chat
from tests.serving.api.test_bodies import value
from tests.support.served import catalogue, serving, talking_model

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True, "description": None}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "weather", "arguments": '{"x": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "sun"}]}
SAID = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "phase": None}
SAID |= {"content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]}


def chat(**fields: Any) -> dict[str, Any]:
    return to_chat({"input": "Hi", **fields})


def test_a_text_is_a_message_and_instructions_come_first():
    assert chat()["messages"] == [{"role": "user", "content": "Hi"}]
    messages = chat(instructions="Be brief.", input=[{"role": "user", "content": "Hi"}])["messages"]
    assert messages == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def test_parts_calls_and_results_are_those_of_a_chat():
    parts = [{"type": "input_text", "text": "How is "}, {"type": "input_text", "text": "it?"}]
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"x": 1}'}}
    again = call | {"id": "c2"}
    told = chat(input=[{"role": "user", "content": parts}, SAID, CALL, CALL | {"call_id": "c2"}, RESULT])["messages"]
    assert told == [
        {"role": "user", "content": "How is it?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call, again]},
        {"role": "tool", "tool_call_id": "c1", "content": "sun"},
    ]
    assert chat(input=[CALL, RESULT])["messages"][0] == {"role": "assistant", "content": "", "tool_calls": [call]}


def test_fields_have_the_names_of_a_chat():
    told = chat(max_output_tokens=9, reasoning={"effort": "low", "summary": "auto"}, budget=3, seed=1, top_p=0.5)
    assert {name: told[name] for name in ("max_tokens", "reasoning_effort", "budget", "seed", "top_p")} == {
        "max_tokens": 9,
        "reasoning_effort": "low",
        "budget": 3,
        "seed": 1,
        "top_p": 0.5,
    }
    format = {"type": "json_schema", "name": "point", "strict": True, "schema": SCHEMA}
    nested = {"name": "point", "strict": True, "schema": SCHEMA}
    assert chat(text={"format": format})["response_format"] == {"type": "json_schema", "json_schema": nested}
    for format in ({"type": "text"}, {"type": "json_object"}, {"type": "regex", "regex": "a"}):
        assert chat(text={"format": format})["response_format"] == format
    assert chat(top_logprobs=2)["logprobs"] is True
    assert chat(include=["message.output_text.logprobs"])["logprobs"] is True
    assert "logprobs" not in chat(include=["reasoning.encrypted_content"], top_logprobs=0)


def test_tools_have_the_shape_of_a_chat():
    function = {"name": "weather", "parameters": SCHEMA, "strict": True}
    assert chat(tools=[WEATHER])["tools"] == [{"type": "function", "function": function}]
    named = {"type": "function", "function": {"name": "weather"}}
    assert chat(tools=[WEATHER], tool_choice={"type": "function", "name": "weather"})["tool_choice"] == named
    assert chat(tool_choice="required")["tool_choice"] == "required"
    choice = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "weather"}]}
    allowed = {"mode": "required", "tools": [named]}
    assert chat(tool_choice=choice)["tool_choice"] == {"type": "allowed_tools", "allowed_tools": allowed}


@pytest.mark.parametrize("store", [True, False])
def test_fields_that_change_nothing_are_taken(store):
    fields: dict[str, Any] = {"store": store, "background": False, "truncation": "disabled", "user": "me"}
    fields |= {"metadata": {"a": "b"}, "stream_options": {"include_obfuscation": False}, "service_tier": "auto"}
    read_body(chat(**fields, text={"verbosity": "medium"}, parallel_tool_calls=True, max_tool_calls=3), is_chat=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 3}, "unknown field 'max_tokens': did you mean 'max_output_tokens'?"),
    ({"messages": []}, "unknown field 'messages': did you mean 'input'?"),
    ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
    ({"n": 2}, "unknown field 'n'"),
    ({"previous_response_id": "resp_1"}, "this server stores none, got 'resp_1': send the earlier items in input"),
    ({"conversation": {"id": "c"}}, "send its items in input"),
    ({"prompt": {"id": "p"}}, "send its text in instructions and input"),
    ({"background": True}, "background True is not supported"),
    ({"truncation": "auto"}, "truncation 'auto' is not supported"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options"),
    ({"metadata": {"a": 1}}, "metadata must map names to texts"),
    ({"instructions": ["a"]}, "instructions must be text"),
    ({"include": "all"}, "include must be a list"),
    ({"include": ["pictures"]}, "include has no 'pictures' here"),
    ({"reasoning": {"effort": "low", "mode": "pro"}}, "reasoning has no 'mode' here"),
    ({"reasoning": {"summary": True}}, "reasoning.summary must be one of auto, concise, detailed, got True"),
    ({"reasoning": "low"}, "reasoning must be an object"),
    ({"text": {"format": "json"}}, "text.format must be an object"),
    ({"text": {"format": {"type": "json_schema", "json_schema": {}}}}, "move them up one level"),
    ({"tools": [{"type": "web_search"}]}, "tools[0] must be of the type function, got 'web_search'"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools[0].function is a level too much"),
    ({"tools": [{"type": "function"}]}, "tools[0].name must be text"),
    ({"tools": {}}, "tools must be a list"),
    ({"tool_choice": {"type": "mcp"}}, "tool_choice must be of the type function"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.tools must be a list"),
    ({"input": []}, "input must be a text, or a list"),
    ({"input": None}, "input must be a text, or a list"),
    ({"input": ["Hi"]}, "input[0] must be an object"),
    ({"input": [{"role": "robot", "content": "Hi"}]}, "input[0].role must be one of user"),
    ({"input": [{"role": "user", "content": 3}]}, "input[0].content must be a text"),
    ({"input": [{"role": "user", "content": "Hi", "name": "Eve"}]}, "input[0] has the unknown field 'name'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0] must be an input_text"),
    ({"input": [CALL | {"arguments": {}}]}, "input[0].arguments must be text"),
    ({"input": [RESULT | {"call_id": None}]}, "input[0].call_id must be text"),
    ({"input": [SAID, {"type": "item_reference", "id": "msg_1"}]}, "got 'msg_1': send the item itself"),
    ({"input": [{"type": "computer_call"}]}, "input[0] must be a message, a function_call or a function_call_output"),
    ({"input": [{"type": "reasoning", "summary": []}]}, "got the type 'reasoning': leave it out"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_other_fields_are_refused(fields, problem):
    with pytest.raises(InputError) as refused:
        chat(**fields)
    line = str(refused.value)
    assert problem in line
    assert "\n" not in line


def test_any_json_is_read_or_refused():
    rng, read = random.Random(0), 0
    names = [
        "input",
        "instructions",
        "text",
        "reasoning",
        "tools",
        "tool_choice",
        "include",
        "metadata",
        "top_logprobs",
    ]
    for _ in range(500):
        body = {name: value(rng) for name in rng.sample(names, rng.randrange(3))}
        body = {name: one for name, one in body.items() if one is not None}
        try:
            to_chat({"input": "Hi", **body})
            read += 1
        except InputError:
            pass
    assert 100 < read < 450


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return talking_model()


@pytest.fixture(scope="module")
def protocol(loaded: LoadedModel) -> Protocol:
    return Protocol(catalogue(loaded, context=256, answers=64, efforts={"low": 3}))


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"max_output_tokens": 0}, "max_output_tokens must be at least 1, got 0"),
        ({"max_output_tokens": 300}, "prompt and max_output_tokens exceed the 256 tokens"),
        ({"max_output_tokens": "a"}, "body.max_output_tokens must be"),
        ({"reasoning": {"effort": "max_tokens"}}, "reasoning.effort must be one of low, got 'max_tokens'"),
        ({"text": {"format": {"type": "choice", "choices": []}}}, "text.format"),
        ({"temperature": -1}, "config.decode.temperature must be in [0, 1000], got -1"),
        ({"model": "gpt-5"}, "there is no model 'gpt-5' here"),
    ],
)
def test_errors_name_the_fields_of_this_api(protocol, fields, problem):
    body = json.dumps({"input": "Hi", "max_output_tokens": 4, **fields}).encode()
    with pytest.raises(InputError) as refused:
        read_response(protocol, body, query={})
    assert problem in str(refused.value)


def test_places_of_a_function_have_a_level_less(protocol, monkeypatch):
    """Chats, whose fields of a function are a level deeper, make these errors."""
    told = "tools[0].function.name must be tool_choice.allowed_tools.mode, got 'a': name {'function': {'name': ...}}"

    def refuse(*_: Any, **__: Any) -> None:
        raise InputError(told)

    monkeypatch.setattr(protocol, "read_values", refuse)
    with pytest.raises(InputError) as refused:
        read_response(protocol, b'{"input": "Hi"}', query={})
    assert str(refused.value) == "tools[0].name must be tool_choice.mode, got 'a': name {'name': ...}"


def test_the_reply_repeats_what_was_asked(protocol):
    given = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "store": True, "temperature": 0.5}
    asked, repeated = read_response(protocol, json.dumps({"input": "Hi", **given}).encode(), query={"budget": "1"})
    assert asked.answers[0].settings.budget == 1
    whole = ResponseReply(asked.answers[0].settings, repeated, name="tiny").opening()[0]["response"]
    wanted = {**given, "store": False, "model": "tiny", "max_output_tokens": 16, "previous_response_id": None}
    assert {name: whole[name] for name in wanted} == wanted


def test_pages_of_an_allowed_origin_may_ask(loaded):
    """A browser asks first whether it may send a key and JSON, and the fields that OpenAI's client adds."""
    page, names = "https://chat.example", "authorization, content-type, x-stainless-lang"
    asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": names}
    with serving(loaded, access=Access(key="secret", origins=[page])) as url:
        told = httpx.options(f"{url}/v1/responses", headers={"Origin": page, **asking})
        assert (told.status_code, told.headers["access-control-allow-origin"]) == (200, page)
        assert "POST" in told.headers["access-control-allow-methods"]
        assert told.headers["access-control-allow-headers"] == names
        assert (
            httpx.options(f"{url}/v1/responses", headers={"Origin": "https://evil.example", **asking}).status_code
            == 403
        )
        headers = {"Origin": page, "Authorization": "Bearer secret"}
        refused = httpx.post(f"{url}/v1/responses", json={"input": 3}, headers=headers)
        assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (400, page)
        assert "input must be a text" in refused.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/responses", json={"input": 3}, headers={"Origin": page}).status_code == 401


@pytest.mark.slow
def test_a_stream_that_takes_too_long_ends_with_its_failure(loaded):
    body = {"input": "Hi", "max_output_tokens": 900, "budget": 31, "stream": True}
    with serving(loaded, lanes=1, seconds=2.0) as url:
        text = httpx.post(f"{url}/v1/responses", json=body, timeout=120).text
    events = [dict(line.split(": ", 1) for line in event.splitlines()) for event in text.strip().split("\n\n")]
    assert [event["event"] for event in events[:2]] == ["response.created", "response.in_progress"]
    last = json.loads(events[-1]["data"])
    assert (events[-1]["event"], last["response"]["status"]) == ("response.failed", "failed")
    assert "the answer took longer than this server allows" in last["response"]["error"]["message"]
    assert [json.loads(event["data"])["sequence_number"] for event in events] == [*range(len(events))]
