"""Bodies of requests, read without a model: JSON, fields, and their sizes."""

import dataclasses
import inspect
import json
import random
from typing import Any

import pytest

from l2d_jax.errors import InputError
from l2d_jax.serving.api.bodies import (
    IGNORED,
    NEUTRAL_CHAT,
    NEUTRAL_COMPLETION,
    OPTIONS,
    ChatBody,
    CompletionBody,
    parse_json,
    read_body,
    text_length,
)
from tests.support.tool_templates import function

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}


def refusal(body: dict[str, Any], *, is_chat: bool = True) -> str:
    with pytest.raises(InputError) as refused:
        read_body(body, is_chat=is_chat)
    line = str(refused.value)
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff",
        b"[" * 50_000,
        b'{"a": NaN}',
        b'{"a": -Infinity}',
        b"1" * 5000,
        b'"\xed\xa0\x80"',
        b'"\\ud800"',
    ],
)
def test_bytes_that_are_no_json(data):
    with pytest.raises(InputError):
        parse_json(data)


@pytest.mark.parametrize(
    "place", ['{"prompt": "%s"}', '{"stop": ["a", "%s"]}', '{"%s": 1}', '{"a": [{"b": {"%s": 0}}]}']
)
@pytest.mark.parametrize("half", ["\\ud800", "\\uDFFF", "x\\ud83d y"])
def test_half_a_surrogate_pair_is_refused_wherever_it_stands(place, half):
    with pytest.raises(InputError, match="half a surrogate pair"):
        parse_json((place % half).encode())


def test_a_whole_pair_and_a_byte_order_mark_are_text():
    assert parse_json('\ufeff{"a": "\\ud83d\\ude00\\\\ud800"}'.encode()) == {"a": "😀\\ud800"}


NOTHING_CHANGED = [
    {"tools": [], "tool_choice": "auto"},
    {"tool_choice": "none", "parallel_tool_calls": True},
    {"parallel_tool_calls": False, "functions": [], "function_call": "none"},
    {"verbosity": "medium", "modalities": ["text"], "store": False, "audio": None, "web_search_options": None},
    {"user": "\u2603", "metadata": {"a": 1}, "service_tier": "auto", "prompt_cache_key": "x"},
    {"prediction": {"type": "content", "content": "x"}, "prompt_cache_options": {"mode": "implicit"}},
    {"prompt_cache_retention": "24h", "safety_identifier": "x", "stream_options": {"include_obfuscation": False}},
    {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "stop": None},
]


