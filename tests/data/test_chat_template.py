"""Chat templates are rendered as transformers renders them, the same every day, and within bounds."""

import os
import time
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from l2d_jax.data import template_bounds
from l2d_jax.data.chat_template import names_in, render_template
from l2d_jax.data.template_bounds import TOO_LARGE, TOO_LONG
from l2d_jax.data.tokenizer import CHATML, byte_tokenizer, find_template, load_tokenizer, prompt_ids, render_chat
from l2d_jax.errors import InputError

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " <b>2</b> + 3? é "},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And?"},
]
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {"properties": {"é": {"type": "string"}}}}}]
# What templates of well-known models do, each in a line.
ORDINARY = {
    "chatml": CHATML,
    "tools": """{% if tools %}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ tool.function | tojson }}{% endfor %}
{%- else %}none{% endif %}""",
    "namespace": """{% set ns = namespace(found=false, last=0) %}
{%- for m in messages[::-1] %}
{%- set index = (messages | length - 1) - loop.index0 %}
{%- if not ns.found and m.role == 'user' and not m.content.startswith('<tool>') %}
{%- set ns.found = true %}{% set ns.last = index %}{% endif %}
{%- endfor %}{{ ns.last }}{{ ns.found }}""",
    "macro": """{% macro write(m, ends=true) %}{{ m['content'] | trim }}
{%- if ends %}{{ eos_token }}{% endif %}{% endmacro %}
{%- macro both() %}{{ caller('c') }}{% endmacro %}
{%- for m in messages %}{{ write(m) + '\n' }}{{ write(m, false) }}{% endfor %}
{%- call(u) both() %}{{ u }}{% endcall %}""",
    "loop controls": """{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ loop.index }}
{{- m.content.split('>')[-1].strip().upper() }}{% if loop.last %}{% break %}{% endif %}{% endfor %}""",
    "generation": """{% for m in messages %}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}
{%- endfor %}""",
    "whitespace": """
{%- for m in messages %}
    {% if m.role != 'x' %}
  a{{ m.role }}
    {% endif %}
{%- endfor %}
""",
    "filters": """{{ messages | map(attribute='role') | join(', ') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ (messages | first).content | replace('Be', 'be') }}
{{ messages | map(attribute='content') | map('upper') | list }}
{{ [3, 1, 2] | sort | reverse | list }}{{ 7 // 2 ** 2 % 3 }}{{ 'a%sb%d' % ('x', 3) }}{{ '{:>3}'.format(1) }}""",
    "objects": """{% set d = dict(a=1, b=[1, (2, 3)]) %}
{%- for k, v in d.items() %}{{ k ~ v }}{% endfor %}{{ d.get('z', 'no') }}{{ {'k': messages[0]['role']} | tojson }}
{{ 'content' in messages[0] }}{{ messages[1:] | length }}{{ messages[0] }}""",
    "tests": """{% if x is not defined %}u{% endif %}{{ messages is iterable }}{{ messages[0].content is string }}
{% filter upper %}a{{ bos_token }}{% endfilter %}{% set y %}z{{ 1 }}{% endset %}{{ y }}""",
}
LOOP = "{% set ns = namespace(x=START) %}{% for i in range(9999) %}{% set ns.x = NEXT %}{% endfor %}{{ {ns.x: 1} }}"
WITHOUT_END = {  # each takes gigabytes, or hours
    "product": "{{ 'a' * 10**9 }}",
    "list": "{{ [1] * 10**9 }}",
    "power": "{{ 10 ** (10**9) }}",
    "filter": "{{ 'a' | center(10**9) }}",
    "method": "{{ 'a'.encode().ljust(10**9) }}",
    "found method": "{{ ('a' | attr('center'))(10**9) }}",
    "format": "{{ '%1000000000d' % 1 }}",
    "star": "{{ '%*d' % (10**9, 1) }}",
    "width": "{{ '{0:{1[0]}}'.format(1, [10**9]) }}",
    "bytes": "{{ (1).to_bytes(10**9) }}",
    "map": "{{ ['a'] | map('center', 10**9) | list }}",
    "block": "{% filter indent(10**9) %}a\nb{% endfilter %}",
    "batches": "{{ [1] | batch(10**9, 1) | list }}",
    "round": "{{ 1 | round(10**7, 'ceil') }}",
    "join": "{% set y = 'a' * 10**6 %}{{ range(10**5) | map('string') | join(y) }}",
    "replace": "{% set y = 'a' * 10**6 %}{{ y.replace('a', y) }}",
    "doubling": LOOP.replace("START", "'a'").replace("NEXT", "ns.x ~ ns.x"),
    "sums": LOOP.replace("START", "'a'").replace("NEXT", "ns.x + ns.x"),
    "nesting": LOOP.replace("START", "[1]").replace("NEXT", "[ns.x, ns.x]"),
    "keys": LOOP.replace("START", "(1,)").replace("NEXT", "(ns.x, ns.x)"),
    "squares": LOOP.replace("START", "3").replace("NEXT", "ns.x * ns.x"),
    "held": LOOP.replace("START", "[]").replace("NEXT", "[ns.x, 'a' * 10**6 ~ i]"),
    "loops": "{% for i in range(10**5) %}{% for j in range(10**5) %}{% endfor %}{% endfor %}",
    "tested loops": "{% for i in range(10**5) %}{% for j in range(10**5) if false %}{% endfor %}{% endfor %}",
    "constant text": "{% set x %}{% for i in range(10**5) %}" + "y" * 10**5 + "{% endfor %}{% endset %}",
    "variable text": "{% set y = 'a' * 10**6 %}{% for i in range(10**5) %}{{ y }}{% endfor %}",
    "search": "{% set y = 'a' * 10**6 %}{% for i in range(10**5) %}{% if 'b' in y %}{% endif %}{% endfor %}",
}


