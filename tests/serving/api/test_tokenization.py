"""`/tokenize` and `/detokenize`: the ids that a request would have, and their text."""

import json
from typing import Any

import pytest

from l2d_jax.errors import InputError
from l2d_jax.serving.api.protocol import Protocol
from tests.serving.api.test_protocol import with_bos
from tests.serving.api.test_tools import MESSAGES, speaking
from tests.support.served import catalogue
from tests.support.tool_templates import TOOLS

ANSWER = {"role": "assistant", "content": "Hello "}


@pytest.fixture(scope="module")
def protocol() -> Protocol:
    return Protocol(catalogue(speaking("qwen"), context=600))


def tokens(protocol: Protocol, **fields: Any) -> dict[str, Any]:
    return protocol.tokenize(json.dumps(fields).encode())


def test_a_prompt_has_the_ids_of_a_completion(protocol, monkeypatch):
    reply = tokens(protocol, model="tiny", prompt="a<tool_call>", return_token_strs=True)
    assert reply == {"count": 2, "max_model_len": 600, "tokens": [97, 259], "token_strs": ["a", "<tool_call>"]}
    assert protocol.detokenize(b'{"tokens": [97, 259, 258]}') == {"prompt": "a<tool_call><|im_end|>"}
    monkeypatch.setattr(protocol, "tokenizer", with_bos())
    assert tokens(protocol, prompt="a")["tokens"] == [256, 97]
    assert tokens(protocol, prompt="a", add_special_tokens=False) == {
        "count": 1,
        "max_model_len": 600,
        "tokens": [97],
        "token_strs": None,
    }


def test_messages_have_the_ids_of_a_chat(protocol):
    for messages in (MESSAGES, [*MESSAGES, ANSWER]):
        for tools in ([], TOOLS):
            body = {"messages": messages, "tools": tools}
            [answer] = protocol.read(json.dumps({**body, "max_tokens": 1}).encode(), is_chat=True).answers
            assert tokens(protocol, **body)["tokens"] == answer.prompt.ids
    finished = protocol.tokenizer.decode(tokens(protocol, messages=MESSAGES, add_generation_prompt=False)["tokens"])
    assert finished == "<|im_start|>user\nHi<|im_end|>\n"
    opened = {"messages": [*MESSAGES, ANSWER], "add_generation_prompt": False, "continue_final_message": True}
    assert protocol.tokenizer.decode(tokens(protocol, **opened)["tokens"]).endswith("assistant\nHello")


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({}, "give a prompt or messages"),
        ({"prompt": "a", "messages": MESSAGES}, "give a prompt or messages"),
        ({"prompt": [1]}, "prompt must be text, got [1]"),
        ({"messages": MESSAGES, "tools": [{}]}, "tools[0].type must be 'function'"),
        ({"prompt": "a", "tools": TOOLS}, "tools belong to messages"),
        ({"prompt": "a", "continue_final_message": True}, "belong to messages"),
        ({"prompt": "x" * 10_000}, "a prompt of 10000 characters exceeds the 600 tokens"),
        ({"messages": MESSAGES * 700}, "700 messages exceed the 600 tokens"),
        ({"messages": []}, "messages must be a list"),
        ({"messages": MESSAGES, "add_special_tokens": True}, "the chat template writes special tokens"),
        ({"messages": MESSAGES, "continue_final_message": True}, "needs a last message of the assistant"),
        ({"prompt": "a", "model": "b"}, "there is no model 'b' here"),
        ({"promt": "a"}, "unknown option body.promt: did you mean 'prompt'?"),
    ],
)
def test_what_has_no_tokens(protocol, fields, problem):
    with pytest.raises(InputError) as refused:
        tokens(protocol, **fields)
    assert problem in str(refused.value)


def test_what_has_no_text(protocol):
    for given, problem in (
        ("a", "list of token ids"),
        ([1.5], "list of token ids"),
        ([264], "264 is not one"),
        ([1] * 601, "601"),
    ):
        with pytest.raises(InputError, match=problem):
            protocol.detokenize(json.dumps({"tokens": given}).encode())