@pytest.mark.parametrize("fields", NOTHING_CHANGED)
def test_fields_that_change_nothing_are_taken(fields):
    read_body(CHAT | fields, is_chat=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{}], "tool_choice": "none"}, "tools[0].type must be 'function', got None"),
    ({"tools": {"a": 1}}, "tools must be a list of functions"),
    ({"tools": "[]"}, "tools must be a list of functions"),
    ({"tools": [function("a", {"title": "x" * 270_000})]}, "tools has at most 262144 bytes"),
    ({"tools": [function("a")], "logprobs": True}, "logprobs do not know calls of tools"),
    ({"tool_choice": "required"}, "tool_choice 'required' needs tools, and the request has none"),
    ({"tool_choice": {"type": "function"}}, "tool_choice"),
    ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, got 1"),
    ({"functions": [{"name": "a"}]}, "functions [{'name': 'a'}] is not supported: declare them as tools"),
    ({"function_call": {"name": "a"}}, "function_call {'name': 'a'} is not supported: set tool_choice"),
    ({"modalities": ["text", "audio"]}, "modalities ['text', 'audio'] is not supported: answers are text"),
    ({"audio": {"voice": "x"}}, "audio {'voice': 'x'} is not supported: answers are text"),
    ({"web_search_options": {}}, "web_search_options {} is not supported: this server searches nothing"),
    ({"moderation": {"model": "x"}}, "moderation {'model': 'x'} is not supported"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation is not supported"),
    ({"verbosity": "low"}, "verbosity 'low' is not supported: leave it out"),
    ({"store": True}, "store True is not supported: leave it out"),
    ({"frequency_penalty": 2.5}, "frequency_penalty must be in [-2, 2]"),
    ({"presence_penalty": "1"}, "presence_penalty must be of type float"),
    ({"logit_bias": {"a": 1}}, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {"01": 1}}, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {"-1": 1}}, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {"1": 101}}, "must be in [-100, 100]"),
    ({"logit_bias": [1]}, "logit_bias must map token ids to numbers"),
    ({"logit_bias": {str(n): 1 for n in range(2000)}}, "logit_bias has at most 1024 tokens, got 2000"),
    ({"reasoning_effort": 3}, "reasoning_effort must be text"),
    ({"stop": ["a"] * 5}, "stop must be a text or up to four"),
    ({"stop": "a" * 300}, "a stop string has at most 256 characters, got 300"),
    ({"stop": {}}, "stop must be a text or up to four"),
    ({"response_format": {"type": "choice", "choices": ["yes"] * 60_000}}, "response_format has at most 65536 bytes"),
    ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens and max_completion_tokens differ"),
    ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ({"top_logprobs": 2}, "top_logprobs needs logprobs"),
    ({"messages": "Hi"}, "messages must be a list"),
    ({"messages": [{"content": "Hi"}]}, "a message has a role"),
    ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
    ({"x" * 20_000: 1}, "unknown field"),
    ({"n": 129}, "body.n must be in [1, 128]"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_other_values_are_refused(fields, problem):
    assert problem in refusal(CHAT | fields)


def test_every_field_of_openais_client_is_known():
    """Each is honoured, taken because it changes nothing, or refused with a remedy; a new one shows up here."""
    openai = pytest.importorskip("openai", reason="openai is in the extra dev")
    of_http = {"self", "extra_headers", "extra_query", "extra_body", "timeout"}
    for client, kind, neutral in (
        (openai.resources.chat.Completions, ChatBody, NEUTRAL_CHAT),
        (openai.resources.Completions, CompletionBody, NEUTRAL_COMPLETION),
    ):
        sent = set(inspect.signature(client.create).parameters) - of_http
        assert len(sent) > 15
        known = {field.name for field in dataclasses.fields(kind)} | OPTIONS | IGNORED | set(neutral)
        assert sent - known == set()


@pytest.mark.parametrize("levels", [70, 600, 950])
@pytest.mark.parametrize("pair", [("[", "]"), ('{"a":', "}")])
def test_bodies_are_bounded_in_depth(levels, pair):
    """Whoever reads them further may use recursion."""
    value = pair[0] * levels + "1" + pair[1] * levels
    with pytest.raises(InputError, match=r"nested deeper than 64|must be JSON"):
        parse_json(f'{{"messages": [{{"role": "user", "content": {value}}}]}}'.encode())
    parse_json((pair[0] * 60 + "1" + pair[1] * 60).encode())


@pytest.mark.parametrize("prompt", [None, 3, [[1, True]], [True], [[1], "b", 2], {"a": 1}, [[1], [2.0]]])
def test_what_is_no_prompt(prompt):
    assert "prompt must be" in refusal({"prompt": prompt}, is_chat=False)


def test_completions_say_what_goes_together():
    read_body({"prompt": "a", "echo": True, "logprobs": 1, "max_tokens": 0}, is_chat=False)
    read_body({"prompt": [1, 2], "best_of": 2, "n": 2, "suffix": ""}, is_chat=False)
    assert "at least 1 without echo" in refusal({"prompt": "a", "max_tokens": 0}, is_chat=False)
    assert "best_of other than n" in refusal({"prompt": "a", "best_of": 2}, is_chat=False)
    assert "unknown field 'echo'" in refusal(CHAT | {"echo": True})


def test_all_texts_of_a_conversation_count():
    assert text_length([{"role": "user", "content": [{"type": "text", "text": "abc"}]}]) == 4 + 4 + 7 + 4 + 4 + 4 + 3


WORDS = [
    "messages",
    "prompt",
    "stop",
    "logit_bias",
    "response_format",
    "tools",
    "tool_choice",
    "function",
    "type",
    "n",
    "echo",
    "json_schema",
    "role",
    "\ud7ff",
    "",
]


def value(rng: random.Random, depth: int = 0) -> Any:
    """Any JSON, of few names that mean something."""
    kind = rng.randrange(9 if depth < 4 else 6)
    if kind < 6:
        return rng.choice([None, True, -1, 0, 2**70, 1e308, -0.5, "text", "", "\U0001f600", *WORDS])
    if kind == 6:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    return {rng.choice(WORDS): value(rng, depth + 1) for _ in range(rng.randrange(4))}


@pytest.mark.parametrize("is_chat", [True, False])
def test_any_json_is_read_or_refused(is_chat):
    rng, read = random.Random(is_chat), 0
    for _ in range(1000):
        body = {"messages": CHAT["messages"]} if is_chat else {"prompt": "a"}
        for _ in range(rng.randrange(3)):
            body[rng.choice([*WORDS, "tools", "max_tokens", "logprobs", "seed", "stream_options", "budget"])] = value(
                rng
            )
        try:
            read_body(parse_json(json.dumps(body).encode()), is_chat=is_chat)
            read += 1
        except InputError:
            pass
    assert 150 < read < 950
