"""LiteLLM, which talks to the server as to any of OpenAI's kind."""

import asyncio
import json
import os
from typing import Any

import pytest

from tests.serving.clients.questions import FORMAT, ONE_CALL, QUESTION, TOOL, TURNS, is_trip
from tests.serving.clients.server import KEY, Server

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for a list of prices on the internet
litellm = pytest.importorskip("litellm")
pytestmark = pytest.mark.slow
OWN: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 8}


@pytest.fixture(scope="module")
def fields(server: Server) -> dict[str, Any]:
    return {"model": "openai/tiny", "api_base": server.api, "api_key": KEY, "num_retries": 0}


def chat(fields: dict[str, Any], messages: Any = QUESTION, **options: Any) -> Any:
    return litellm.completion(**{**fields, "messages": messages, **OWN, **options})


def test_chats_have_a_budget(fields, server):
    reply = chat(fields, extra_body={"budget": 7})
    assert reply.choices[0].message.content == server.text(QUESTION, budget=7, **OWN)
    assert (reply.usage.completion_tokens, reply.usage.evaluations) == (8, 56)
    assert chat(fields, reasoning_effort="medium", allowed_openai_params=["reasoning_effort"]).usage.evaluations == 56
    assert chat(fields, TURNS).choices[0].message.content == server.text(TURNS, **OWN)
    assert asyncio.run(litellm.acompletion(**{**fields, "messages": QUESTION, **OWN})).choices[0].message.content


def test_streams_and_their_usage(fields, server):
    chunks = list(chat(fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == server.text(QUESTION, **OWN)
    assert [chunk.usage.completion_tokens for chunk in chunks if getattr(chunk, "usage", None)] == [8]


def test_formats_and_log_probabilities(fields):
    assert is_trip(json.loads(chat(fields, response_format=FORMAT, max_tokens=64).choices[0].message.content))
    scored = chat(fields, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(token.top_logprobs) for token in scored] == [2] * 8


def test_responses(fields, server):
    """LiteLLM raises a smaller max_output_tokens to 16, OpenAI's least."""
    options = {"input": "What is 12 * 4?", "max_output_tokens": 16, "temperature": 1.0, "extra_body": {"seed": 1}}
    wanted = server.text(QUESTION, **{**OWN, "max_tokens": 16})
    assert litellm.responses(**fields, **options).output[0].content[0].text == wanted
    events = list(litellm.responses(**fields, **options, stream=True))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == wanted
    assert events[-1].response.usage.output_tokens == 16


def test_errors_are_the_clients_own(fields):
    with pytest.raises(litellm.BadRequestError, match=r"temperature must be in \[0, 1000\]"):
        chat(fields, temperature=-1)
    with pytest.raises(litellm.AuthenticationError, match="wants its API key"):
        chat(fields, api_key="wrong")


def test_tools_are_called(fields):
    [call] = chat(fields, tools=[TOOL], **ONE_CALL, max_tokens=128).choices[0].message.tool_calls
    assert call.function.name == "book"
    assert is_trip(json.loads(call.function.arguments))
