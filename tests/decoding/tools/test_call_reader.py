"""Text and calls of an answer, whole and in pieces of any size."""

import json
import random

import pytest

from l2d_jax.data.tokenizer import stop_ids
from l2d_jax.decoding.tools.call_format import find_call_format
from l2d_jax.decoding.tools.call_reader import CallReader, Part, parse_tool_calls
from tests.support.tool_templates import KINDS, tokenizer

CITY = '{"city": "K\\"}öln <tool_call>"}'
QWEN_CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {CITY}}}\n</tool_call>'
# An answer, its text, and its calls.
ANSWERS = {
    "qwen": [
        ("Hello.", "Hello.", []),
        (QWEN_CALL, "", [("get_weather", CITY)]),
        (f"I look.\n\n{QWEN_CALL}\n{QWEN_CALL}", "I look.", [("get_weather", CITY)] * 2),
        ('<tool_call>{"name":"get","arguments":{"n":1}}</tool_call>\n', "", [("get", '{"n":1}')]),
        ("a <tool_ca", "a <tool_ca", []),
        ("a <tool_call> b", "a <tool_call> b", []),
        ("a <tool_call>x" + QWEN_CALL, "a <tool_call>x", [("get_weather", CITY)]),
        ('a\n<tool_call>\n{"name": "get", "arguments": {"n', "a", [("get", '{"n')]),
        ('a\n<tool_call>\n{"name": "ge', "a", []),
        ('<tool_call>\n{"name": "get", "arguments": {"n": [{}, 1]}', "", [("get", '{"n": [{}, 1]}')]),
        ('<tool_call>\n{"name": "get", "arguments": {}}\n</tool_', "", [("get", "{}")]),
        ('<tool_call>\n{"name": "get", "arguments": 3}', '<tool_call>\n{"name": "get", "arguments": 3}', []),
        (f"{QWEN_CALL} Done.", " Done.", [("get_weather", CITY)]),
        ("  \n", "  \n", []),
    ],
    "hermes": [
        (f'<tool_call>\n{{"arguments": {CITY}, "name": "get_weather"}}\n</tool_call>', "", [("get_weather", CITY)]),
        ('So: <tool_call>\n{ "arguments": {"n": 1}, "nam', "So:", []),
    ],
    "llama": [
        ('{"name": "get", "parameters": {"n": 1}}', "", [("get", '{"n": 1}')]),
        ('<|python_tag|>{"name": "get", "parameters": {"n": 1}}', "", [("get", '{"n": 1}')]),
        ('Well. <|python_tag|>{"name": "get", "parameters": {"n": 1}}', "Well.", [("get", '{"n": 1}')]),
        ('{"nam": 3}', '{"nam": 3}', []),
        ('A dict: {"name": "get", "parameters": {}}', 'A dict: {"name": "get", "parameters": {}}', []),
    ],
    "llama with thoughts": [
        (
            '<think>\nhm</think>\n\n{"name": "get", "parameters": {"n": 1}}',
            "<think>\nhm</think>",
            [("get", '{"n": 1}')],
        ),
        ("<think>hm</think>\n\nHello.", "<think>hm</think>\n\nHello.", []),
    ],
    "mistral": [
        ('[TOOL_CALLS] [{"name": "get", "arguments": {"n": 1}}]', "", [("get", '{"n": 1}')]),
        (
            '[TOOL_CALLS][{"name": "get", "arguments": {"n": 1}, "id": "abcdefghi"}, {"name": "get", "arguments": {}}]',
            "",
            [("get", '{"n": 1}'), ("get", "{}")],
        ),
    ],
    "tekken": [
        ('Hm[TOOL_CALLS]get[ARGS]{"n": 1}[TOOL_CALLS]get[ARGS]{}', "Hm", [("get", '{"n": 1}'), ("get", "{}")]),
    ],
}
CASES = [(kind, *case) for kind, cases in ANSWERS.items() for case in cases]


@pytest.mark.parametrize(("kind", "answer", "text", "calls"), CASES)
def test_an_answer_is_divided_the_same_in_any_pieces(kind, answer, text, calls):
    made = tokenizer(**KINDS[kind])
    assert parse_tool_calls(answer, made) == (text, calls)
    for seed in range(20):
        reader, rng, rest, parts = CallReader(find_call_format(made, stop_ids(made))), random.Random(seed), answer, []
        while rest:
            size = rng.randint(1, 1 if seed == 0 else 12)
            parts += reader.add(rest[:size])
            rest = rest[size:]
        parts += reader.add("", is_last=True)
        assert (reader.text, reader.calls) == (text, calls)
        assert "".join(part.text for part in parts if part.call is None) == text
        for number, (name, arguments) in enumerate(calls):
            own = [part for part in parts if part.call == number]
            assert [part.name for part in own] == [name, *[None] * (len(own) - 1)]
            assert "".join(part.text for part in own) == arguments


def test_arguments_arrive_as_they_are_written():
    made = tokenizer(**KINDS["qwen"])
    reader = CallReader(find_call_format(made, stop_ids(made)))
    assert reader.add("Let me see. <tool") == [Part("Let me see.")]
    assert reader.add('_call>\n{"name": "get", "argu') == []
    assert reader.add('ments": {"n"') == [Part('{"n"', 0, "get")]
    assert not reader.is_complete
    assert reader.add(": 1}}\n</tool_call>") == [Part(": 1}", 0)]
    assert reader.is_complete
    assert json.loads(reader.calls[0].arguments) == {"n": 1}


def test_calls_that_can_only_begin_an_answer():
    """With a response_format, a string of the answer may contain the tag."""
    import dataclasses

    made = tokenizer(**KINDS["qwen"])
    form = dataclasses.replace(find_call_format(made, stop_ids(made)), begins=True)
    for answer, calls in ((json.dumps({"a": QWEN_CALL}), 0), (QWEN_CALL, 1)):
        reader = CallReader(form)
        reader.add(answer, is_last=True)
        assert len(reader.calls) == calls
        assert reader.text == ("" if calls else answer)
