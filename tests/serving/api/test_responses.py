"""The Responses API as a translation: bodies to those of a chat, and a chat's replies to objects and events."""

import json
import random
from typing import Any

import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError
from l2d_jax.serving.api.bodies import read_body
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.api.response_events import ResponseReply
from l2d_jax.serving.api.responses import read_response, to_chat
from tests.serving.api.test_bodies import value
from tests.support.served import talking_model

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
    return Protocol(loaded, name="tiny", limits=RequestLimits(context=256, answers=64, efforts={"low": 3}))


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


def test_the_reply_repeats_what_was_asked(protocol):
    given = {"instructions": "Be brief.", "metadata": {"a": "b"}, "user": "me", "store": True, "temperature": 0.5}
    asked, repeated = read_response(protocol, json.dumps({"input": "Hi", **given}).encode(), query={"budget": "1"})
    assert asked.answers[0].settings.budget == 1
    whole = ResponseReply(asked.answers[0].settings, repeated, name="tiny").whole(whole_chat({"content": "a"}))
    wanted = {**given, "store": False, "model": "tiny", "max_output_tokens": 16, "previous_response_id": None}
    assert {name: whole[name] for name in wanted} == wanted


def reply() -> ResponseReply:
    return ResponseReply(DecodeConfig(), {}, name="tiny")


def whole_chat(message: dict[str, Any], *, ending: str = "stop", **fields: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8, "evaluations": 9, "passes": 4}
    usage |= {"prompt_tokens_details": {"cached_tokens": 2}}
    return {"choices": [{"finish_reason": ending, "message": message, **fields}], "usage": usage}


def chunk(delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"choices": [{"delta": delta, "finish_reason": None, **fields}]}


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def without_time(response: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in response.items() if name != "completed_at"}


def test_a_stream_of_text_has_all_events_in_order():
    scores = [{"token": one, "logprob": -1.0, "bytes": [65], "top_logprobs": []} for one in "abc"]
    told, whole = reply(), whole_chat({"content": "a☃"}, ending="length", logprobs={"content": scores})
    events = told.opening()
    events += told.add(chunk({"role": "assistant", "content": "a"}, logprobs={"content": scores[:1]}))
    events += told.add(chunk({"content": ""}, logprobs={"content": scores[1:2]}))  # a part of a character
    events += told.add(chunk({"content": "☃"}, logprobs={"content": scores[2:]}))
    events += told.closing(whole)
    opened = ["created", "in_progress", "output_item.added", "content_part.added"]
    closed = ["output_text.done", "content_part.done", "output_item.done", "incomplete"]
    assert kinds(events) == [*opened, "output_text.delta", "output_text.delta", *closed]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert [event["delta"] for event in events[4:6]] == ["a", "☃"]
    assert [event["logprobs"] for event in events[4:6]] == [scores[:1], scores[1:]]
    assert without_time(events[-1]["response"]) == without_time(told.whole(whole))
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    [item] = events[-1]["response"]["output"]
    assert (item["status"], item["content"][0]["text"], item["content"][0]["logprobs"]) == ("incomplete", "a☃", scores)
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""


def test_a_stream_of_calls_has_an_item_for_each():
    function = [{"name": name, "arguments": '{"x": 1}'} for name in ("weather", "time")]
    calls = [{"id": f"c{n}", "type": "function", "function": one} for n, one in enumerate(function)]
    whole, told = whole_chat({"content": "I look.", "tool_calls": calls}, ending="tool_calls"), reply()
    events = told.add(chunk({"role": "assistant", "content": "I look."}))
    for number, call in enumerate(calls):
        begun = call | {"index": number, "function": {"name": function[number]["name"], "arguments": ""}}
        events += told.add(chunk({"tool_calls": [begun]}))
        for part in ('{"x":', " 1}"):
            events += told.add(chunk({"tool_calls": [{"index": number, "function": {"arguments": part}}]}))
    events += told.closing(whole)
    message = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done"]
    grown = ["function_call_arguments.delta"] * 2 + ["function_call_arguments.done", "output_item.done"]
    call_events = ["output_item.added", *grown]
    assert kinds(events) == [*message, "output_item.done", *call_events, *call_events, "completed"]
    assert [event["output_index"] for event in events[:-1]] == [0] * 6 + [1] * 5 + [2] * 5
    response = events[-1]["response"]
    assert without_time(response) == without_time(told.whole(whole))
    assert [item.get("call_id") for item in response["output"]] == [None, "c0", "c1"]
    assert response["output"][1]["arguments"] == '{"x": 1}'
    assert {item["status"] for item in response["output"]} == {"completed"}


def test_an_empty_answer_is_an_empty_message():
    told = reply()
    events = told.closing(whole_chat({"content": ""}))
    assert kinds(events)[:2] == ["output_item.added", "content_part.added"]
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == ""
    only = whole_chat({"content": None, "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]})
    assert [item["type"] for item in reply().whole(only)["output"]] == ["function_call"]


def test_choices_traces_and_usage_are_told():
    ranked = [{"text": "yes", "probability": 1.0}]
    whole, told = whole_chat({"content": "yes"}, l2d_choices=ranked, trace=[{"text": "yes"}]), reply()
    events = told.add(chunk({"content": "yes"})) + told.closing(whole)
    response = told.whole(whole)
    assert without_time(events[-1]["response"]) == without_time(response)
    assert response["output"][0]["content"][0]["l2d_choices"] == ranked
    assert response["trace"] == [{"text": "yes"}]
    usage = {"input_tokens": 5, "output_tokens": 3, "total_tokens": 8, "evaluations": 9, "passes": 4}
    usage |= {"input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0}}
    assert response["usage"] == usage | {"output_tokens_details": {"reasoning_tokens": 0}}


def test_a_stream_that_fails_says_so():
    told = reply()
    events = [*told.opening(), *told.add(chunk({"content": "a"}))]
    failed = told.failure({"error": {"message": "too slow", "type": "server_error", "param": None, "code": 504}})
    assert (failed["type"], failed["sequence_number"]) == ("response.failed", len(events))
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"] == {"code": "server_error", "message": "too slow"}
    assert failed["response"]["output"][0]["content"][0]["text"] == "a"
