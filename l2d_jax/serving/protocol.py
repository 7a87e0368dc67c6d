"""OpenAI's requests: reads the bodies of `/v1/chat/completions` and `/v1/completions`, and checks them whole.

Besides OpenAI's fields a body has the options of decoding by their own names, such as `budget`, `solver`, `gate` and
`guidance`, the class `label`, and `trace`. What is left out is as in the model's defaults, and a seed is drawn.
"""

import dataclasses
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from l2d_jax.config import ranges
from l2d_jax.config.parsing import from_dict, nearest
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import prompt_ids, require_tokenizer, text_ids
from l2d_jax.decoding.decode import LIKELIEST
from l2d_jax.decoding.generation import make_answers
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Answer, Request, Restrictions, number_prompts, override_settings, path_config
from l2d_jax.decoding.sampler import check_tokens
from l2d_jax.decoding.trace import check_single_sample
from l2d_jax.errors import InputError, require, shown

Choices = Annotated[int, Interval(ge=1, le=128)]
Alternatives = Annotated[int, Interval(ge=0, le=LIKELIEST)]
OPTIONS = {option.name for option in dataclasses.fields(DecodeConfig)} - {"max_new_tokens"}
IGNORED = {"user", "metadata", "store", "service_tier", "safety_identifier"}  # they change no answer
NEUTRAL = {"frequency_penalty": (0,), "presence_penalty": (0,), "logit_bias": ({},), "tools": ([],)}
NEUTRAL |= {"echo": (False,), "best_of": (1,), "suffix": ("",)}  # fields whose other values are not supported


@dataclass(frozen=True)
class StreamOptions:
    """What comes in a stream besides the answers."""

    include_usage: bool = False  # a last chunk with the numbers of tokens and evaluations


@dataclass(frozen=True)
class _Common:
    model: str = ""
    max_tokens: ranges.Tokens | None = None
    n: Choices = 1
    stop: object = ()  # a text, or up to four
    seed: ranges.KeySeed | None = None
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    response_format: object = None
    label: ranges.Label | None = None
    trace: bool = False  # how each token was settled, with the last piece


@dataclass(frozen=True)
class ChatBody(_Common):
    """The fields of a body of `/v1/chat/completions` that are no options of decoding."""

    messages: object = None
    max_completion_tokens: ranges.Tokens | None = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0


@dataclass(frozen=True)
class CompletionBody(_Common):
    """The fields of a body of `/v1/completions` that are no options of decoding."""

    prompt: object = None  # a text, token ids, or a list of either
    logprobs: Alternatives | None = None


@dataclass(frozen=True)
class Asked:
    """A request that has been checked, and the answers that it asks for."""

    body: ChatBody | CompletionBody
    answers: Sequence[Answer]  # those to one prompt follow each other
    prompt_tokens: int

    @property
    def alternatives(self) -> int | None:
        """How many tokens beside each are told with their log-probabilities; None: not even its own."""
        if isinstance(self.body, ChatBody):
            return self.body.top_logprobs if self.body.logprobs else None
        return self.body.logprobs


class Protocol:
    """Reads bodies for one model."""

    def __init__(self, loaded: LoadedModel, *, name: str, context: int) -> None:
        """`name` is the model's for clients; prompt and answer have at most `context` tokens; raises `InputError`."""
        self._loaded, self.name, self._context = loaded, name, context
        self.tokenizer = require_tokenizer(loaded.tokenizer)
        self._answers_before = 0  # whose numbers are taken

    def read(self, values: Any, *, is_chat: bool) -> Asked:
        """Check a body; raises `InputError` for whatever cannot be answered as it is asked for."""
        require(isinstance(values, Mapping), f"the body must be a JSON object, got {shown(values)}")
        kind = ChatBody if is_chat else CompletionBody
        values = {name: value for name, value in values.items() if value is not None and name not in IGNORED}
        fields = {one.name for one in dataclasses.fields(kind)}
        for name in values:
            known = fields | OPTIONS | set(NEUTRAL)
            require(name in known, f"unknown field {shown(name)}{nearest(name, known)}")
        for name, neutral in NEUTRAL.items():
            value = values.pop(name, neutral[0])
            require(value in neutral, f"{name} is not supported, got {shown(value)}: leave it out")
        body = from_dict(kind, {name: value for name, value in values.items() if name in fields}, prefix="body")
        require(body.model in ("", self.name), f"there is no model {body.model!r} here: it is {self.name!r}")
        longest = body.max_tokens or getattr(body, "max_completion_tokens", None)
        options = {name: value for name, value in values.items() if name in OPTIONS}
        options |= {} if longest is None else {"max_new_tokens": longest}
        settings = override_settings(self._loaded.defaults, options)
        prompts = [self._chat(body.messages)] if isinstance(body, ChatBody) else self._prompts(body.prompt)
        asked = {*options} if body.label is None else {*options, "label"}
        return Asked(body, self._answers(body, prompts, settings, asked), sum(map(len, prompts)))

    def _answers(
        self, body: Any, prompts: Sequence[list[int]], settings: DecodeConfig, asked: Collection[str]
    ) -> list[Answer]:
        stops = [body.stop] if isinstance(body.stop, str) else body.stop
        is_list = isinstance(stops, list | tuple) and len(stops) <= 4 and all(isinstance(stop, str) for stop in stops)
        require(is_list, f"stop must be a text or up to four, got {shown(body.stop)}")
        architecture, path = self._loaded.model.llm.architecture, path_config(self._loaded.model)
        grammar = self._loaded.compile_grammar(body.response_format)
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        numbered = number_prompts(prompts, labels=[body.label] * len(prompts))
        restrictions = Restrictions(stops, grammar=grammar)
        common: dict[str, Any] = {"restrictions": restrictions, "tokenizer": self.tokenizer, "asked": asked}
        request = Request(numbered, settings, seed, body.n, **common)
        answers = make_answers(request, architecture, path, first=self._answers_before)
        self._answers_before += len(answers)
        for answer in answers:
            answer.is_scored = body.logprobs is not None and body.logprobs is not False
        total = max(map(len, prompts)) + settings.max_new_tokens
        limit = f"prompt and max_tokens exceed the {self._context} tokens of this server"
        require(total <= self._context, f"{limit}, got {total}: shorten the prompt or lower max_tokens")
        if body.trace:
            check_single_sample(settings)
            require(len(prompts) * body.n == 1, "a trace is of one answer: leave out n, and give one prompt")
            require(grammar is None, "a trace does not know response_format: leave one of the two out")
        return answers

    def _chat(self, messages: Any) -> list[int]:
        """A conversation as token ids; parts of text in a message's content are joined."""
        require(isinstance(messages, list) and len(messages) > 0, f"messages must be a list, got {shown(messages)}")
        for message in messages:
            is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
            require(is_message, f"a message has a role and a content, got {shown(message)}")
        read = [{"role": message["role"], "content": _text(message.get("content"))} for message in messages]
        return prompt_ids(read, self.tokenizer)

    def _prompts(self, prompt: Any) -> list[list[int]]:
        many = prompt if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]
        read = []
        for one in many:
            if isinstance(one, str):
                read += text_ids([one], self.tokenizer)
            elif isinstance(one, list) and all(isinstance(token, int) for token in one):
                read.append(one)
            else:
                raise InputError(f"prompt must be a text, token ids, or a list of either, got {shown(prompt)}")
        check_tokens(read, self._loaded.model.llm.architecture.vocab_size)
        return read


def _text(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    require(isinstance(content, str), f"the content of a message must be text, got {shown(content)}")
    return str(content)
