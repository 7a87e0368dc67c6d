"""Text to token ids and back: tokenizers, chat templates, and the part of a conversation that is learnt.

A conversation gives one turn per answer of the assistant. The context is what generation starts from: the chat
template of the messages before it, with the generation prompt. The answer is what the template puts after that, up to
and including the token that ends the turn. Both are tokenised separately, as the release does, so that the ids in
training are those in generation, whatever the tokenizer would have merged across the border.

Where a template rewrites an answer (R1's drop the reasoning) or its prompt opens something (`<think>`), the answer is
the message as it stands, less that opening, and the turn's end. A message without a thought does not continue a prompt
that opens one: it is refused or, with `empty_thoughts`, closes the thought first. Special tokens spelled out in a
message are read as special tokens, as transformers does; nothing here protects from that.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import check_text

Message = Mapping[str, Any]  # "role" and "content", both text

DATE = "26 Jul 2024"  # Llama 3's templates print one; today's would change the data from one day to the next
THOUGHT = ("<think>", "</think>")  # the tags that open and close a thought
PROBE = "\N{SNOWMAN}"  # an answer whose text occurs in no template

CHATML = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}{%- endif -%}"""


def load_tokenizer(folder: Path, *, vocabulary: int | None = None) -> PreTrainedTokenizerFast:
    """Read the tokenizer of a Hugging Face folder: tokenizer.json as it is, and tokenizer_config.json.

    `AutoTokenizer` is not used, because it rebuilds the tokenizer as the class that the config names; SmolLM2's, whose
    config says GPT2Tokenizer, then no longer splits numbers into digits (transformers 5.23). Raises `InputError`, also
    for ids that the `vocabulary` of a model, if it is given, does not have.
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
    except BaseException as error:  # whatever the first unreadable byte leads to; panics of Rust are no `Exception`
        reason, remedy = first_line(error)[:100], "copy its tokenizer*.json and *.jinja of the model again"
        raise InputError(f"the tokenizer in {folder} cannot be read ({reason}): {remedy}") from error
    problem = f"the tokenizer in {folder} has the id {largest}, and the model a vocabulary of {vocabulary}"
    require(vocabulary is None or largest < vocabulary, f"{problem}: take both from one model")
    return tokenizer


def require_tokenizer(tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast:
    """The tokenizer; raises `InputError` where there is none."""
    if tokenizer is None:
        raise InputError("the model folder has no tokenizer: add its tokenizer files, to read and write text")
    return tokenizer


def require_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    """Raise `InputError` if the tokenizer has no chat template, without which a conversation has no text."""
    problem = f"the tokenizer of {tokenizer.name_or_path or 'this model'} has no chat template"
    remedy = "take that of an instruct model, or add a chat_template.jinja beside tokenizer.json"
    require(bool(tokenizer.chat_template), f"{problem}: {remedy}")


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer that needs no file: ids 0 to 255 are bytes, 256 to 258 <|pad|>, <|im_start|>, <|im_end|>; ChatML."""
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
    """The ids that end a generated answer: the end of sequence and, if it differs, the template's end of turn."""
    ids = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    if tokenizer.chat_template:
        ids.append(text_ids([_frame(tokenizer, tokenizer.chat_template)[1]], tokenizer)[0][-1])
    return tuple(dict.fromkeys(ids))


