"""Instructor, in its modes for JSON and for tools."""

from typing import Any, Literal

import pytest

from tests.serving.clients.questions import QUESTION
from tests.serving.clients.server import KEY, Server

instructor = pytest.importorskip("instructor")
openai = pytest.importorskip("openai")
pydantic = pytest.importorskip("pydantic")
pytestmark = pytest.mark.slow
CLOSING = {"125": 100}  # a bias for "}", which ends an object before it has a field


class Trip(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    model_config = pydantic.ConfigDict(extra="forbid")  # random weights would add fields without end
    city: Literal["Oslo", "Rome"]
    days: int = pydantic.Field(ge=1, le=3)


class Anything(pydantic.BaseModel):  # type: ignore[name-defined, misc]
    note: str = ""


def make(server: Server, mode: Any) -> Any:
    client = openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0, timeout=300)
    return instructor.from_openai(client, mode=mode)


def ask(client: Any, model: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"model": "tiny", "messages": [*QUESTION], "max_tokens": 64, "max_retries": 0}
    return client.chat.completions.create(**{**given, **options}, response_model=model)


def test_a_schema(server):
    client = make(server, instructor.Mode.JSON_SCHEMA)
    before = server.evaluations
    trip, reply = client.chat.completions.create_with_completion(
        model="tiny", messages=[*QUESTION], max_tokens=64, response_model=Trip, extra_body={"budget": 7}
    )
    assert isinstance(trip, Trip)
    assert server.evaluations - before == reply.usage.evaluations > 7
    assert isinstance(ask(client, Trip, seed=3, temperature=1.0), Trip)


def test_json(server):
    """The schema is in the prompt alone, which random weights cannot read: the model takes any object."""
    assert ask(make(server, instructor.Mode.JSON), Anything, logit_bias=CLOSING).note == ""


def test_a_stream_of_a_schema(server):
    client = make(server, instructor.Mode.JSON_SCHEMA)
    parts = list(
        client.chat.completions.create_partial(
            model="tiny", messages=[*QUESTION], max_tokens=64, response_model=Trip, max_retries=0
        )
    )
    assert (parts[-1].city in ("Oslo", "Rome"), parts[-1].days in (1, 2, 3)) == (True, True)


def test_errors_name_the_rule(server):
    with pytest.raises(Exception, match=r"temperature must be in \[0, 1000\]"):
        ask(make(server, instructor.Mode.JSON_SCHEMA), Trip, temperature=-1)


def test_tools(server):
    assert isinstance(ask(make(server, instructor.Mode.TOOLS), Trip, max_tokens=128), Trip)
