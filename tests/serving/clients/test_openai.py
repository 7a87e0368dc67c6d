"""OpenAI's own client: chats, completions and responses, with and without streams, in threads and in an event loop."""

import asyncio
import json
from typing import Any, Literal

import pytest

from tests.serving.clients.questions import FORMAT, ONE_CALL, QUESTION, SCHEMA, TOOL, TURNS, is_trip
from tests.serving.clients.server import KEY, Server

pydantic = pytest.importorskip("pydantic")
OWN: dict[str, Any] = {"seed": 1, "temperature": 1.0}
FLAT = {"type": "function", **TOOL["function"]}


class Trip(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=3)


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package, whose import takes seconds."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(server: Server, openai: Any) -> Any:
    return openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0, timeout=300)


def chat(client: Any, messages: Any = QUESTION, **options: Any) -> Any:
    extra = options.pop("extra_body", {})
    return client.chat.completions.create(
        **{"model": "tiny", "max_tokens": 8, "messages": messages, **OWN, **options}, extra_body=extra
    )


def respond(client: Any, **options: Any) -> Any:
    """A response, with the options that OpenAI's API lacks beside the others."""
    extra = {"seed": 1, **options.pop("extra_body", {})}
    given = {"model": "tiny", "max_output_tokens": 8, "input": "What is 12 * 4?", "temperature": 1.0, **options}
    return client.responses.create(**given, extra_body=extra)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 7])
def test_chats_have_the_budget_of_extra_body(client, server, budget):
    reply = chat(client, extra_body={"budget": budget})
    assert reply.choices[0].message.content == server.text(QUESTION, max_tokens=8, budget=budget, **OWN)
    assert reply.usage.evaluations == 8 * budget
    assert chat(client, reasoning_effort="medium").usage.evaluations == 8 * 7


@pytest.mark.slow
def test_streams_and_their_usage(client, server):
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == server.text(QUESTION, max_tokens=8, **OWN)
    assert (chunks[-1].usage.completion_tokens, chunks[-1].usage.evaluations) == (8, 24)


@pytest.mark.slow
def test_an_event_loop(server, openai):
    async def ask() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=server.api, api_key=KEY, max_retries=0) as client:
            whole, stream, response = await asyncio.gather(
                chat(client), chat(client, stream=True), respond(client, stream=True)
            )
            streamed = [chunk.choices[0].delta.content or "" async for chunk in stream]
            told = [event.delta async for event in response if event.type == "response.output_text.delta"]
            return whole.choices[0].message.content, "".join(streamed), "".join(told)

    assert set(asyncio.run(ask())) == {server.text(QUESTION, max_tokens=8, **OWN)}


@pytest.mark.slow
def test_turns_and_parts(client, server):
    parts = [*TURNS[:-1], {"role": "user", "content": [{"type": "text", "text": TURNS[-1]["content"]}]}]
    wanted = server.text(TURNS, max_tokens=8, **OWN)
    assert chat(client, parts).choices[0].message.content == wanted
    assert respond(client, input=TURNS).output_text == wanted
    first = respond(client)
    said = [*QUESTION, *first.output, TURNS[-1]]
    told = [*QUESTION, {"role": "assistant", "content": first.output_text}, TURNS[-1]]
    assert respond(client, input=said).output_text == server.text(told, max_tokens=8, **OWN)


@pytest.mark.slow
def test_formats_become_objects(client):
    for format in (FORMAT, {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}):
        assert is_trip(json.loads(chat(client, max_tokens=64, response_format=format).choices[0].message.content))
    parsed = client.chat.completions.parse(model="tiny", messages=QUESTION, max_tokens=64, response_format=Trip)
    assert isinstance(parsed.choices[0].message.parsed, Trip)
    streamed = {"model": "tiny", "messages": QUESTION, "max_tokens": 64, "response_format": Trip}
    with client.chat.completions.stream(**streamed) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Trip)
    parsed = client.responses.parse(model="tiny", input="Hi", max_output_tokens=64, text_format=Trip)
    assert isinstance(parsed.output_parsed, Trip)
    with client.responses.stream(model="tiny", input="Hi", max_output_tokens=64, text_format=Trip) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Trip)


