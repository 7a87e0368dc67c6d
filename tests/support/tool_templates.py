"""Chat templates that write calls of tools in the formats of well-known models, and tokenizers with them."""

from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import byte_tokenizer

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "minLength": 1, "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 999}},
    "required": ["n"],
    "additionalProperties": False,
}


def function(name: str, parameters: Any = None, **fields: Any) -> dict[str, Any]:
    """A tool, as OpenAI's clients declare it."""
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", **given, **fields}}


TOOLS = [function("get_weather", WEATHER), function("get", NUMBER)]

FRAME = """\
{%%- if tools %%}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{%% endif -%%}
{%%- for message in messages -%%}
{{- '<|im_start|>' + message.role + '\n' -}}
{%%- if message.tool_calls -%%}
%s
{{- '<|im_end|>\n' -}}
{%%- else -%%}
{{- message.content + '<|im_end|>\n' -}}
{%%- endif -%%}
{%%- endfor -%%}
{%%- if add_generation_prompt -%%}{{ '<|im_start|>assistant\n' }}%s{%%- endif -%%}"""
QWEN = """\
{%- if message.content %}{{ message.content + '\n' }}{% endif -%}
{%- for call in message.tool_calls -%}
{%- if not loop.first %}{{ '\n' }}{% endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- '}\n</tool_call>' -}}
{%- endfor -%}"""
HERMES = """\
{%- for call in message.tool_calls -%}
{{- '\n<tool_call>\n{ "arguments": ' + call.function.arguments | tojson + ', "name": "' + call.function.name -}}
{{- '"}\n</tool_call> ' -}}
{%- endfor -%}"""
LLAMA = """\
{%- if message.tool_calls | length > 1 %}{{ raise_exception('This model only supports single tool-calls') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' -}}"""
MISTRAL = """\
{{- '[TOOL_CALLS] [' -}}
{%- for call in message.tool_calls -%}
{%- if call.id | length != 9 %}{{ raise_exception('ids have a length of 9') }}{% endif -%}
{%- set written = call.function | tojson -%}
{{- written[:-1] + ', "id": "' + call.id + '"}' + ('' if loop.last else ', ') -}}
{%- endfor -%}
{{- ']' -}}"""
TEKKEN = """\
{%- for call in message.tool_calls -%}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}"""
XML = """\
{%- for call in message.tool_calls -%}
{{- '<call name="' + call.function.name + '">' + (call.function.arguments | items | list) | string + '</call>' -}}
{%- endfor -%}"""
TAGS = ("<tool_call>", "</tool_call>")
THOUGHTS = ("<think>", "</think>")
OPENED = "{{ '<think>\n' }}"  # R1's prompt opens a thought
CLOSED = "{# </think> #}"  # a template that knows thoughts


def tokenizer(calls: str, *, prompt: str = "", added: Any = (), special: Any = ()) -> PreTrainedTokenizerFast:
    """The byte tokenizer, with a chat template and further tokens, from id 259."""
    made = byte_tokenizer()
    made.chat_template = FRAME % (calls, prompt)
    made.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    made.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    return made


KINDS: dict[str, dict[str, Any]] = {
    "qwen": {"calls": QWEN, "added": TAGS},
    "qwen without tokens": {"calls": QWEN},
    "qwen with thoughts": {"calls": QWEN + CLOSED, "added": (*TAGS, *THOUGHTS)},
    "opened thought": {"calls": QWEN, "prompt": OPENED},
    "hermes": {"calls": HERMES, "special": TAGS},
    "llama": {"calls": LLAMA, "special": ("<|python_tag|>",)},
    "llama without a tag": {"calls": LLAMA},
    "llama with thoughts": {"calls": LLAMA + CLOSED, "added": THOUGHTS},
    "special thoughts": {"calls": QWEN + CLOSED, "added": TAGS, "special": THOUGHTS},
    "llama with special thoughts": {"calls": LLAMA + CLOSED, "special": THOUGHTS},
    "mistral": {"calls": MISTRAL, "special": ("[TOOL_CALLS]",)},
    "tekken": {"calls": TEKKEN, "special": ("[TOOL_CALLS]", "[ARGS]")},
}
