"""The bodies of OpenAI's requests: JSON, fields, and all checks that need no model.

In addition to OpenAI's fields, a body may have the decoding options, such as `budget`, `solver`, `gate` and `guidance`,
a class `label`, and `trace`.
"""

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from annotated_types import Interval

from l2d_jax.config import ranges
from l2d_jax.config.parsing import from_dict, nearest
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.requests import check_biases
from l2d_jax.decoding.sampler import LIKELIEST
from l2d_jax.decoding.tools.tool_use import ToolUse, read_tool_use
from l2d_jax.errors import InputError, require, shorten, shown
from l2d_jax.serving.api.limits import DEPTH, FORMAT_BYTES, STOP_LENGTH, TOOLS_BYTES

Choices = Annotated[int, Interval(ge=1, le=128)]
Alternatives = Annotated[int, Interval(ge=0, le=LIKELIEST)]
TokensOrZero = Annotated[int, Interval(ge=0, le=10**7)]
OPTIONS = {option.name for option in dataclasses.fields(DecodeConfig)} - {"max_new_tokens"}
IN_ADDRESS = OPTIONS | {"label", "seed", "score_draws"}  # fields of the address, for clients that cannot send them
# Fields that never change an answer.
IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prediction"}
IGNORED |= {"prompt_cache_key", "prompt_cache_retention", "prompt_cache_options"}
# The values that change nothing; other values are refused, with a remedy. No value: always refused.
NEUTRAL_CHAT: dict[str, tuple[tuple[Any, ...], str]] = {
    "functions": (([],), "declare them as tools"),
    "function_call": (("none", "auto"), "set tool_choice"),
    "modalities": ((["text"],), "answers are text"),
    "audio": ((), "answers are text: leave it out"),
    "web_search_options": ((), "this server searches nothing: leave it out"),
    "moderation": ((), "this server moderates nothing: leave it out"),
    "store": ((False,), "leave it out"),
    "verbosity": (("medium",), "leave it out"),  # OpenAI's default
}
NEUTRAL_COMPLETION: dict[str, tuple[tuple[Any, ...], str]] = {"suffix": (("",), "leave it out")}
SURROGATE = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class StreamOptions:
    """Options of a stream."""

    include_usage: bool = False  # whether a last chunk has the numbers of tokens and evaluations
    include_obfuscation: bool = False  # whether chunks are padded to hide their length, which this server does not do

    def check(self) -> None:
        """Raise `InputError` for what this server does not do."""
        require(not self.include_obfuscation, "stream_options.include_obfuscation is not supported: leave it out")


