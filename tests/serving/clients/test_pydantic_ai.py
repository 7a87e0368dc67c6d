"""Pydantic AI, by chats and by responses."""

import asyncio
from typing import Any, Literal

import pytest

from tests.serving.clients.questions import QUESTION
from tests.serving.clients.server import KEY, Server

pydantic_ai = pytest.importorskip("pydantic_ai")
pydantic = pytest.importorskip("pydantic")
openai_models = pytest.importorskip("pydantic_ai.models.openai")
openai_provider = pytest.importorskip("pydantic_ai.providers.openai")
pytestmark = pytest.mark.slow
TEXT = str(QUESTION[0]["content"])
OWN: dict[str, Any] = {"seed": 1, "temperature": 1.0, "max_tokens": 8}


class Trip(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    """A trip."""

    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=3)


def agent(server: Server, kind: Any, **options: Any) -> Any:
    provider = openai_provider.OpenAIProvider(base_url=server.api, api_key=KEY)
    return pydantic_ai.Agent(kind("tiny", provider=provider), retries=0, **options)


def settings(kind: Any, **options: Any) -> dict[str, Any]:
    """Settings of a model; the seed is one of the server's own fields in responses."""
    if kind is openai_models.OpenAIResponsesModel:
        given = {name: value for name, value in OWN.items() if name != "seed"}
        return {**given, **options, "extra_body": {"seed": 1, **options.get("extra_body", {})}}
    return {**OWN, **options}


KINDS = pytest.mark.parametrize("kind", [openai_models.OpenAIChatModel, openai_models.OpenAIResponsesModel])


@KINDS
def test_answers_have_a_budget(server, kind):
    asking = agent(server, kind)
    before = server.evaluations
    reply = asking.run_sync(TEXT, model_settings=settings(kind, extra_body={"budget": 7}))
    assert server.evaluations - before == 56
    assert reply.output == server.text(QUESTION, budget=7, **OWN)
    assert reply.usage.output_tokens == 8
    before = server.evaluations
    asking.run_sync(TEXT, model_settings=settings(kind, openai_reasoning_effort="medium"))
    assert server.evaluations - before == 56


@KINDS
def test_turns_instructions_and_streams(server, kind):
    asking = agent(server, kind, instructions="Be brief.")
    first = asking.run_sync(TEXT, model_settings=settings(kind))
    begun = [{"role": "system", "content": "Be brief."}, *QUESTION]
    assert first.output == server.text(begun, **OWN)
    second = asking.run_sync("And 5?", message_history=first.all_messages(), model_settings=settings(kind))
    told = [*begun, {"role": "assistant", "content": first.output}, {"role": "user", "content": "And 5?"}]
    assert second.output == server.text(told, **OWN)

    async def stream() -> str:
        async with asking.run_stream(TEXT, model_settings=settings(kind)) as run:
            return str(await run.get_output())

    assert asyncio.run(stream()) == first.output


@KINDS
def test_formats_become_objects(server, kind):
    asking = agent(server, kind, output_type=pydantic_ai.NativeOutput(Trip))
    assert isinstance(asking.run_sync(TEXT, model_settings=settings(kind, max_tokens=64)).output, Trip)


@KINDS
def test_errors_are_the_clients_own(server, kind):
    with pytest.raises(pydantic_ai.ModelHTTPError, match=r"temperature must be in \[0, 1000\]") as refused:
        agent(server, kind).run_sync(TEXT, model_settings=settings(kind, temperature=-1))
    assert refused.value.status_code == 400


@KINDS
def test_tools_are_called(server, kind):
    asking = agent(server, kind, output_type=pydantic_ai.ToolOutput(Trip))
    given = settings(kind, max_tokens=128, parallel_tool_calls=False)
    assert isinstance(asking.run_sync(TEXT, model_settings=given).output, Trip)
