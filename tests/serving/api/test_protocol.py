"""Requests as one model reads them: their sizes, their options, and the ids of their texts."""

import copy
import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError
from l2d_jax.serving.api.protocol import Asked, Protocol
from l2d_jax.serving.api.roles import name_system
from tests.support.served import catalogue, talking_model

MESSAGES = [{"role": "user", "content": "Hi"}]
EFFORTS = {"low": 3, "high": 15}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return talking_model()


@pytest.fixture(scope="module")
def protocol(loaded: LoadedModel) -> Protocol:
    return Protocol(catalogue(loaded, context=256, answers=64, efforts=EFFORTS))


def read(protocol: Protocol, *, is_chat: bool = True, **fields: Any) -> Asked:
    body = {"messages": MESSAGES, "max_tokens": 4} if is_chat else {"max_tokens": 4}
    return protocol.read(json.dumps(body | fields).encode(), is_chat=is_chat)


def refusal(protocol: Protocol, *, is_chat: bool = True, **fields: Any) -> str:
    with pytest.raises(InputError) as refused:
        read(protocol, is_chat=is_chat, **fields)
    return str(refused.value)


def test_the_role_developer_is_that_of_the_system(protocol, loaded):
    """Where the chat template knows it, it stays."""

    def told(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, *MESSAGES]
        return read(protocol, messages=messages).answers[0].prompt.ids

    assert told("developer") == told("system") != told("user")
    words = copy.deepcopy(loaded.tokenizer)
    words.chat_template += "{# developer #}"
    messages = [{"role": "developer", "content": "Be brief."}]
    assert name_system(messages, words) == messages


class NoTokenizer:
    """Stands for a tokenizer that must not be asked."""


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"prompt": ["a"] * 60_000, "n": 128}, "at most 64 answers here, got 7680000"),
        ({"prompt": ["a"] * 33, "n": 2}, "at most 64 answers here, got 66"),
        ({"prompt": "a" * 500_000}, "a prompt of 500000 characters exceeds the 256 tokens"),
        ({"prompt": ["b" * 10_000, "a"]}, "exceeds the 256 tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 9000}]}]}, "exceeds the 256 tokens"),
        ({"messages": MESSAGES * 300}, "300 messages exceed the 256 tokens"),
        ({"messages": MESSAGES, "n": 65}, "at most 64 answers here, got 65"),
    ],
)
def test_sizes_are_checked_before_a_text_is_tokenised(protocol, monkeypatch, fields, problem):
    monkeypatch.setattr(protocol, "tokenizer", NoTokenizer())
    assert problem in refusal(protocol, is_chat="messages" in fields, **fields)


def test_token_ids_are_checked(protocol):
    assert "exceed the 256 tokens" in refusal(protocol, is_chat=False, prompt=[1] * 300)
    assert "token 264 is not one of the 264" in refusal(protocol, is_chat=False, prompt=[1, 264])
    assert "a prompt is empty" in refusal(protocol, is_chat=False, prompt=[])
    assert "logit_bias" in refusal(protocol, logit_bias={"99": "1"})
    assert "token 264" in refusal(protocol, logit_bias={"264": 1})


def test_a_reply_is_bounded(protocol):
    read(protocol, n=64, logprobs=True, top_logprobs=20, max_tokens=150)
    with pytest.raises(InputError, match="log-probabilities exceed the 262144 of a reply"):
        read(protocol, n=64, logprobs=True, top_logprobs=20, max_tokens=220)


def test_budgets_and_draws_have_limits(protocol):
    assert "a budget of 65 exceeds the 64 evaluations" in refusal(protocol, budget=65)
    assert "17 draws exceed the 16" in refusal(protocol, budget=3, draws=17)
    assert "fehlberg2 takes up to 512 evaluations per token" in refusal(protocol, solver="fehlberg2")
    assert read(protocol, solver="fehlberg2", budget=64).answers[0].settings.budget == 64
    assert read(protocol, budget=63, draws=16).answers[0].settings.draws == 16


def test_an_effort_is_a_budget(protocol, loaded):
    assert read(protocol, reasoning_effort="high").answers[0].settings.budget == 15
    assert read(protocol, reasoning_effort="high", budget=7).answers[0].settings.budget == 7
    assert read(protocol).answers[0].settings.budget == loaded.defaults.budget
    assert "must be one of low, high, got 'medium'" in refusal(protocol, reasoning_effort="medium")
    without = Protocol(catalogue(loaded, context=256))
    assert "give a budget" in refusal(without, reasoning_effort="low")


def test_an_end_is_a_field(protocol):
    assert read(protocol, budget=15, end=0.5).answers[0].settings.end == 0.5
    assert "config.decode.end must be in [1e-06, 1], got 1.5" in refusal(protocol, budget=15, end=1.5)
    assert "end changes nothing at a budget of 1" in refusal(protocol, budget=1, end=0.5)