@dataclass(frozen=True)
class _Common:
    model: str = ""
    max_tokens: TokensOrZero | None = None
    n: Choices = 1
    stop: object = ()  # a text, or a list of up to four texts
    seed: ranges.KeySeed | None = None
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    response_format: object = None
    label: ranges.Label | None = None
    trace: bool = False  # whether the last piece has the trace of each token
    reasoning_effort: object = None  # a named budget
    frequency_penalty: ranges.Penalty = 0.0
    presence_penalty: ranges.Penalty = 0.0
    logit_bias: object = None  # maps token ids to numbers
    score_draws: ranges.SeveralDraws | None = None  # noise samples for log-probabilities of the prompt and of choices

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else list(self.stop)  # type: ignore[call-overload]

    @property
    def biases(self) -> dict[int, float]:
        """The biases of tokens: what is added to their logits."""
        given: Any = self.logit_bias or {}
        return {int(token): float(bias) for token, bias in given.items()}

    def check(self) -> None:
        """Raise `InputError` for fields that do not fit each other or are too large."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        is_list = isinstance(stops, list | tuple) and len(stops) <= 4 and all(isinstance(stop, str) for stop in stops)
        require(is_list, f"stop must be a text or up to four, got {shown(self.stop)}")
        for stop in self.stops:
            problem = f"a stop string has at most {STOP_LENGTH} characters, got {len(stop)}"
            require(len(stop) <= STOP_LENGTH, f"{problem}: shorten it")
        effort = self.reasoning_effort
        require(effort is None or isinstance(effort, str), f"reasoning_effort must be text, got {shown(effort)}")
        self.stream_options.check()
        _check_biases(self.logit_bias)
        _check_size(self.response_format, "response_format", most=FORMAT_BYTES)


@dataclass(frozen=True)
class ChatBody(_Common):
    """The fields of a body of `/v1/chat/completions`, without decoding options."""

    messages: object = None
    max_completion_tokens: TokensOrZero | None = None
    logprobs: bool = False
    top_logprobs: Alternatives = 0
    tools: object = None  # functions that the answer may call
    tool_choice: object = None
    parallel_tool_calls: object = None

    @property
    def tool_use(self) -> ToolUse | None:
        """The tools, and which of them the answer may call; raises `InputError`."""
        return read_tool_use(self.tools, self.tool_choice, parallel=self.parallel_tool_calls)

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives reported for each token; None: no log-probabilities at all."""
        return self.top_logprobs if self.logprobs else None

    def without_texts(self) -> "ChatBody":
        """The fields that a reply needs; the others may be large."""
        return dataclasses.replace(self, messages=None, response_format=None, logit_bias=None, tools=None)

    @property
    def longest(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self) -> None:
        """Raise `InputError` for fields that do not fit each other or are too large."""
        super().check()
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        require(len(both) <= 1, "max_tokens and max_completion_tokens differ: give one of them")
        require(self.logprobs or self.top_logprobs == 0, "top_logprobs needs logprobs: set it to true")
        require(self.longest != 0, "max_tokens must be at least 1, got 0")
        check_messages(self.messages)
        is_list = self.tools is None or isinstance(self.tools, list)
        require(is_list, f"tools must be a list of functions, got {shown(self.tools)}: write [...]")
        _check_size(self.tools, "tools", most=TOOLS_BYTES)
        use = self.tool_use
        can_score = not self.logprobs or use is None or not use.may_call
        require(
            can_score, "logprobs do not know calls of tools: leave one of the two out, or set tool_choice to 'none'"
        )


