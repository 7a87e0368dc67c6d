import os
import subprocess
import sys
from pathlib import Path

import pytest

from l2d_jax.data.tokenizer import (
    CHATML,
    byte_tokenizer,
    load_tokenizer,
    padding_id,
    prompt_ids,
    stop_ids,
    text_ids,
    turn_texts,
)
from l2d_jax.errors import InputError
from tests.support.turns import encode_turns

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2 + 3?"},
    {"role": "assistant", "content": "5"},
    {"role": "user", "content": "And été?"},
    {"role": "assistant", "content": "Sommer\n"},
]
PROMPT = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2 + 3?<|im_end|>\n<|im_start|>assistant\n"

# As R1's: earlier reasoning is dropped; {opening} is what the generation prompt ends with.
REASONING = """\
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}{{ '<|im_start|>' + message['content'] }}
{%- else -%}{{ '<|pad|>' + message['content'].split('</think>')[-1] + '<|im_end|>' }}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|pad|>OPENING' }}{%- endif -%}"""
DATED = """{%- if not date_string is defined %}{%- set date_string = strftime_now("%d %b %Y") %}{%- endif -%}
{{- date_string + '\n' -}}"""


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


def texts(turn, tokenizer):
    return tokenizer.decode(turn.context), tokenizer.decode(turn.answer)