@pytest.mark.slow
def test_log_probabilities(client):
    scored = chat(client, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in scored] == [2] * 8
    response = respond(client, include=["message.output_text.logprobs"], top_logprobs=2)
    told = response.output[0].content[0].logprobs
    assert [(token.token, len(token.top_logprobs)) for token in told] == [(token.token, 2) for token in scored]
    assert [token.logprob for token in told] == pytest.approx([token.logprob for token in scored], abs=1e-5)


@pytest.mark.slow
def test_responses_have_a_budget(client):
    assert respond(client, reasoning={"effort": "medium"}).usage.evaluations == 8 * 7
    assert respond(client, extra_body={"budget": 7}).usage.evaluations == 8 * 7
    stream = list(respond(client, extra_body={"budget": 7}, stream=True))
    assert stream[-1].response.usage.evaluations == 8 * 7


def test_responses_are_the_answers_of_a_chat(client, server):
    """At a budget of 1 alone, which compiles the least: this test is one of the fast ones."""
    wanted = server.text([{"role": "system", "content": "Hi."}, *QUESTION], max_tokens=8, budget=1, **OWN)
    options = {"instructions": "Hi.", "metadata": {"a": "b"}, "reasoning": {"effort": "none"}}
    whole = respond(client, **options)
    assert (whole.output_text, whole.status, whole.metadata) == (wanted, "incomplete", {"a": "b"})
    assert (whole.usage.output_tokens, whole.usage.evaluations) == (8, 8)
    assert whole.incomplete_details.reason == "max_output_tokens"
    events = list(respond(client, **options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert (events[0].type, events[-1].type) == ("response.created", "response.incomplete")
    assert events[-1].response.output_text == wanted


def test_errors_are_the_clients_own(client, openai):
    for ask, fields in ((chat, {"temperature": -1}), (respond, {"temperature": -1})):
        with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 1000\]"):
            ask(client, **fields)
    with pytest.raises(openai.BadRequestError, match="send the earlier items in input"):
        respond(client, previous_response_id="resp_1")
    with pytest.raises(openai.AuthenticationError, match="wants its API key"):
        chat(client.with_options(api_key="wrong"))
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-5'"):
        client.models.retrieve("gpt-5")
    assert [model.id for model in client.models.list()] == ["tiny"]


@pytest.mark.slow
def test_tools_are_called(client):
    reply = chat(client, tools=[TOOL], **ONE_CALL, max_tokens=128).choices[0]
    assert reply.finish_reason == "tool_calls"
    [call] = reply.message.tool_calls
    assert call.function.name == "book"
    assert is_trip(json.loads(call.function.arguments))
    result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
    answered = chat(client, [*QUESTION, reply.message, result], tools=[TOOL], tool_choice="none")
    assert answered.choices[0].finish_reason == "length"
    parts = [one.choices[0].delta for one in chat(client, tools=[TOOL], **ONE_CALL, max_tokens=128, stream=True)]
    told = [part.tool_calls[0].function.arguments or "" for part in parts if part.tool_calls]
    assert "".join(told) == call.function.arguments


@pytest.mark.slow
def test_tools_are_called_in_responses(client):
    options = {"tools": [FLAT], "tool_choice": {"type": "function", "name": "book"}, "max_output_tokens": 128}
    [call] = respond(client, **options).output
    assert (call.type, call.name) == ("function_call", "book")
    assert is_trip(json.loads(call.arguments))
    events = list(respond(client, **options, stream=True))
    told = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(told) == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
    question = {"role": "user", "content": "Book it."}
    answered = respond(client, input=[question, call, result], tools=[FLAT], tool_choice="none")
    assert answered.output[0].type == "message"
