"""Answers that follow the grammar of calls, drawn at random and written by hand."""

import json
import random
import re
import time

import numpy as np
import pytest
from tokenizers import AddedToken

from l2d_jax.data.tokenizer import stop_ids, text_ids
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.decoding.tools.call_format import find_call_format
from l2d_jax.decoding.tools.call_reader import ToolCall, parse_tool_calls
from l2d_jax.decoding.tools.tool_use import read_tool_use
from l2d_jax.errors import InputError
from tests.support.marks import slow
from tests.support.tiny_tokenizers import piece_tokenizer, stripping_tokenizer
from tests.support.tool_templates import KINDS, MISTRAL, TOOLS, function, tokenizer

pytest.importorskip("llguidance.hf", reason="needs llguidance: the extra structured")
GET = {"type": "function", "function": {"name": "get"}}
PADDING = 5  # ids that a model has and its tokenizer has not


def compile_for(made, choice=None, *, tools=TOOLS, parallel=None, format=None):
    use = read_tool_use(tools, choice, parallel=parallel)
    grammar = Grammar.compile(format, made, vocab_size=len(made) + PADDING, stop_ids=stop_ids(made), tools=use)
    assert grammar is not None
    return grammar


def draw(grammar, made, seed, *, begun="", limit=80):
    """The text of a random answer of visible ASCII text after `begun`, which ends soon after `limit` tokens."""
    follows, rng, ids = grammar.start(), random.Random(seed), [*begun.encode()]
    closing = [*map(ord, '"}],')]
    for token in ids:
        follows.accept(token)
    while True:
        assert len(ids) < 500
        allowed = np.flatnonzero(follows.mask()).tolist()
        if len(ids) > limit and set(allowed) & {*follows.stop_ids, *closing}:
            token = min(allowed, key=lambda one: (one not in follows.stop_ids, one not in closing))
            token = next((one for one in closing if one in allowed), token) if token in closing else token
        else:
            added = [one for one in allowed if one >= 259]
            plain = [one for one in allowed if 32 <= one < 127 or one in follows.stop_ids]
            token = rng.choice(added if added and rng.random() < 0.2 else plain or allowed)
        if token in follows.stop_ids:
            break
        follows.accept(token)
        ids.append(token)
    form = find_call_format(made, stop_ids(made))
    return to_text(ids, made, markers=form.markers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", ["auto", "required", "none", GET], ids=["auto", "required", "none", "named"])
@pytest.mark.parametrize("count", [5, *slow(25)])
def test_random_answers_have_well_formed_calls(kind, choice, count):
    made = tokenizer(**KINDS[kind])
    for parallel in (True, False):
        grammar = compile_for(made, choice, parallel=parallel)
        for seed in range(count):
            answer = draw(grammar, made, seed, begun="</think>" if kind == "opened thought" else "")
            text, calls = parse_tool_calls(answer, made)
            for call in calls:
                arguments = json.loads(call.arguments)
                assert [*arguments] == (["city"] if call.name == "get_weather" else ["n"]), answer
            if choice in ("required", GET):
                assert len(calls) > 0, answer
                assert text == "" or text.endswith("</think>") or kind == "special thoughts", answer  # tags are hidden
            if choice == "none":
                assert calls == [], answer
            if choice == GET:
                assert [call.name for call in calls] == ["get"], answer
            assert parallel or len(calls) <= 1, answer


def written(grammar, made, text):
    """What may follow a text in which ⟦...⟧ are tokens: "end" if it may end; None where a token was refused."""
    follows = grammar.start()
    for part in re.split("(⟦.*?⟧)", text):
        ids = [made.convert_tokens_to_ids(part[1:-1])] if part.startswith("⟦") else [*part.encode()]
        for token in ids:
            if not follows.mask()[token]:
                return None
            follows.accept(token)
    return "end" if follows.mask()[list(follows.stop_ids)].any() else "more"


@pytest.mark.parametrize("make", [piece_tokenizer, stripping_tokenizer])
def test_pieces_of_text_give_the_same_calls(make):
    """Tokens that begin with a space, and a decoder that drops the first space of a text."""
    made = make()
    made.chat_template = tokenizer(MISTRAL).chat_template.replace("<|im_end|>\n", "</s>")
    made.add_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    marker = made.convert_tokens_to_ids("[TOOL_CALLS]")
    grammar = compile_for(made, "auto")
    ids = [marker, *text_ids([' [{"name": "get_weather", "arguments": {"city": " yes 19"}}]'], made)[0]]
    follows = grammar.start()
    for token in ids:
        assert follows.mask()[token]
        follows.accept(token)
    assert follows.mask()[list(follows.stop_ids)].any()
    text, calls = parse_tool_calls(to_text(ids, made, markers={marker: "[TOOL_CALLS]"}), made)
    assert (text, calls) == ("", [ToolCall("get_weather", '{"city": " yes 19"}')])


CALL = '\n{"name": "get", "arguments": {"n": 1}}\n'
WRITTEN = [
    ("qwen", "auto", "Hi ☃ <tool_call", "end"),
    ("qwen", "auto", "Hi <tool_call>", None),  # letter by letter
    ("qwen", "auto", "⟦</tool_call>⟧<tool_call>", None),
    ("qwen", "auto", "Hi ⟦<tool_call>⟧", "more"),
    ("qwen", "auto", f"Hi ⟦<tool_call>⟧{CALL}⟦</tool_call>⟧", "end"),
    ("qwen", "auto", f"⟦<tool_call>⟧{CALL}⟦</tool_call>⟧\n⟦<tool_call>⟧{CALL}⟦</tool_call>⟧", "end"),
    ("qwen", "auto", f"⟦<tool_call>⟧{CALL}⟦</tool_call>⟧ a", None),
    ("qwen", "auto", '⟦<tool_call>⟧\n{"name": "x', None),
    ("qwen", "auto", '⟦<tool_call>⟧{"name":"get","arguments":{"n":1000', None),
    ("qwen", "none", "⟦<tool_call>⟧", None),
    ("qwen", "required", "Hi", None),
    ("qwen without tokens", "auto", "Hi <tool_call>", "more"),
    ("qwen without tokens", "auto", "Hi <tool_call> a", None),
    ("qwen without tokens", "none", "Hi <tool_call>", None),
    ("qwen with thoughts", "auto", "⟦<think>⟧a⟦</think>⟧\n\nHi ⟦<tool_call>⟧", "more"),
    ("qwen with thoughts", "required", "⟦<think>⟧a⟦</think>⟧\n\n⟦<tool_call>⟧", "more"),
    ("qwen with thoughts", "required", "⟦<think>⟧a⟦</think>⟧\n\nHi", None),
    ("qwen with thoughts", "required", "⟦<think>⟧a⟦<tool_call>⟧", None),
    ("opened thought", "required", "a</think>\n\n<tool_call>", "more"),
    ("opened thought", "required", "<tool_call>", None),
    ("opened thought", "auto", "a</think>\n\nHi", "end"),
    ("hermes", "auto", 'Hi ⟦<tool_call>⟧\n{ "arguments": {"n": 1}, "name": "get"}\n⟦</tool_call>⟧', "end"),
    ("hermes", "auto", '⟦<tool_call>⟧\n{ "arguments": {"n": 1}, "name": "get_', None),
    ("llama", "auto", '{"name": "get", "parameters": {"n": 1}}', "end"),
    ("llama", "auto", '{"name": "get", "parameters": {"n": 1}} ', None),
    ("llama", "auto", '\n\n{"name": "get', "more"),
    ("llama", "auto", '{"name": "x', None),
    ("llama", "auto", '\n\n\n\n\n\n{"name": "', None),
    ("llama", "auto", '{"nam": "x"}', "end"),
    ("llama", "auto", 'Hi {"name": "x"}', "end"),
    ("llama", "auto", '⟦<|python_tag|>⟧{"name": "get"', "more"),
    ("llama", "auto", "Hi ⟦<|python_tag|>⟧x", None),
    ("llama", "none", '{"name": "', None),
    ("llama with thoughts", "auto", '⟦<think>⟧a⟦</think>⟧\n\n{"name": "get"', "more"),
    ("llama with thoughts", "auto", '⟦<think>⟧a⟦</think>⟧\n\n{"name": "x', None),
    ("llama with thoughts", "auto", "⟦<think>⟧a⟦</think>⟧\n\nHi", "end"),
    ("llama with thoughts", "auto", "Hi⟦</think>⟧", None),
    ("llama with special thoughts", "auto", '⟦<think>⟧a⟦</think>⟧\n\n{"name": "get"', "more"),
    ("special thoughts", "auto", "⟦<think>⟧a⟦</think>⟧\n\n⟦<tool_call>⟧", "more"),
    ("special thoughts", "required", "⟦<think>⟧a⟦</think>⟧\n\n⟦<tool_call>⟧", "more"),
    ("mistral", "auto", '⟦[TOOL_CALLS]⟧ [{"name": "get", "arguments": {"n": 1}, "id": "abcdefghi"}]', "end"),
    ("mistral", "auto", '⟦[TOOL_CALLS]⟧[{"name": "get", "arguments": {"n": 1}}, {"name": "get"', "more"),
    ("mistral", "auto", "[TOOL_CALLS]", None),
    ("tekken", "auto", '⟦[TOOL_CALLS]⟧get⟦[ARGS]⟧{"n": 1}⟦[TOOL_CALLS]⟧', "more"),
]


@pytest.mark.parametrize(("kind", "choice", "text", "follows"), WRITTEN)
def test_what_may_be_written(kind, choice, text, follows):
    made = tokenizer(**KINDS[kind])
    assert written(compile_for(made, choice), made, text) == follows


def test_a_response_format_is_that_of_the_text():
    made = tokenizer(**KINDS["qwen"])
    formats = [
        ({"type": "json_schema", "json_schema": {"schema": TOOLS[1]["function"]["parameters"]}}, '{"n": 1}', "Hi"),
        ({"type": "regex", "regex": r"a[/]b|a\/c|\\/"}, "a/c", "ab"),
        ({"type": "choice", "choices": ["yes", 'a "/'] * 2}, 'a "/', "no"),
    ]
    for format, right, wrong in formats:
        grammar = compile_for(made, "auto", format=format)
        assert written(grammar, made, right) == "end"
        assert written(grammar, made, wrong) is None
        assert written(grammar, made, f"⟦<tool_call>⟧{CALL}⟦</tool_call>⟧") == "end"
        assert written(grammar, made, f"{right}⟦<tool_call>⟧") is None
        assert written(compile_for(made, "required", format=format), made, right) is None
        assert written(compile_for(made, "none", format=format), made, right) == "end"
    bare = tokenizer(**KINDS["llama"])
    with pytest.raises(InputError, match="calls as bare JSON, which may be an answer with response_format"):
        compile_for(bare, "auto", format=formats[0][0])
    compile_for(bare, "required", format=formats[0][0])


def faulty(schema):
    made, tools = tokenizer(**KINDS["qwen"]), [*TOOLS, function("plan", schema)]
    with pytest.raises(InputError) as refused:
        compile_for(made, tools=tools)
    return str(refused.value)


def test_a_schema_that_cannot_be_followed_is_named():
    """The tool, the place in its schema, and llguidance's reason."""
    days = {"type": "array", "items": {"type": "string", "format": "weekday"}}
    fault = faulty({"type": "object", "properties": {"a": {"type": "string"}, "when": {"anyOf": [{}, days]}}})
    assert fault.startswith("tool 'plan', parameters.properties.when.anyOf[1].items: tools must be one that")
    assert "Unknown format: weekday" in fault
    shared = {"$ref": "#/$defs/Day", "$defs": {"Day": {"type": "object", "properties": {"b": {"not": {}}}}}}
    assert faulty(shared).startswith("tool 'plan', parameters.$defs.Day.properties.b: ")
    assert faulty({"type": "object", "patternProperties": 3}).startswith("tool 'plan', parameters: ")


def test_tools_are_bounded_in_size():
    made = tokenizer(**KINDS["qwen"])

    def wide(count):
        return {"properties": {f"p{n}": {"type": "string"} for n in range(count)}}

    with pytest.raises(InputError, match="tool 'f' must have at most 1000 keys, got 1202: take fewer"):
        compile_for(made, tools=[function("f", wide(600))])
    with pytest.raises(InputError, match="tools must have at most 5000 keys"):
        compile_for(made, tools=[function(f"f{n}", wide(300)) for n in range(9)])
    aside = [function(f"f{n}", wide(40)) for n in range(20)]
    compile_for(made, tools=aside)
    with pytest.raises(InputError, match="Current row has"):  # arguments of all tools are followed side by side
        compile_for(tokenizer(**KINDS["hermes"]), tools=aside)
    with pytest.raises(InputError, match="tools must have at most 262144 bytes"):
        compile_for(made, tools=[function(f"f{n}", {"title": "x" * 60_000}) for n in range(5)])


def test_many_tools_compile_soon():
    tools = [function(f"tool_{n}", {"properties": {f"p{m}": {"type": "string"} for m in range(8)}}) for n in range(50)]
    made = tokenizer(**KINDS["hermes"])
    compile_for(made, tools=tools[:1])  # the tokenizer is read once
    began = time.monotonic()
    grammar = compile_for(made, tools=tools, choice="required")
    answer = draw(grammar, made, 0)
    assert time.monotonic() - began < 5
    assert len(parse_tool_calls(answer, made)[1]) > 0
