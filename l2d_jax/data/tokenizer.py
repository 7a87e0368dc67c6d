"""Text to token ids and back: tokenizers, chat templates, and the part of a conversation that is learnt.

A conversation gives one turn per answer of the assistant. The context is the text from which generation would start:
the chat template of the messages before the answer, with the generation prompt. The answer is the text that the
template writes after that, up to and including the token that ends the turn. Both are tokenised separately, as in the
release, so training sees the same ids as generation, whatever the tokenizer would have merged across the border.

Some templates rewrite an answer (R1's drop the reasoning), or their prompt opens a thought (`<think>`). Then the answer
is the unchanged message without that opening, plus the end of the turn. A message without a thought cannot continue a
prompt that opens one: it is refused or, with `empty_thoughts`, the thought is closed first. Special tokens that are
spelled out in a message are read as special tokens, as in transformers; nothing here protects from that.
"""

import contextlib
import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from l2d_jax.data.chat_template import DATE, names_in, render_template
from l2d_jax.data.messages import Message, is_learnt, read_messages, read_tools
from l2d_jax.errors import InputError, first_line, require, shorten, shown

Tools: TypeAlias = Sequence[Mapping[str, Any]] | None  # JSON schemas of functions; None: no tools

THOUGHT = ("<think>", "</think>")  # the tags that open and close a thought
PROBE = "\N{SNOWMAN}"  # a test answer whose text occurs in no template
CONTINUED = f"{PROBE}continued here{PROBE}"  # marks the end of an answer that is to be continued

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def load_tokenizer(folder: Path, *, vocabulary: int | None = None) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a Hugging Face folder: tokenizer.json, unchanged, and tokenizer_config.json.

    `AutoTokenizer` is not used, because it rebuilds the tokenizer as the class that the config names. SmolLM2's config
    says GPT2Tokenizer, and its tokenizer would then no longer split numbers into digits (transformers 5.23). Raises
    `InputError` for unreadable files, and for ids beyond the `vocabulary` of a model, if that is given.
    """
    if not (folder / "tokenizer.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.glob("*"))) or "nothing"
        raise InputError(f"a tokenizer is read from tokenizer.json, but {folder} holds {found}: add the model's own")
    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
        probe = text_ids([PROBE], tokenizer)[0]
        tokenizer.decode(probe)
        require(len(probe) > 0, "it gives no tokens for a text")
        largest = max(tokenizer.get_vocab().values(), default=0)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # unreadable files cause all kinds of errors; Rust's panics are not an `Exception`
        reason, remedy = first_line(error)[:100], "copy its tokenizer*.json and *.jinja of the model again"
        raise InputError(f"the tokenizer in {folder} cannot be read ({reason}): {remedy}") from error
    problem = f"the tokenizer in {folder} has the id {largest}, and the model a vocabulary of {vocabulary}"
    require(vocabulary is None or largest < vocabulary, f"{problem}: take both from one model")
    return tokenizer


def require_tokenizer(tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast:
    """Return the tokenizer; raises `InputError` if it is None."""
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files, to read and write text")
    return tokenizer


def find_template(tokenizer: PreTrainedTokenizerFast, *, tools: Tools = None) -> str:
    """The chat template for a conversation. If there are several: "tool_use" for one with tools, else "default".

    Raises `InputError` if there is none, because a conversation then has no text.
    """
    template, owner = tokenizer.chat_template, tokenizer.name_or_path or "this model"
    if isinstance(template, dict):
        name = "tool_use" if tools is not None and "tool_use" in template else "default"
        names = shown(", ".join(sorted(template)))
        problem = f"the tokenizer of {owner} has the chat templates {names}, but no default"
        require(name in template, f"{problem}: set config.model.chat_template to the file of one")
        template = template[name]
    problem = f"the tokenizer of {owner} has no chat template"
    remedy = "name one by config.model.chat_template ('base_llama' for a base model), or add a chat_template.jinja"
    require(bool(template), f"{problem}: {remedy} next to tokenizer.json")
    return template


def require_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `InputError` if the tokenizer has no chat template for conversations without tools."""
    find_template(tokenizer)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte tokenizer with ChatML that needs no file: ids 0 to 255 are bytes.

    Ids 256 to 258 are <|pad|>, <|im_start|> and <|im_end|>.
    """
    characters = bytes_to_unicode()  # ByteLevel writes each byte as one visible character
    tokenizer = Tokenizer(models.BPE(vocab={character: byte for byte, character in characters.items()}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|pad|>", "<|im_start|>", "<|im_end|>"])
    tokens = {"pad_token": "<|pad|>", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    options = {"tokenizer_object": tokenizer, "chat_template": CHATML, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(**tokens, **options)


def padding_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The id of padding: the pad token, else the end of sequence; raises `InputError` if there is neither."""
    ids = [token_id for token_id in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token_id is not None]
    problem = f"the tokenizer of {tokenizer.name_or_path} has neither pad_token nor eos_token"
    require(len(ids) > 0, f"{problem}: name one in its config")
    return ids[0]


