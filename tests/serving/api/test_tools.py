"""Requests with tools, and their replies: whole, in pieces, and in a second turn."""

import dataclasses
import json
from typing import Any

import pytest

from l2d_jax.data.tokenizer import stop_ids
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Piece
from l2d_jax.errors import InputError
from l2d_jax.serving.api.protocol import Asked, Protocol
from l2d_jax.serving.api.replies import Reply
from tests.support.served import catalogue, serving, talking_model
from tests.support.tool_templates import KINDS, TOOLS, function, tokenizer

pytest.importorskip("llguidance.hf", reason="needs llguidance: the extra structured")
MESSAGES = [{"role": "user", "content": "Hi"}]
GET = {"type": "function", "function": {"name": "get"}}
CALL = ["⟦<tool_call>⟧", '\n{"name"', ': "get", ', '"arguments": {"n"', ": 7}}\n", "⟦</tool_call>⟧"]


def speaking(kind: str) -> LoadedModel:
    """A model with random weights, whose template writes calls."""
    made = tokenizer(**KINDS[kind])
    return dataclasses.replace(talking_model(), tokenizer=made, stop_ids=tuple(stop_ids(made)))


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return Protocol(catalogue(speaking("qwen"), context=1024))


def read(protocol: Protocol, **fields: Any) -> Asked:
    body = {"messages": MESSAGES, "max_tokens": 200, "tools": TOOLS, **fields}
    return protocol.read(json.dumps(body).encode(), is_chat=True)


def replied(protocol: Protocol, pieces: list[str], *, ending: str = "stop", **fields: Any) -> tuple[Any, Any]:
    """The chunks of a stream whose pieces are these texts (⟦...⟧: a token), and the whole reply."""
    asked = read(protocol, **fields)
    reply = Reply(asked, protocol.tokenizer, name="tiny")
    chunks = []
    for answer in asked.answers:
        for number, piece in enumerate(pieces, 1):
            is_token = piece.startswith("⟦")
            ids = [protocol.tokenizer.convert_tokens_to_ids(piece[1:-1])] if is_token else [*piece.encode()]
            is_last = number == len(pieces)
            chunks.append(reply.add(Piece(answer.number, ids, is_last, ending if is_last else "")))
    return [chunk["choices"][0] for chunk in chunks if chunk is not None], reply.whole()["choices"]


def test_a_call_arrives_in_openais_deltas(protocol):
    chunks, [choice] = replied(protocol, ["Let me ", "look.\n", *CALL])
    first, text, opened, *rest = [chunk["delta"] for chunk in chunks]
    assert first == {"role": "assistant", "content": "Let me"}
    assert text == {"content": " look."}
    [call] = opened["tool_calls"]
    assert (call["index"], call["type"]) == (0, "function")
    assert call["function"] == {"name": "get", "arguments": '{"n"'}
    assert rest == [{"tool_calls": [{"index": 0, "function": {"arguments": ": 7}"}}]}, {}]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * 4 + ["tool_calls"]
    [told] = choice["message"]["tool_calls"]
    assert told["function"] == {"name": "get", "arguments": '{"n": 7}'}
    assert (choice["message"]["content"], choice["finish_reason"]) == ("Let me look.", "tool_calls")


def test_calls_alone_have_no_content_and_ids_of_their_own(protocol):
    chunks, [one, two] = replied(protocol, [*CALL, "\n", *CALL], n=2)
    assert chunks[0]["delta"] == {"role": "assistant", "content": None}
    assert (one["message"]["content"], one["finish_reason"]) == (None, "tool_calls")
    ids = [call["id"] for choice in (one, two) for call in choice["message"]["tool_calls"]]
    assert len({*ids}) == 4
    assert all(len(number) == 9 and number.isalnum() for number in ids)


def test_text_alone_is_content(protocol):
    chunks, [choice] = replied(protocol, ["Hello", " <tool", " box"])
    assert "".join(chunk["delta"].get("content") or "" for chunk in chunks) == "Hello <tool box"
    assert choice["message"] == {"role": "assistant", "content": "Hello <tool box", "refusal": None}
    assert choice["finish_reason"] == "stop"


def test_a_call_that_is_cut_off_says_so(protocol):
    for pieces, calls in ((CALL[:3], 0), (CALL[:4], 1)):
        for ending in ("length", "stop"):  # a stop string may end an answer, too
            _, [choice] = replied(protocol, pieces, ending=ending)
            assert choice["finish_reason"] == ending
            assert len(choice["message"].get("tool_calls", [])) == calls


