"""`/tokenize` and `/detokenize`, as vLLM has them: the token ids of a prompt, and the text of token ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import from_dict
from l2d_jax.data.messages import read_messages
from l2d_jax.data.tokenizer import prompt_ids, render_chat, text_ids
from l2d_jax.decoding.sampler import check_tokens
from l2d_jax.decoding.tools.tool_use import read_tool_use
from l2d_jax.errors import require, shown
from l2d_jax.serving.api.bodies import check_messages, text_length
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.roles import name_system

Body = TypeVar("Body", "TokenizeBody", "DetokenizeBody")


@dataclass(frozen=True)
class TokenizeBody:
    """The fields of a body of `/tokenize`: a prompt or messages."""

    model: str = ""
    prompt: object = None
    messages: object = None
    tools: object = None
    add_special_tokens: bool | None = None  # None: for a prompt, but not for messages, whose template writes them
    add_generation_prompt: bool = True  # whether the messages are those of a request for an answer
    continue_final_message: bool = False  # whether the last message is the assistant's, and is continued
    return_token_strs: bool = False  # whether the reply has the name of each token

    def check(self) -> None:
        """Raise `InputError` for fields that do not fit each other."""
        rule = "give a prompt or messages, one of the two"
        require((self.prompt is None) != (self.messages is None), rule)
        if self.messages is None:
            require(isinstance(self.prompt, str), f"prompt must be text, got {shown(self.prompt)}: write one")
            require(self.tools is None, "tools belong to messages, and not to a prompt: leave them out")
            chosen = self.continue_final_message or not self.add_generation_prompt
            require(not chosen, "add_generation_prompt and continue_final_message belong to messages: leave them out")
            return
        check_messages(self.messages)
        require(not self.add_special_tokens, "the chat template writes special tokens: leave add_special_tokens out")
        rule = "continue_final_message needs a last message of the assistant, and add_generation_prompt false"
        last: Any = self.messages[-1]  # type: ignore[index]
        is_continued = last["role"] == "assistant" and not self.add_generation_prompt
        require(is_continued or not self.continue_final_message, f"{rule}: change one of them")


@dataclass(frozen=True)
class DetokenizeBody:
    """The fields of a body of `/detokenize`."""

    model: str = ""
    tokens: object = None

    def check(self) -> None:
        """Raise `InputError` unless `tokens` are token ids."""
        is_list = isinstance(self.tokens, list) and all(type(token) is int for token in self.tokens)
        require(is_list, f"tokens must be a list of token ids, got {shown(self.tokens)}: give one")


def read_tokens_body(kind: type[Body], values: Any) -> Body:
    """Read a body of `/tokenize` or `/detokenize`; raises `InputError`."""
    require(isinstance(values, Mapping), f"the body must be a JSON object, got {shown(values)}: write {{...}}")
    given = {name: value for name, value in values.items() if value is not None}
    body: Body = from_dict(kind, given, prefix="body")
    body.check()
    return body


def tokenize(
    body: TokenizeBody, tokenizer: PreTrainedTokenizerFast, limits: RequestLimits, *, longest_token: int
) -> dict[str, Any]:
    """The reply to a body of `/tokenize`; raises `InputError` for a text beyond the limits.

    With `add_generation_prompt`, the ids are those from which `/v1/chat/completions` generates the answer: a last
    message of the assistant is continued.
    """
    limits.check_messages(body.messages or ())
    limits.check_text(text_length([body.prompt, body.messages, body.tools]), longest_token=longest_token)
    if body.messages is not None:
        ids = _chat_ids(body, tokenizer)
    else:
        has_special = body.add_special_tokens is not False
        ids = tokenizer(body.prompt, add_special_tokens=has_special, verbose=False)["input_ids"]
    reply = {"count": len(ids), "max_model_len": limits.context, "tokens": ids}
    names = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
    return reply | {"token_strs": names}


def _chat_ids(body: TokenizeBody, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    messages: Any = name_system(body.messages, tokenizer)  # type: ignore[arg-type]
    use = read_tool_use(body.tools)
    tools = None if use is None else [*use.tools]
    if body.add_generation_prompt or body.continue_final_message:
        return prompt_ids(messages, tokenizer, tools=tools)
    text = render_chat(read_messages(messages), tokenizer, prompt=False, tools=tools)
    return text_ids([text], tokenizer)[0]


def detokenize(
    body: DetokenizeBody, tokenizer: PreTrainedTokenizerFast, limits: RequestLimits, *, vocab_size: int
) -> dict[str, Any]:
    """The reply to a body of `/detokenize`: the text with its special tokens; raises `InputError`."""
    ids: Any = body.tokens
    require(len(ids) <= limits.context, f"{len(ids)} tokens exceed the {limits.context} of this server: give fewer")
    check_tokens([ids], vocab_size)
    return {"prompt": tokenizer.decode(ids)}