@dataclass(frozen=True)
class CompletionBody(_Common):
    """The fields of a body of `/v1/completions`, without decoding options."""

    prompt: object = None  # a text, token ids, or a list of either
    logprobs: Alternatives | None = None
    echo: bool = False  # whether the reply repeats the prompt, with its log-probabilities
    best_of: Choices | None = None

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives reported for each token; None: no log-probabilities at all."""
        return self.logprobs

    def without_texts(self) -> "CompletionBody":
        """The fields that a reply needs; the others may be large."""
        return dataclasses.replace(self, prompt=None, response_format=None, logit_bias=None)

    @property
    def longest(self) -> int | None:
        """The most tokens of an answer."""
        return self.max_tokens

    @property
    def prompts(self) -> list[Any]:
        """The prompts as a list; after `check`, each is a text or a list of token ids."""
        given: Any = self.prompt
        is_several = isinstance(given, list) and given and not isinstance(given[0], int)
        return given if is_several else [given]

    def check(self) -> None:
        """Raise `InputError` for fields that do not fit each other or are too large."""
        super().check()
        require(self.max_tokens != 0 or self.echo, "max_tokens must be at least 1 without echo, got 0")
        require(self.best_of in (None, self.n), f"best_of other than n is not supported, got {self.best_of}: drop it")
        are_prompts = all(
            isinstance(one, str) or (isinstance(one, list) and all(type(token) is int for token in one))
            for one in self.prompts
        )
        require(are_prompts, f"prompt must be a text, token ids, or a list of either, got {shown(self.prompt)}")


def parse_json(data: bytes) -> Any:
    """Parse the JSON of a body; raises `InputError` for invalid JSON, and for text that UTF-8 cannot encode."""
    try:
        text = data.decode("utf-8-sig")
        values = json.loads(text, parse_constant=_refuse_constant)
        written = json.dumps(values, ensure_ascii=False) if "\\u" in text else ""
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body must be JSON ({shorten(str(error), 100)}): fix it") from None
    found = SURROGATE.search(written)
    problem = f"text must be Unicode, got half a surrogate pair, {found and ascii(found[0])}"
    require(found is None, f"{problem}: send both halves, or leave it out")
    depth, level = 0, [values]
    while level and depth <= DEPTH:
        inner = [one.values() if isinstance(one, Mapping) else one for one in level if isinstance(one, Mapping | list)]
        level, depth = [one for parts in inner for one in parts], depth + 1
    require(depth <= DEPTH, f"the body is nested deeper than {DEPTH} levels: simplify it")
    return values


def read_address(query: Mapping[str, str]) -> dict[str, Any]:
    """The fields that the address of a request sets, as in `?budget=15&solver=euler`; raises `InputError`.

    A value is a JSON number, true or false, or a text. lm-evaluation-harness sends no options with likelihoods, but it
    posts to the address that it is given.
    """
    fields: dict[str, Any] = {}
    for name, text in query.items():
        unknown = f"unknown field {shown(name)} in the address{nearest(name[:100], IN_ADDRESS)}"
        require(name in IN_ADDRESS, unknown)
        try:
            fields[name] = json.loads(text, parse_constant=_refuse_constant)
        except (ValueError, RecursionError):
            fields[name] = text
    return fields


def read_body(values: Any, *, is_chat: bool) -> tuple[ChatBody | CompletionBody, dict[str, Any]]:
    """Split a body into its fields and its decoding options (unchecked values); raises `InputError`."""
    require(isinstance(values, Mapping), f"the body must be a JSON object, got {shown(values)}")
    kind, neutral = (ChatBody, NEUTRAL_CHAT) if is_chat else (CompletionBody, NEUTRAL_COMPLETION)
    values = {name: value for name, value in values.items() if value is not None and name not in IGNORED}
    fields = {one.name for one in dataclasses.fields(kind)}
    for name in values:
        known = fields | OPTIONS | set(neutral)
        require(name in known, f"unknown field {shown(name)}{nearest(name[:100], known)}")
    for name, (allowed, remedy) in neutral.items():
        value = values.pop(name, None)
        is_neutral = value is None or any(type(value) is type(one) and value == one for one in allowed)
        require(is_neutral, f"{name} {shown(value)} is not supported: {remedy}")
    body = from_dict(kind, {name: value for name, value in values.items() if name in fields}, prefix="body")
    body.check()
    return body, {name: value for name, value in values.items() if name in OPTIONS}


def check_messages(messages: Any) -> None:
    """Raise `InputError` unless `messages` are messages with roles; their contents are checked later."""
    is_list = isinstance(messages, list) and len(messages) > 0
    require(is_list, f"messages must be a list of at least one message, got {shown(messages)}")
    for message in messages:
        is_message = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        require(is_message, f"a message has a role and a content, got {shown(message)}")


def text_length(value: Any) -> int:
    """The total number of characters of all texts in a JSON value."""
    total, rest = 0, [value]
    while rest:
        one = rest.pop()
        if isinstance(one, str):
            total += len(one)
        elif isinstance(one, list):
            rest += one
        elif isinstance(one, Mapping):
            rest += [*one, *one.values()]
    return total


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")


def _check_biases(value: Any) -> None:
    is_mapping = value is None or isinstance(value, Mapping)
    require(is_mapping, f"logit_bias must map token ids to numbers, got {shown(value)}")
    biases = value or {}
    for token in biases:
        problem = f"logit_bias must map token ids to numbers, got the key {shown(token)}"
        is_number = token.isascii() and token.isdecimal() and len(token) < 10
        require(is_number and str(int(token)) == token, problem)
    check_biases({int(token): bias for token, bias in biases.items()})


def _check_size(value: Any, name: str, *, most: int) -> None:
    """Raise `InputError` for a field that is too large to compile while others wait."""
    size = len(json.dumps(value))
    require(size <= most, f"{name} has at most {most} bytes, got {size}: simplify it")
