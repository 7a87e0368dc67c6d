"""Replies of the Responses API: objects and events, from the replies and chunks of a chat."""

from typing import Any

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.serving.api.response_events import ResponseReply


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