def test_penalties_and_biases_reach_the_answers(protocol):
    [answer] = read(protocol, frequency_penalty=1, presence_penalty=-0.5, logit_bias={"70": -100}).answers
    found = answer.restrictions
    assert (found.frequency_penalty, found.presence_penalty, found.logit_bias) == (1.0, -0.5, {70: -100.0})


def test_options_that_do_nothing_are_refused(protocol):
    assert "tolerance is for adaptive solvers" in refusal(protocol, tolerance=0.1)
    assert "no label is given" in refusal(protocol, guidance=2.0) or "guidance" in refusal(protocol, guidance=2.0)


def with_bos(*, end: str = "") -> PreTrainedTokenizerFast:
    """The byte tokenizer, which writes <|pad|> (256) before each text, and an end after it."""
    tokenizer = byte_tokenizer()
    ends = [("<|im_end|>", 258)] if end else []
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"<|pad|> $A {end}".strip(), special_tokens=[("<|pad|>", 256), *ends]
    )
    return tokenizer


def test_a_raw_completion_begins_as_its_tokenizer_writes_it(loaded):
    """As vLLM and llama.cpp have it; token ids stay as they are, and a chat template writes its own beginning."""
    protocol = Protocol(catalogue(dataclasses.replace(loaded, tokenizer=with_bos())))

    def ids(**fields: Any) -> list[list[int]]:
        return [list(answer.prompt.ids) for answer in read(protocol, is_chat="messages" in fields, **fields).answers]

    assert ids(prompt="ab") == [[256, 97, 98]]
    assert ids(prompt=["a", "b"]) == [[256, 97], [256, 98]]
    assert ids(prompt=[97, 98]) == [[97, 98]]
    assert ids(messages=MESSAGES)[0][0] == 257
    ended = Protocol(catalogue(dataclasses.replace(loaded, tokenizer=with_bos(end="<|im_end|>"))))
    assert list(read(ended, is_chat=False, prompt="ab").answers[0].prompt.ids) == [256, 97, 98, 258]


def test_conversations_go_to_the_template_as_they_are(protocol):
    """Parts of text, tool calls without a content and the messages of tools."""
    parts = [{"role": "user", "content": [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]}]
    [answer] = read(protocol, messages=parts).answers
    assert answer.prompt.ids == read(protocol, messages=MESSAGES).answers[0].prompt.ids
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    calls = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"role": "tool", "tool_call_id": "1", "name": "add", "content": "2"}
    template = (
        "{% for m in messages %}{{ m.role }}{{ m.tool_calls[0].function.arguments.a if m.tool_calls else m.content }}"
    )
    own = byte_tokenizer()
    own.chat_template = template + "{{ m.name }}{{ m.tool_call_id }}<|im_end|>{% endfor %}"
    tools = Protocol(catalogue(dataclasses.replace(protocol.models.get("").loaded, tokenizer=own)))
    [answer] = read(tools, messages=[*MESSAGES, calls, tool]).answers
    assert own.decode(answer.prompt.ids) == "userHi<|im_end|>assistant1<|im_end|>tool2add1<|im_end|>"
    assert "image" in refusal(
        protocol, messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    )


def test_many_threads_read_what_one_reads(protocol):
    bodies = [{"prompt": f"{number} " * (number % 20 + 1)} for number in range(60)]
    alone = [read(protocol, is_chat=False, **body).answers for body in bodies]
    with ThreadPoolExecutor(8) as pool:
        together = [*pool.map(lambda body: read(protocol, is_chat=False, **body).answers, bodies)]
    for (one,), (other,) in zip(alone, together, strict=True):
        assert one.prompt.ids == other.prompt.ids
    numbers = [answer.number for answers in together for answer in answers]
    assert len({*numbers}) == 60


def test_what_is_kept_of_a_request_is_small(protocol):
    """Many may wait."""
    body = read(protocol, response_format={"type": "text"}, metadata={"a": "x" * 50_000}).body
    assert (body.messages, body.response_format, body.logit_bias) == (None, None, None)


def test_an_echo_takes_one_of_few_numbers_of_draws(protocol):
    for draws in (1, 3):
        scored = {"prompt": "ab", "echo": True, "logprobs": 1, "budget": 3, "draws": draws}
        assert "take the mean over 2, 4, 8, 16, 32, 64 noise samples" in refusal(protocol, is_chat=False, **scored)
    asked = read(protocol, is_chat=False, prompt=["ab", [99]], echo=True, logprobs=1, max_tokens=0, n=2)
    assert [echo.text for echo in asked.echoes] == ["ab", "c"]
    assert (len(asked.answers), len(asked.scoring), asked.is_answered) == (4, 2, False)