def render(template, *, tools=None, messages=MESSAGES, prompt=True):
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "date_string": "26 Jul 2024"}
    variables = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompt, **tokens}
    ours = render_template(template, variables)
    [theirs], _ = render_jinja_template(
        [messages], tools=tools, chat_template=template, add_generation_prompt=prompt, **tokens
    )
    return ours, theirs


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_ordinary_templates_are_rendered_as_transformers_does(name, tools):
    ours, theirs = render(ORDINARY[name], tools=tools)
    assert ours == theirs
    assert ours.strip()


def test_a_long_conversation_is_within_bounds():
    messages = [{"role": role, "content": "word " * 2000} for role in ("user", "assistant") * 100]  # 2 MB
    template = (
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim | replace('w', 'ww') + '\n' }}{% endfor %}"
    )
    ours, theirs = render(template, messages=messages)
    assert ours == theirs


@pytest.mark.parametrize("name", WITHOUT_END)
def test_templates_without_end_are_refused(name, monkeypatch):
    monkeypatch.setattr(template_bounds, "STEPS", 100_000)  # types are checked at each call here, which takes longer
    begun = time.process_time()
    with pytest.raises(OverflowError) as caught:
        render_template(WITHOUT_END[name], {"messages": MESSAGES})
    assert str(caught.value) in (TOO_LARGE, TOO_LONG)
    assert time.process_time() - begun < 10


@pytest.mark.parametrize(
    "body", ["{{ self.a() }}{{ self.a() }}", "{% for x in [1] recursive %}{{ loop([1]) }}{% endfor %}"]
)
def test_recursion_ends(body):
    with pytest.raises(RecursionError):
        render_template("{% block a %}" + body + "{% endblock %}", {})


def test_a_namespace_has_a_short_text_and_no_private_names():
    loop = "{% for i in range(60) %}{% set ns.x = namespace(a=ns.x, b=ns.x) %}{% endfor %}{{ ns.x }}"
    assert render_template("{% set ns = namespace(x=1) %}" + loop, {}) == "<Namespace>"
    with pytest.raises(Exception, match="a namespace has no private names, got '_a'"):
        render_template("{{ namespace(_a=1) }}", {})


def test_one_line_refuses_such_a_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML + "{% if messages | length > 1 %}{{ 'a' * 10**9 }}{% endif %}"
    assert prompt_ids(MESSAGES[1:2], tokenizer)
    with pytest.raises(InputError, match=r"refuses a conversation of the roles system, user: it makes texts, .*: fix"):
        prompt_ids(MESSAGES[:2], tokenizer)


@pytest.mark.parametrize("call", ["strftime_now('%Y-%m-%d')", "date_string", "strftime_now('%d %b %Y %H:%M')"])
def test_the_day_does_not_count(call):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{{ " + call + " }}|" + CHATML
    text = tokenizer.decode(prompt_ids(MESSAGES[1:2], tokenizer)).partition("|")[0]
    assert text in ("2024-07-26", "26 Jul 2024", "26 Jul 2024 00:00")


@pytest.mark.parametrize("template", ["{{ [1, 2] | random }}", "{{ lipsum() }}"])
def test_nothing_is_random(template):
    with pytest.raises(Exception, match=r"random|lipsum"):
        render_template(template, {})


def test_names_of_a_template():
    assert {"messages", "tools"} <= names_in("{% set tools = tools %}{{ messages }}")
    assert "tools" not in names_in(CHATML)


def test_the_named_template_that_transformers_would_take():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools }}" + CHATML}
    for tools in (None, [], TOOLS):
        assert find_template(tokenizer, tools=tools) == tokenizer.get_chat_template(tools=tools)
    assert tokenizer.decode(prompt_ids(MESSAGES[1:2], tokenizer, tools=TOOLS)).startswith("[{'type'")
    tokenizer.chat_template = {"rag": CHATML, "other": CHATML}
    with pytest.raises(InputError, match=r"has the chat templates 'other, rag', but no default: set config"):
        prompt_ids(MESSAGES, tokenizer)


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5", "smollm2"])
def test_real_templates(name):
    folder = Path(os.environ.get("L2D_JAX_TOKENIZERS", "")) / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"set L2D_JAX_TOKENIZERS to a folder that holds {name}/tokenizer.json")
    tokenizer = load_tokenizer(folder)
    for messages in (MESSAGES[:2], MESSAGES):
        theirs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False, date_string="26 Jul 2024"
        )
        assert render_chat(messages, tokenizer, prompt=True) == theirs
