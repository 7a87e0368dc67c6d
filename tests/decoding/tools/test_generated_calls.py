"""Tools in Python: answers with calls as the chat template writes them."""

import dataclasses
import json

import jax
import pytest

import l2d_jax
from l2d_jax.data.tokenizer import prompt_ids, stop_ids
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError
from tests.support.served import talking_base
from tests.support.tool_templates import KINDS, NUMBER, TOOLS, function, tokenizer

pytest.importorskip("llguidance.hf", reason="needs llguidance: the extra structured")
BIASES = {ord(mark): 6.0 for mark in '"}'}  # so that calls end soon


def speaking(kind: str) -> LoadedModel:
    made = tokenizer(**KINDS[kind])
    return dataclasses.replace(talking_base(), tokenizer=made, stop_ids=tuple(stop_ids(made)))


@pytest.mark.parametrize("kind", ["llama", pytest.param("mistral", marks=pytest.mark.slow)])
def test_an_answer_has_calls(kind, mesh):
    """With special tokens among them, and in a stream as at once."""
    model, tools = speaking(kind), [function("get", NUMBER)]
    options = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "budget": 1}
    options |= {"max_new_tokens": 120, "logit_bias": BIASES, "temperature": 1.0, "seed": 1}
    ids = prompt_ids([{"role": "user", "content": "Hi"}], model.tokenizer, tools=tools)
    with jax.set_mesh(mesh):
        answer = model.generate("Hi", **options)
        streamed = "".join(model.stream("Hi", **options))
        said = model.generate(ids, **options)
    text, [call] = l2d_jax.parse_tool_calls(answer, model.tokenizer)
    assert (text, call.name, [*json.loads(call.arguments)]) == ("", "get", ["n"])
    assert streamed == answer
    assert isinstance(said, list)
    if kind == "mistral":
        assert answer.lstrip().startswith("[TOOL_CALLS]")
        assert said.count(259) == 1


def test_what_is_refused():
    with pytest.raises(InputError, match="leaves out tools: take one that knows them"):
        talking_base().generate("Hi", tools=TOOLS)
    with pytest.raises(InputError, match="tool_choice must be one of none, auto, required, got 'any'"):
        speaking("qwen").generate("Hi", tools=TOOLS, tool_choice="any")
    with pytest.raises(InputError, match="did you mean 'tool_choice'"):
        speaking("qwen").generate("Hi", tool_choise="auto")
    with pytest.raises(InputError, match="tools is for generate and stream alone"):
        speaking("qwen").score("Hi", "Hello", tools=TOOLS)
