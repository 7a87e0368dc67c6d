"""The format of calls is read from the chat template, whatever the model."""

import pytest

from l2d_jax.data.tokenizer import byte_tokenizer, stop_ids
from l2d_jax.decoding.tools.call_format import ID, CallFormat, find_call_format
from l2d_jax.errors import InputError
from tests.support.tool_templates import KINDS, LLAMA, XML, tokenizer


def find(kind: str) -> CallFormat:
    made = tokenizer(**KINDS[kind])
    return find_call_format(made, stop_ids(made))


def test_qwens_calls():
    form = find("qwen")
    assert (form.tag, form.is_bare, form.is_name_first) == ("<tool_call>", False, True)
    assert (form.opening, form.middle, form.closing) == ('\n{"name": "', '", "arguments": ', "}\n</tool_call>")
    assert form.between == '}\n</tool_call>\n<tool_call>\n{"name": "'
    assert (form.has_thoughts, form.markers) == (False, {})
    assert find("qwen without tokens").tag == "<tool_call>"  # a word, letter by letter


def test_arguments_may_come_before_the_name():
    form = find("hermes")
    assert (form.opening, form.middle, form.closing) == ('\n{ "arguments": ', ', "name": "', '"}\n</tool_call>')
    assert not form.is_name_first
    assert form.markers == {259: "<tool_call>", 260: "</tool_call>"}


def test_bare_json_begins_an_answer():
    form = find("llama")
    assert (form.tag, form.is_bare, form.between) == ("<|python_tag|>", True, None)
    assert (form.opening, form.middle, form.closing) == ('{"name": "', '", "parameters": ', "}")
    assert find("llama without a tag").tag == ""


def test_ids_of_calls_are_found():
    form = find("mistral")
    assert (form.tag, form.opening, form.closing) == ("[TOOL_CALLS]", ' [{"name": "', f', "id": "{ID}"}}]')
    assert form.between == f', "id": "{ID}"}}, {{"name": "'


def test_names_without_json_around_them():
    form = find("tekken")
    assert (form.tag, form.opening, form.middle) == ("[TOOL_CALLS]", "", "[ARGS]")
    assert (form.closing, form.between) == ("", "[TOOL_CALLS]")
    assert form.markers == {259: "[TOOL_CALLS]", 260: "[ARGS]"}


def test_thoughts_are_no_part_of_a_call():
    form = find("opened thought")
    assert (form.tag, form.has_thoughts, form.opens_thought) == ("<tool_call>", True, True)
    form = find("qwen with thoughts")
    assert (form.has_thoughts, form.opens_thought) == (True, False)
    written = tokenizer("{{ '<think>\n\n</think>\n\n' }}" + KINDS["qwen"]["calls"])  # Qwen 3 writes an empty one
    assert find_call_format(written, stop_ids(written)).opening == '\n{"name": "'


def test_what_a_template_must_write():
    with pytest.raises(InputError, match="leaves out tools: take one that knows them, or leave them out"):
        find_call_format(byte_tokenizer(), (258,))
    made = tokenizer(XML)
    with pytest.raises(InputError, match="must write a tool call as a name and a JSON object of arguments, got '<call"):
        find_call_format(made, (258,))
    made = tokenizer("{{- 'Action: ' + message.tool_calls[0].function | tojson -}}")
    with pytest.raises(InputError, match="must open a tool call by a tag or by JSON, got 'Action: "):
        find_call_format(made, (258,))
    made.chat_template = made.chat_template.replace("message.tool_calls", "message.calls")
    with pytest.raises(InputError, match="leaves out tool calls"):
        find_call_format(made, (258,))


def test_the_template_for_tools_counts():
    made = byte_tokenizer()
    made.chat_template = {"default": made.chat_template, "tool_use": tokenizer(LLAMA).chat_template}
    assert find_call_format(made, stop_ids(made)).is_bare