def prompt_ids(messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """The ids that generation of the next answer starts from; raises `InputError` as `turn_texts` does.

    If the last message is the assistant's, that answer is continued after its last visible character.
    """
    require_chat_template(tokenizer)
    _check(messages)
    if messages[-1]["role"] == "assistant":
        opening = {**messages[-1], "content": messages[-1]["content"].rstrip()}
        text = render_chat([*messages[:-1], opening], tokenizer, prompt=False, continued=True)
    else:
        text = render_chat(messages, tokenizer, prompt=True)
    return text_ids([text], tokenizer)[0]


def text_ids(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> list[list[int]]:
    """The ids of each text, without special tokens around it: a chat template writes its own."""
    return tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []


def turn_texts(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast, *, empty_thoughts: bool = False
) -> list[tuple[str, str]]:
    """Context and answer of each of the assistant's turns, as text.

    Raises `InputError`, also for a template that leaves no sound border between prompt and answer.
    """
    require_chat_template(tokenizer)
    _check(messages)
    turn = functools.partial(_turn, tokenizer=tokenizer, empty_thoughts=empty_thoughts)
    return [turn(messages[: i + 1]) for i, message in enumerate(messages) if message["role"] == "assistant"]


def _turn(messages: Sequence[Message], *, tokenizer: PreTrainedTokenizerFast, empty_thoughts: bool) -> tuple[str, str]:
    """Context and answer of the last message."""
    problem = "an answer needs a message before it, but the assistant begins this conversation"
    require(len(messages) > 1, f"{problem}: remove that turn")
    (opening, end), content = _frame(tokenizer, tokenizer.chat_template), messages[-1]["content"]
    prompt, text = render_chat(messages[:-1], tokenizer, prompt=True), render_chat(messages, tokenizer, prompt=False)
    if text.startswith(prompt) and content.strip() in text[len(prompt) :]:
        return prompt, text[len(prompt) : text.rindex(end) + len(end)]
    if content.startswith(opening):  # the template rewrites the answer, so the message itself is what to say
        return prompt, content[len(opening) :] + end
    if empty_thoughts and opening.strip() == THOUGHT[0]:
        return prompt, f"\n{THOUGHT[1]}\n\n{content}{end}"
    rule = f"an answer must continue the chat template's prompt, which ends with {opening!r}"
    remedy = f"begin answers with {opening!r}, take a chat template whose prompt does not open it, or close thoughts"
    raise InputError(f"{rule}, but one begins with {content[:20]!r}: {remedy} with config.data.empty_thoughts")


def working_ids(
    turns: Sequence[tuple[str, str]], messages: Sequence[Message], working: Any, tokenizer: PreTrainedTokenizerFast
) -> list[int]:
    """The ids of the only turn's answer as it stands after each step of its working, one step behind the other.

    Raises `InputError` for a working that is no list of texts with as many tokens as the answer has.
    """
    if not (len(turns) == 1 and isinstance(working, list) and all(isinstance(text, str) for text in working)):
        raise InputError(f"'working' must be a list of texts beside one answer, got {shown(working)}")
    (_, answer), content = turns[0], messages[-1]["content"].strip()
    right, *steps = text_ids([answer, *(answer.replace(content, text.strip(), 1) for text in working)], tokenizer)
    for text, ids in zip(working, steps, strict=True):
        problem = f"the step {shown(text)} of 'working' makes the answer {len(ids)} tokens long, and not {len(right)}"
        require(len(ids) == len(right), f"{problem}: write all of its steps in as many tokens as the answer")
    return [token for ids in steps for token in ids]


@functools.lru_cache(maxsize=8)
def _frame(tokenizer: PreTrainedTokenizerFast, template: str) -> tuple[str, str]:  # noqa: ARG001
    """The text that a template puts around an answer; `template` is part of the cache's key.

    First the end of the prompt that a finished answer does not begin with, such as <think>, which is mostly empty; then
    what follows the answer, up to and including the token that ends the turn.
    """
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": PROBE}]
    prompt, text = render_chat(messages[:1], tokenizer, prompt=True), render_chat(messages, tokenizer, prompt=False)
    before, _, after = text.partition(PROBE)
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    ends = [after.index(token) + len(token) for token in special if token in after]
    if not (prompt and ends and (prompt.startswith(before) or before.startswith(prompt))):
        rule = "a chat template must continue its prompt with the answer and a special token that ends it"
        found = f"has the prompt {shown(prompt)} and writes {shown(text)} with the answer {PROBE!r}"
        raise InputError(f"{rule}; that of {tokenizer.name_or_path} {found}: mend it")
    return prompt[len(before) :], after[: min(ends)]


def _check(messages: Sequence[Message]) -> None:
    require(len(messages) > 0, "a conversation needs at least one message, got none: remove it")
    for number, message in enumerate(messages):
        for key in ("role", "content"):
            value, name = message.get(key), f"{key!r} of every message"
            if not isinstance(value, str):
                raise InputError(f"{name} must be text, got {shown(value)} in message {number}")
            check_text(value, name)


def render_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerFast, *, prompt: bool, continued: bool = False
) -> str:
    """A conversation as text: with a `prompt` for the next answer, or the last message `continued`, without its end."""
    options: dict[str, Any] = {"add_generation_prompt": prompt, "continue_final_message": continued, "tokenize": False}
    try:
        text = tokenizer.apply_chat_template([dict(message) for message in messages], date_string=DATE, **options)
    except Exception as error:  # a template is a program
        roles = shown(", ".join(message["role"] for message in messages)).strip("'")
        problem = f"the chat template refuses a conversation of the roles {roles}"
        raise InputError(f"{problem}: {first_line(error)}") from error
    assert isinstance(text, str)
    return text


def first_line(error: BaseException) -> str:
    """The first line of the message of an error's cause, or of the error if it has none."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