def test_bytes_are_their_own_ids(tokenizer):
    assert len(tokenizer) == 259
    for byte in range(128):
        assert tokenizer(chr(byte), add_special_tokens=False)["input_ids"] == [byte]
    text = "".join(map(chr, range(0x900))) + "été 東京\n\t 😀 12"
    assert text_ids([text], tokenizer)[0] == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    special = ["<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert text_ids(special, tokenizer) == [[256], [257], [258]]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (256, 258)


def test_saved_tokenizer_loads(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert encode_turns(MESSAGES, loaded) == encode_turns(MESSAGES, tokenizer)
    assert stop_ids(loaded) == (258,)


def test_loading_keeps_the_pre_tokenizer(tmp_path):
    """SmolLM2's config says GPT2Tokenizer, for which `AutoTokenizer` of transformers 5 loses the single digits."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {character: i for i, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    model = Tokenizer(models.BPE(vocab=vocabulary | {"12": 256}, merges=[("1", "2")]))
    digits = pre_tokenizers.Digits(individual_digits=True)
    model.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    model.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    assert load_tokenizer(tmp_path).tokenize("12") == ["1", "2"]


def test_one_turn_per_answer(tokenizer):
    first, second = (texts(turn, tokenizer) for turn in encode_turns(MESSAGES, tokenizer))
    assert first == (PROMPT, "5<|im_end|>")
    rest = "5<|im_end|>\n<|im_start|>user\nAnd été?<|im_end|>\n<|im_start|>assistant\n"
    assert second == (PROMPT + rest, "Sommer\n<|im_end|>")


def test_generation_starts_from_the_training_context(tokenizer):
    for turn, end in zip(encode_turns(MESSAGES, tokenizer), (2, 4), strict=True):
        assert prompt_ids(MESSAGES[:end], tokenizer) == turn.context


def test_a_conversation_without_an_answer_gives_nothing(tokenizer):
    assert encode_turns(MESSAGES[:2], tokenizer) == []


def test_the_last_end_of_turn_counts(tokenizer):
    messages = [MESSAGES[1], {"role": "assistant", "content": "It is <|im_end|>, you know"}]
    [turn] = encode_turns(messages, tokenizer)
    assert texts(turn, tokenizer)[1] == "It is <|im_end|>, you know<|im_end|>"


def test_what_follows_the_end_of_turn_is_not_learnt(tokenizer):
    tokenizer.chat_template = CHATML.replace("<|im_end|>\\n", "<|im_end|> \\n\\n")
    assert [texts(turn, tokenizer)[1] for turn in encode_turns(MESSAGES, tokenizer)] == [
        "5<|im_end|>",
        "Sommer\n<|im_end|>",
    ]


def test_a_template_that_trims_is_followed(tokenizer):
    tokenizer.chat_template = CHATML.replace("message['content']", "message['content'] | trim")
    assert texts(encode_turns(MESSAGES, tokenizer)[1], tokenizer)[1] == "Sommer<|im_end|>"


@pytest.mark.parametrize("opening", ["", "<think>\\n"])
def test_reasoning_is_learnt_though_the_template_drops_it(tokenizer, opening):
    tokenizer.chat_template = REASONING.replace("OPENING", opening)
    thought = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n<b>"}]
    first, second = turn_texts(thought + thought, tokenizer)
    begin = opening.replace("\\n", "\n")
    answer = "<think>\nhm\n</think>\n\n<b><|im_end|>".removeprefix(begin)
    assert first == ("<|im_start|>q<|pad|>" + begin, answer)
    assert second == ("<|im_start|>q<|pad|>\n\n<b><|im_end|><|im_start|>q<|pad|>" + begin, answer)


def test_a_thought_that_the_prompt_opens_is_closed_where_that_is_asked_for(tokenizer):
    tokenizer.chat_template = REASONING.replace("OPENING", "<think>\\n")
    plain = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "4"}]
    [(context, answer)] = turn_texts(plain, tokenizer, empty_thoughts=True)
    assert context + answer == "<|im_start|>q<|pad|><think>\n\n</think>\n\n4<|im_end|>"
    assert tokenizer.decode(prompt_ids(plain[:1], tokenizer)) == context  # generation starts from the same
    thought = [plain[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\n4"}]
    assert turn_texts(thought, tokenizer, empty_thoughts=True) == turn_texts(thought, tokenizer)


@pytest.mark.parametrize("template", [CHATML, REASONING.replace("OPENING", "")])
def test_other_prompts_have_no_thought_to_close(tokenizer, template):
    tokenizer.chat_template = template
    assert turn_texts(MESSAGES[1:3], tokenizer, empty_thoughts=True) == turn_texts(MESSAGES[1:3], tokenizer)


def test_an_opening_that_is_no_thought_is_refused_even_then(tokenizer):
    tokenizer.chat_template = REASONING.replace("OPENING", "<b>")
    with pytest.raises(InputError, match=r"must continue the chat template's prompt, which ends with '<b>'"):
        turn_texts(MESSAGES[1:3], tokenizer, empty_thoughts=True)


def test_an_answer_that_breaks_the_prompt_is_refused(tokenizer):
    tokenizer.chat_template = REASONING.replace("OPENING", "<think>\\n")
    with pytest.raises(InputError, match=r"ends with '<think>\\n', but one begins with '<b>plain'"):
        turn_texts([MESSAGES[1], {"role": "assistant", "content": "<b>plain"}], tokenizer)


def test_the_date_is_fixed(tokenizer):
    tokenizer.chat_template = DATED + CHATML
    ids = prompt_ids(MESSAGES[:2], tokenizer)
    assert tokenizer.decode(ids) == "26 Jul 2024\n" + PROMPT


def test_a_changed_template_is_read_again(tokenizer):
    assert turn_texts(MESSAGES, tokenizer)[0][1] == "5<|im_end|>"
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<|pad|>")
    assert turn_texts(MESSAGES, tokenizer)[0][1] == "5<|pad|>"
    assert stop_ids(tokenizer) == (258, 256)


def test_stop_and_padding_fall_back(tokenizer):
    assert padding_id(tokenizer) == 256
    tokenizer.pad_token = None
    assert padding_id(tokenizer) == 258
    tokenizer.eos_token = None
    assert stop_ids(tokenizer) == (258,)
    with pytest.raises(InputError, match="neither pad_token nor eos_token"):
        padding_id(tokenizer)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "at least one message"),
        ([{"role": "user"}], "'content' of every message must be text, got None in message 0"),
        ([{"role": "user", "content": "a"}, {"content": "b"}], "'role' of every message must be text, got None"),
        (
            [{"role": "user", "content": ["a"]}],
            "must be text, or parts of type 'text' with a 'text', got 'a' in message 0",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            "parts of type 'text' .*, got 'image_url' in message 0",
        ),
        ([{"role": "user", "content": "\ud800"}], r"the text of a message must be UTF-8, got '\\ud800'"),
        ([{"role": "user", "content": "a", "name": "\ud800"}], "the text of a message must be UTF-8"),
        ([{"role": "user", "content": None, "tool_calls": [{"name": "f"}]}], "'content' .* must be text, got None"),
        ([{"role": "assistant", "content": None, "tool_calls": []}], "'content' .* must be text, got None"),
        ([{"role": "assistant", "tool_calls": ["f"]}], "'tool_calls' must be a list of objects, got"),
        ([{"role": "assistant", "tool_calls": [{"function": "f"}]}], "a tool call needs a function with a name, got"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
            "arguments of a tool call must be an object, or a JSON text of one, got '{' in message 0: fix them",
        ),
        ([{"role": "user", "content": "a", "weight": 0.5}], "'weight' of a message is 0 or 1 .*, got 0.5"),
        ([{"role": "user", "content": "a", "weight": True}], "'weight' of a message is 0 or 1 .*, got True"),
        ([{"role": "user", "content": "a", "weight": 1}], "only answers of the assistant are learnt, .* 'user'"),
    ],
)
def test_malformed_messages(tokenizer, messages, message):
    with pytest.raises(InputError, match=message):
        turn_texts(messages, tokenizer)
    with pytest.raises(InputError, match=message):
        prompt_ids(messages, tokenizer)


def test_the_assistant_cannot_begin(tokenizer):
    with pytest.raises(InputError, match="assistant begins this conversation"):
        turn_texts(MESSAGES[2:], tokenizer)


def test_a_template_that_refuses(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('roles must alternate\\nas told') }}"
    with pytest.raises(InputError, match=r"refuses a conversation of the roles user: roles must alternate$"):
        prompt_ids(MESSAGES[1:2], tokenizer)


@pytest.mark.parametrize(
    "template",
    [
        "{% for message in messages %}{{ message['content'] }}{% endfor %}",  # nothing ends an answer
        CHATML.replace("message['content']", "'…'"),  # the answer is left out
        CHATML.replace("|>assistant", "|>model"),  # the prompt is not how an answer begins
        "{% if not add_generation_prompt %}{{ messages[-1]['content'] + '<|im_end|>' }}{% endif %}",  # no prompt
    ],
)
def test_a_template_without_a_border(tokenizer, template):
    tokenizer.chat_template = template
    with pytest.raises(InputError, match="must continue its prompt with the answer and a special token"):
        turn_texts(MESSAGES, tokenizer)


def test_no_chat_template(tokenizer):
    tokenizer.chat_template = None
    for call in (turn_texts, prompt_ids):
        with pytest.raises(InputError, match="has no chat template"):
            call(MESSAGES, tokenizer)
    assert stop_ids(tokenizer) == (258,)


def test_no_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"tokenizer.json, but .* holds config.json: add"):
        load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="holds nothing"):
        load_tokenizer(tmp_path / "missing")


@pytest.mark.parametrize("text", ['{"version": ', '{"version": "1.0"}', "\0"])
def test_unreadable_tokenizer(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(InputError, match="cannot be read") as caught:
        load_tokenizer(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
def test_import_starts_no_backend():
    code = "import l2d_jax.data.examples; from jax._src.xla_bridge import _backends; assert not _backends, _backends"
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})


@pytest.mark.parametrize("name", ["llama3_1", "qwen2_5", "smollm2"])
def test_real_tokenizers(name):
    folder = Path(os.environ.get("L2D_JAX_TOKENIZERS", "")) / name
    if not (folder / "tokenizer.json").is_file():
        pytest.skip(f"set L2D_JAX_TOKENIZERS to a folder that holds {name}/tokenizer.json")
    tokenizer = load_tokenizer(folder)
    messages = [*MESSAGES[:4], {"role": "assistant", "content": "12 + 3 = 15, été"}]
    for turn, length in zip(encode_turns(messages, tokenizer), (3, 5), strict=True):
        whole = tokenizer.apply_chat_template(messages[:length], tokenize=True, return_dict=False)
        assert whole[: len(turn.context) + len(turn.answer)] == turn.context + turn.answer
        content = messages[length - 1]["content"]
        assert turn.answer == tokenizer(content, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        assert tokenizer.eos_token_id in stop_ids(tokenizer)


def test_a_prompt_that_ends_with_an_answer_continues_it(tokenizer):
    opened = [*MESSAGES[:2], {"role": "assistant", "content": "def f():\n"}]
    assert tokenizer.decode(prompt_ids(opened, tokenizer)) == PROMPT + "def f():"
    assert tokenizer.decode(prompt_ids(MESSAGES[:2], tokenizer)) == PROMPT


# As Llama 3.1's and Qwen 2.5's: calls as JSON, which end by another token where no text is with them.
CALLS = """\
{%- if tools %}{{ '<|im_start|>tools' + tools | tojson + '<|im_end|>' }}{% endif -%}
{%- for message in messages -%}
{%- if message.tool_calls -%}
{{ '<|im_start|>assistant\n' }}{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}{% if call.function is defined %}{% set call = call.function %}{% endif -%}
{{ '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}{% endfor -%}
{{ '<|im_end|>' if message.content else '<|pad|>' }}
{%- else -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""
CALL = {"id": "1", "type": "function", "function": {"name": "get", "arguments": '{"city": "Köln", "n": null}'}}
ASKED = {"role": "user", "content": "Weather?"}
FOUND = {"role": "tool", "tool_call_id": "1", "name": "get", "content": "sun"}
WRITTEN = '{"name": "get", "parameters": {"city": "Köln", "n": null}}'


@pytest.mark.parametrize("content", [None, "", "Wait. "])
def test_a_tool_call_is_an_answer(tokenizer, content):
    tokenizer.chat_template = CALLS
    call = {"role": "assistant", "content": content, "tool_calls": [CALL], "refusal": None}
    messages = [ASKED, call, FOUND, {"role": "assistant", "content": "Sunny."}]
    first, second = turn_texts(messages, tokenizer)
    assert first[1] == (content or "") + WRITTEN + ("<|im_end|>" if content else "<|pad|>")
    assert second == ("".join(first) + "<|im_start|>tool\nsun<|im_end|><|im_start|>assistant\n", "Sunny.<|im_end|>")
    assert tokenizer.decode(prompt_ids(messages[:3], tokenizer)) == second[0]
    theirs = [
        ASKED,
        {**call, "tool_calls": [{**CALL, "function": {"name": "get", "arguments": {"city": "Köln", "n": None}}}]},
    ]
    assert "".join(first) == tokenizer.apply_chat_template(theirs, tokenize=False)


def test_a_call_without_its_envelope(tokenizer):
    tokenizer.chat_template = CALLS
    calls = [{"role": "assistant", "tool_calls": [{"name": "get", "arguments": arguments}]} for arguments in ({}, "")]
    assert [turn_texts([ASKED, call], tokenizer)[0][1] for call in calls] == [
        '{"name": "get", "parameters": {}}<|pad|>'
    ] * 2


def test_tools_go_to_the_template(tokenizer):
    tokenizer.chat_template = CALLS
    schemas = [{"type": "function", "function": {"name": "get"}}]
    begin = '<|im_start|>tools[{"type": "function", "function": {"name": "get"}}]<|im_end|>'
    for tools in (schemas, str(schemas).replace("'", '"')):
        assert tokenizer.decode(prompt_ids([ASKED], tokenizer, tools=tools)).startswith(begin)
        [(context, _)] = turn_texts([ASKED, {"role": "assistant", "content": "a"}], tokenizer, tools=tools)
        assert context.startswith(begin)
    for none in (None, [], "", "[]"):
        assert prompt_ids([ASKED], tokenizer, tools=none) == prompt_ids([ASKED], tokenizer)
    for wrong in ({"name": "get"}, "{", ["get"], 5):
        with pytest.raises(InputError, match="'tools' must be a list of JSON schemas, or a JSON text of one, got"):
            prompt_ids([ASKED], tokenizer, tools=wrong)


def test_what_a_template_does_not_know_is_refused(tokenizer):
    with pytest.raises(InputError, match="the chat template of this model leaves out tools: take one"):
        prompt_ids([ASKED], tokenizer, tools=[{"name": "get"}])
    with pytest.raises(InputError, match="the chat template of this model leaves out tool calls: take one"):
        prompt_ids([ASKED, {"role": "assistant", "tool_calls": [CALL]}, FOUND], tokenizer)
    tokenizer.chat_template = CALLS
    with pytest.raises(InputError, match="a tool call cannot be continued"):
        prompt_ids([ASKED, {"role": "assistant", "tool_calls": [CALL]}], tokenizer)


def test_parts_of_text_are_joined(tokenizer):
    parts = [{"type": "text", "text": "2 + "}, {"type": "text", "text": "3?"}]
    assert prompt_ids([{"role": "user", "content": parts}], tokenizer) == prompt_ids([MESSAGES[1]], tokenizer)


@pytest.mark.parametrize(("weights", "count"), [((0, 1), 1), ((1, None), 2), ((0, 0), 0), ((1.0, 0.0), 1)])
def test_turns_of_weight_0_are_context(tokenizer, weights, count):
    first, second = weights
    weighted = [*MESSAGES[:2], {**MESSAGES[2], "weight": first}, MESSAGES[3], {**MESSAGES[4], "weight": second}]
    turns = turn_texts(MESSAGES, tokenizer)
    assert turn_texts(weighted, tokenizer) == [turn for turn, one in zip(turns, weights, strict=True) if one != 0]
    assert len(turn_texts(weighted, tokenizer)) == count


def test_a_thought_under_any_of_its_names(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "message['content']", "(message.reasoning_content or '') + message.content"
    )
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert (
            turn_texts([ASKED, {"role": "assistant", "content": "a", name: "hm "}], tokenizer)[0][1] == "hm a<|im_end|>"
        )


def test_the_ends_of_all_templates_stop(tokenizer):
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML.replace("<|im_end|>", "<|pad|>")}
    assert stop_ids(tokenizer) == (258, 256)
    tokenizer.chat_template["tool_use"] = "{{ tools[0].name }}"  # which conversations with tools report
    assert stop_ids(tokenizer) == (258,)


@pytest.mark.parametrize("is_folder", [False, True])
def test_named_templates_are_read(tokenizer, tmp_path, is_folder):
    tokenizer.chat_template = {"default": CHATML, "tool_use": CALLS}
    tokenizer.save_pretrained(tmp_path, save_jinja_files=is_folder)
    assert (tmp_path / "additional_chat_templates" / "tool_use.jinja").is_file() == is_folder
    loaded = load_tokenizer(tmp_path)
    assert prompt_ids([ASKED], loaded) == prompt_ids([ASKED], byte_tokenizer())
    assert tokenizer.decode(prompt_ids([ASKED], loaded, tools=[{"name": "get"}])).startswith("<|im_start|>tools")