def test_markers_that_are_special_tokens_are_read(protocol):
    own = Protocol(catalogue(speaking("mistral"), context=1024))
    pieces = ["⟦[TOOL_CALLS]⟧", ' [{"name": "get", "arguments": {}}, {"name"', ': "get", "arguments": {"n": 1}}]']
    _, [choice] = replied(own, pieces)
    told = [call["function"]["arguments"] for call in choice["message"]["tool_calls"]]
    assert (told, choice["message"]["content"]) == (["{}", '{"n": 1}'], None)


def test_the_prompt_has_the_tools_and_a_second_turn(protocol):
    """What a reply says is what the template gets in the next request."""
    [answer] = read(protocol).answers
    prompt = protocol.tokenizer.decode(answer.prompt.ids)
    assert prompt.startswith(f"<|im_start|>system\n{json.dumps(TOOLS)}")
    assert answer.grammar is not None
    pieces = ["Let me look.\n", *CALL]
    _, [choice] = replied(protocol, pieces)
    result = {"role": "tool", "tool_call_id": choice["message"]["tool_calls"][0]["id"], "content": "sun"}
    [second] = read(protocol, messages=[*MESSAGES, choice["message"], result]).answers
    said = "".join(pieces).replace("⟦", "").replace("⟧", "")
    following = f"{said}<|im_end|>\n<|im_start|>tool\nsun<|im_end|>\n<|im_start|>assistant\n"
    assert protocol.tokenizer.decode(second.prompt.ids) == prompt + following


def test_without_calls_there_is_nothing_to_read(protocol):
    assert read(protocol, tools=[]).answers[0].grammar is None
    asked = read(protocol, tool_choice="none", logprobs=True)
    assert asked.calls is None
    assert asked.answers[0].grammar is not None  # it keeps the tag out
    form = {"type": "choice", "choices": ["yes", "no"], "probabilities": False}
    asked = read(protocol, response_format=form)
    assert asked.calls is not None
    assert asked.calls.begins
    assert asked.body.tools is None  # it may be large


def refusal(protocol: Protocol, **fields: Any) -> str:
    with pytest.raises(InputError) as refused:
        read(protocol, **fields)
    return str(refused.value)


def test_what_is_refused(protocol):
    plain = Protocol(catalogue(talking_model()))
    assert "the chat template of this model leaves out tools: take one that knows them" in refusal(plain)
    assert "a trace does not know response_format or tools" in refusal(protocol, trace=True)
    fault = refusal(protocol, tools=[function("f", {"properties": {"a": {"items": {"not": {}}}}})])
    assert fault.startswith("tool 'f', parameters.properties.a.items: tools must be one that answers")
    assert "exceeds the 1024 tokens" in refusal(protocol, tools=[function("f", {"title": "x" * 20_000})])


@pytest.mark.slow
def test_openais_client_gets_calls():
    openai = pytest.importorskip("openai", reason="openai is in the extra dev")
    with serving(speaking("qwen")) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)
        common: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 200, "seed": 0}
        common |= {"temperature": 1.0, "logit_bias": {str(ord(mark)): 4 for mark in '"}'}}
        for choice in ("required", GET):
            reply = client.chat.completions.create(**common, tool_choice=choice, n=3)
            for one in reply.choices:
                assert (one.finish_reason, one.message.content) == ("tool_calls", None)
                for call in one.message.tool_calls:
                    assert [*json.loads(call.function.arguments)] in (["city"], ["n"])
                    assert choice == "required" or call.function.name == "get"
        details = reply.usage.prompt_tokens_details, reply.usage.completion_tokens_details
        assert [details[0].cached_tokens, details[1].reasoning_tokens] == [0, 0]
        forced = {"logit_bias": {**common["logit_bias"], "259": 100}, "parallel_tool_calls": False}  # <tool_call>
        whole = client.chat.completions.create(**common | forced).choices[0]
        [call] = whole.message.tool_calls
        with client.chat.completions.stream(**common | forced) as stream:
            [streamed] = stream.get_final_completion().choices
        [same] = streamed.message.tool_calls
        assert (same.function.name, same.function.arguments) == (call.function.name, call.function.arguments)
        assert streamed.finish_reason == whole.finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "sun"}
        second = [*MESSAGES, whole.message, result]
        after = client.chat.completions.create(**common | {"messages": second, "max_tokens": 4, "tool_choice": "none"})
        assert (after.choices[0].finish_reason, after.choices[0].message.tool_calls) == ("length", None)