def stop_ids(tokenizer: PreTrainedTokenizerFast) -> tuple[int, ...]:
    """The ids that end a generated answer: the end of sequence, and the ends of turn of the chat templates."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    ends: list[str] = []
    if tokenizer.chat_template:
        template = find_template(tokenizer)
        ends.append(_frame(tokenizer, template, has_tools=False)[1])
        if (other := find_template(tokenizer, tools=[])) != template:
            with contextlib.suppress(InputError):  # conversations with tools report it later
                ends.append(_frame(tokenizer, other, has_tools=True)[1])
    return tuple(dict.fromkeys([*ids, *(found[-1] for found in text_ids(ends, tokenizer))]))


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast, *, tools: Any = None) -> list[int]:
    """The token ids from which the next answer is generated; raises `InputError` as `turn_texts` does.

    If the last message is the assistant's, it is continued after its last visible character. `tools` are the JSON
    schemas of functions that the answer may call.
    """
    read, schemas = read_messages(messages), read_tools(tools)
    if read[-1]["role"] != "assistant":
        return text_ids([render_chat(read, tokenizer, prompt=True, tools=schemas)], tokenizer)[0]
    require("tool_calls" not in read[-1], "a tool call cannot be continued: add the message of the tool")
    opened = {**read[-1], "content": read[-1]["content"].rstrip() + CONTINUED}
    text = render_chat([*read[:-1], opened], tokenizer, prompt=False, tools=schemas)
    require(
        CONTINUED in text, "the chat template leaves out the answer that is to be continued: end with another message"
    )
    return text_ids([text[: text.rindex(CONTINUED)]], tokenizer)[0]


def next_question(tokenizer: PreTrainedTokenizerFast) -> str:
    """The text with which the chat template begins a question after an answer; "" if a special token ends the answer.

    A base model that was not trained with such a template goes on with that text after its answer.
    """
    contents = {"user": "Hi", "assistant": PROBE}
    messages = [*({"role": role, "content": text} for role, text in contents.items())]
    text = render_chat([*messages, {"role": "user", "content": CONTINUED}], tokenizer, prompt=False)
    between = text.partition(PROBE)[2].partition(CONTINUED)[0].strip()
    return "" if any(token in between for token in _special(tokenizer)) else between


def text_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The ids of each text, without added special tokens: chat templates write them."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def turn_texts(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast, *, empty_thoughts: bool = False, tools: Any = None
) -> list[tuple[str, str]]:
    """Context and answer, as text, of each of the assistant's turns whose weight is not 0.

    Raises `InputError` for bad messages, and for a template without a clear border between prompt and answer.
    """
    read, schemas = read_messages(messages), read_tools(tools)
    turn = functools.partial(_turn, tokenizer=tokenizer, empty_thoughts=empty_thoughts, tools=schemas)
    find_template(tokenizer, tools=schemas)
    return [turn(read[: number + 1]) for number, message in enumerate(messages) if is_learnt(message)]


def _turn(
    messages: Sequence[Message], *, tokenizer: PreTrainedTokenizerFast, empty_thoughts: bool, tools: Tools
) -> tuple[str, str]:
    """Context and answer of the last message."""
    problem = "an answer needs a message before it, but the assistant begins this conversation"
    require(len(messages) > 1, f"{problem}: remove that turn")
    opening, end = _frame(tokenizer, find_template(tokenizer, tools=tools), has_tools=tools is not None)
    content, calls = messages[-1].get("content", ""), messages[-1].get("tool_calls", ())
    prompt = render_chat(messages[:-1], tokenizer, prompt=True, tools=tools)
    text = render_chat(messages, tokenizer, prompt=False, tools=tools)
    answer = text[len(prompt) :] if text.startswith(prompt) else ""
    names = [call.get("function", call)["name"] for call in calls]
    if answer and all(part in answer for part in (content.strip(), *names)):
        return prompt, answer[: _end_of(answer, end, tokenizer)]
    problem = f"the chat template does not write the call of {shown(', '.join(names))} after its prompt"
    require(not names, f"{problem}: take one that knows tool calls")
    if content.startswith(opening):  # the template rewrites the answer, so use the message itself
        return prompt, content[len(opening) :] + end
    if empty_thoughts and opening.strip() == THOUGHT[0]:
        return prompt, f"\n{THOUGHT[1]}\n\n{content}{end}"
    rule = f"an answer must continue the chat template's prompt, which ends with {opening!r}"
    remedy = f"begin answers with {opening!r}, take a chat template whose prompt does not open it, or close thoughts"
    raise InputError(f"{rule}, but one begins with {content[:20]!r}: {remedy} with config.data.empty_thoughts")


def _end_of(answer: str, end: str, tokenizer: PreTrainedTokenizerFast) -> int:
    """The index at which an answer ends: after the last `end` of a turn, or after the last special token.

    Tool calls may end with another special token than `end`.
    """
    if end in answer:
        return answer.rindex(end) + len(end)
    places = [answer.rindex(token) + len(token) for token in _special(tokenizer) if token in answer]
    require(len(places) > 0, f"no special token ends the answer {shown(answer)}: fix the chat template")
    return max(places)


def working_ids(
    turns: Sequence[tuple[str, str]], messages: Sequence[Message], working: Any, tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """The ids of the only turn's answer after each worked step, one step after the other.

    Raises `InputError` unless `working` is a list of texts with as many tokens as the answer.
    """
    if not (len(turns) == 1 and isinstance(working, list) and all(isinstance(text, str) for text in working)):
        raise InputError(f"'working' must be a list of texts, in a row with one answer, got {shown(working)}")
    (_, answer), content = turns[0], read_messages(messages)[-1].get("content", "").strip()
    right, *steps = text_ids([answer, *(answer.replace(content, text.strip(), 1) for text in working)], tokenizer)
    for text, ids in zip(working, steps, strict=True):
        problem = f"the step {shown(text)} of 'working' makes the answer {len(ids)} tokens long, and not {len(right)}"
        require(len(ids) == len(right), f"{problem}: write all of its steps in as many tokens as the answer")
    return [token for ids in steps for token in ids]


@functools.lru_cache(maxsize=8)
def _frame(tokenizer: PreTrainedTokenizerFast, template: str, *, has_tools: bool) -> tuple[str, str]:
    """The two texts that a template puts around an answer.

    The first is the end of the generation prompt that is missing in a finished conversation, such as <think>; it is
    usually empty. The second follows the answer, up to and including the token that ends the turn.
    """
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}]
    options: dict[str, Any] = {"template": template, "tools": [] if has_tools else None}
    prompt = render_chat(messages[:1], tokenizer, prompt=True, **options)
    text = render_chat(messages, tokenizer, prompt=False, **options)
    before, _, after = text.partition(PROBE)
    ends = [after.index(token) + len(token) for token in _special(tokenizer) if token in after]
    if not (prompt and ends and (prompt.startswith(before) or before.startswith(prompt))):
        rule = "a chat template must continue its prompt with the answer and a special token that ends it"
        found = f"has the prompt {shown(prompt)} and writes {shown(text)} with the answer {PROBE!r}"
        raise InputError(f"{rule}; that of {tokenizer.name_or_path} {found}: fix it")
    return prompt[len(before) :], after[: min(ends)]


def _special(tokenizer: PreTrainedTokenizerFast) -> list[str]:
    return [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerFast,
    *,
    prompt: bool,
    tools: Tools = None,
    template: str | None = None,
) -> str:
    """Render messages (from `read_messages`) as text, with or without a generation `prompt` for the next answer.

    `template` None: that of the tokenizer. Raises `InputError`.
    """
    template = find_template(tokenizer, tools=tools) if template is None else template
    variables: dict[str, Any] = {
        **tokenizer.special_tokens_map,
        "messages": messages,
        "tools": tools,
        "documents": None,
    }
    variables |= {"add_generation_prompt": prompt, "date_string": f"{DATE:%d %b %Y}"}
    has_calls = any("tool_calls" in message for message in messages)
    try:
        is_known = {"tools": not tools or "tools" in names_in(template)}
        is_known["tool calls"] = not has_calls or "tool_calls" in template
        text = render_template(template, variables) if all(is_known.values()) else ""
    except Exception as error:  # a template is a program
        roles = shown(", ".join(message["role"] for message in messages)).strip("'")
        problem = f"the chat template refuses a conversation of the roles {roles}"
        raise InputError(f"{problem}: {shorten(first_line(error), 150)}") from error
    missing = " and ".join(what for what, is_there in is_known.items() if not is_there)
    problem = f"the chat template of {tokenizer.name_or_path or 'this model'} leaves out {missing}"
    require(not missing, f"{problem}: take one that knows them, or leave them out")
    return text
