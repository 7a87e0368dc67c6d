"""LangChain's ChatOpenAI, by chats and by responses."""

import asyncio
from typing import Any, Literal

import pytest

from tests.serving.clients.questions import ONE_CALL, QUESTION, SCHEMA, TURNS, is_trip
from tests.serving.clients.server import KEY, Server

langchain_openai = pytest.importorskip("langchain_openai")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.slow
OWN: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 8}


class Trip(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """A trip."""

    model_config = pydantic.ConfigDict(extra="forbid")  # random weights would add fields without end
    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=3)


def model(server: Server, **options: Any) -> Any:
    given = {"model": "tiny", "base_url": server.api, "api_key": KEY, "max_retries": 0, **OWN, **options}
    return langchain_openai.ChatOpenAI(**given)


def responding(server: Server, **options: Any) -> Any:
    """A model that asks `/v1/responses`, whose seed is one of the server's own fields."""
    given = {"model": "tiny", "base_url": server.api, "api_key": KEY, "max_retries": 0, "temperature": 1.0}
    extra = {"seed": 1, **options.pop("extra_body", {})}
    return langchain_openai.ChatOpenAI(**given, max_tokens=8, use_responses_api=True, extra_body=extra, **options)


def test_chats_have_a_budget(server):
    reply = model(server, extra_body={"budget": 7}).invoke(QUESTION)
    assert reply.content == server.text(QUESTION, budget=7, **OWN)
    assert reply.usage_metadata["output_tokens"] == 8
    assert reply.response_metadata["token_usage"]["evaluations"] == 56
    told = model(server, reasoning_effort="medium").invoke(QUESTION).response_metadata
    assert told["token_usage"]["evaluations"] == 56
    assert model(server).invoke(TURNS).content == server.text(TURNS, **OWN)
    assert asyncio.run(model(server).ainvoke(QUESTION)).content == server.text(QUESTION, **OWN)


def test_streams_and_their_usage(server):
    parts = list(model(server, stream_usage=True).stream(QUESTION))
    assert "".join(part.content for part in parts) == server.text(QUESTION, **OWN)
    assert sum(part.usage_metadata["output_tokens"] for part in parts if part.usage_metadata) == 8


def test_formats_and_log_probabilities(server):
    longer = model(server, max_tokens=64)
    assert isinstance(longer.with_structured_output(Trip, method="json_schema").invoke("Book."), Trip)
    assert is_trip(longer.with_structured_output({"title": "trip", **SCHEMA}, method="json_schema").invoke("Book."))
    scored = model(server, logprobs=True, top_logprobs=2).invoke(QUESTION).response_metadata["logprobs"]
    assert [len(token["top_logprobs"]) for token in scored["content"]] == [2] * 8


def test_responses(server):
    wanted = server.text(QUESTION, **OWN)
    reply = responding(server).invoke(QUESTION)
    assert (reply.text, reply.usage_metadata["output_tokens"]) == (wanted, 8)
    assert "".join(part.text for part in responding(server).stream(QUESTION)) == wanted
    wanted = server.text([*QUESTION, {"role": "assistant", "content": wanted}, TURNS[-1]], **OWN)
    assert responding(server).invoke([*QUESTION, reply, TURNS[-1]]).text == wanted
    before = server.evaluations
    responding(server, extra_body={"budget": 7}).invoke(QUESTION)
    assert server.evaluations - before == 56
    before = server.evaluations
    responding(server, reasoning={"effort": "medium"}).invoke(QUESTION)
    assert server.evaluations - before == 56
    longer = responding(server).model_copy(update={"max_tokens": 64})
    assert isinstance(longer.with_structured_output(Trip, method="json_schema").invoke("Book."), Trip)


def test_errors_are_the_clients_own(server):
    for asking in (model(server, temperature=-1), responding(server).model_copy(update={"temperature": -1})):
        with pytest.raises(openai.BadRequestError, match=r"temperature must be in \[0, 1000\]"):
            asking.invoke(QUESTION)


def test_tools_are_called(server):
    called = model(server, max_tokens=128).bind_tools([Trip], **ONE_CALL).invoke("Book.")
    [call] = called.tool_calls
    assert call["name"] == "Trip"
    assert is_trip(call["args"])
    structured = model(server, max_tokens=128).with_structured_output(Trip, method="function_calling")
    assert isinstance(structured.invoke("Book."), Trip)


def test_tools_are_called_in_responses(server):
    longer = responding(server).model_copy(update={"max_tokens": 128})
    [call] = longer.bind_tools([Trip], **ONE_CALL).invoke("Book.").tool_calls
    assert is_trip(call["args"])
