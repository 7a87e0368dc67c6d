"""Reads OpenAI's requests: checks them completely, and turns them into answers to decode.

Fields that a request omits take the model's defaults, and a random seed. Several threads may read requests at a time: a
tokenizer works in many threads as long as none changes its truncation or padding, which the first text fixes.
"""

import secrets
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import prompt_ids, require_tokenizer, text_ids
from l2d_jax.decoding.generation import make_answers
from l2d_jax.decoding.requests import Answer, Request, Restrictions, number_prompts, override_settings, path_config
from l2d_jax.decoding.sampler import check_tokens
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.decoding.tools.call_format import CallFormat
from l2d_jax.decoding.tools.tool_use import ToolUse
from l2d_jax.decoding.trace import check_single_sample
from l2d_jax.errors import require
from l2d_jax.serving.api import echo
from l2d_jax.serving.api.bodies import ChatBody, CompletionBody, parse_json, read_address, read_body, text_length
from l2d_jax.serving.api.choices import RankedChoices, check_choices, score_choices, split_format
from l2d_jax.serving.api.roles import name_system
from l2d_jax.serving.api.scoring import DRAWS, check_draws
from l2d_jax.serving.api.tokenization import DetokenizeBody, TokenizeBody, detokenize, read_tokens_body, tokenize
from l2d_jax.serving.api.tools import format_of_calls
from l2d_jax.serving.models import Catalogue, ServedModel


@dataclass(frozen=True)
class Asked:
    """A checked request, and its answers."""

    body: ChatBody | CompletionBody  # without its texts, which may be long
    answers: Sequence[Answer]  # answers to one prompt are consecutive
    prompt_tokens: int
    model: ServedModel  # answers it
    echoes: Sequence[echo.Echo] = ()  # one per prompt, if the reply repeats the prompts
    ranked: Sequence[RankedChoices] = ()  # one per prompt, if the reply has the probabilities of choices
    scoring: Sequence[Iterator[int]] = ()  # iterators that score echoes and choices, piece by piece
    calls: CallFormat | None = None  # how calls of tools are written, if the answers may have some

    @property
    def is_answered(self) -> bool:
        """Whether the reply has an answer, not only the prompt."""
        return self.body.longest != 0


class Protocol:
    """Reads request bodies for the models of a server, which share a tokenizer."""

    def __init__(self, models: Catalogue) -> None:
        """Raises `InputError` for models without a tokenizer."""
        self.models, base = models, models.get("")
        self._limits = base.limits  # without efforts and defaults, which models may differ in
        self._vocab_size = base.loaded.model.llm.architecture.vocab_size
        self.tokenizer = require_tokenizer(base.loaded.tokenizer)
        self._longest_token = max(map(len, self.tokenizer.get_vocab()))
        text_ids(["a"], self.tokenizer)  # turns truncation and padding off in the tokenizer
        self._lock = threading.Lock()
        self._answers_before = 0  # number of answers so far

    def read(self, data: bytes, *, is_chat: bool, query: Mapping[str, str] = MappingProxyType({})) -> Asked:
        """Check and read a body; raises `InputError` for a request that cannot be answered exactly as it is.

        `query` has the fields of the address, which hold where the body has none.
        """
        return self.read_values(parse_json(data), is_chat=is_chat, query=query)

    def read_values(self, values: Any, *, is_chat: bool, query: Mapping[str, str]) -> Asked:
        """As `read`, with a body that is parsed already."""
        defaults = read_address(query)
        if isinstance(values, Mapping):
            named = {} if values.get("reasoning_effort") is None else {"budget": None}  # a budget by its name
            values = defaults | named | {name: value for name, value in values.items() if value is not None}
        body, options = read_body(values, is_chat=is_chat)
        model = self.models.get(body.model)
        settings = self._settings(model, body, options)
        prompts = [self._chat(body)] if isinstance(body, ChatBody) else self._complete(body)
        new = 0 if body.longest == 0 else settings.max_new_tokens
        total = max(map(len, prompts)) + new
        limit = f"prompt and max_tokens exceed the {self._limits.context} tokens of this server"
        require(total <= self._limits.context, f"{limit}, got {total}: shorten the prompt or lower max_tokens")
        repeated = sum(map(len, prompts)) if isinstance(body, CompletionBody) and body.echo else 0
        told = (new * len(prompts) + repeated) * body.n
        self._limits.check_reply(told, alternatives=body.alternatives)
        format, choices = split_format(body.response_format)
        body = replace(body, response_format=format)
        request = self._request(model, body, prompts, settings, options)
        answers = self._answers(model, body, request)
        calls = format_of_calls(model.loaded, _tool_use(body), body.response_format)
        asked = Asked(body.without_texts(), answers, sum(map(len, prompts)), model, calls=calls)
        if isinstance(body, CompletionBody) and body.echo:
            asked = self._echoed(asked, body, request, options)
        asked = self._ranked(asked, choices, request, draws=body.score_draws) if choices else asked
        unused = "score_draws changes nothing without echo and logprobs, or a response_format of type choice"
        require(body.score_draws is None or len(asked.scoring) > 0, f"{unused}: leave it out")
        return asked

    def tokenize(self, data: bytes) -> dict[str, Any]:
        """The reply to a body of `/tokenize`; raises `InputError`."""
        body = read_tokens_body(TokenizeBody, parse_json(data))
        self.models.get(body.model)
        return tokenize(body, self.tokenizer, self._limits, longest_token=self._longest_token)

    def detokenize(self, data: bytes) -> dict[str, Any]:
        """The reply to a body of `/detokenize`; raises `InputError`."""
        body = read_tokens_body(DetokenizeBody, parse_json(data))
        self.models.get(body.model)
        return detokenize(body, self.tokenizer, self._limits, vocab_size=self._vocab_size)

    def _settings(self, model: ServedModel, body: ChatBody | CompletionBody, options: dict[str, Any]) -> DecodeConfig:
        """The decoding options of a request, checked against the limits."""
        longest = {"max_new_tokens": body.longest} if body.longest else {}
        effort = body.reasoning_effort
        budget = {"budget": model.limits.budget_of(effort)} if isinstance(effort, str) else {}
        options = budget | options | longest
        settings = override_settings(model.loaded.defaults, options)
        model.limits.check_settings(settings, options=options)
        return settings

    def _request(
        self,
        model: ServedModel,
        body: ChatBody | CompletionBody,
        prompts: Sequence[list[int]],
        settings: DecodeConfig,
        options: Collection[str],
    ) -> Request:
        seed = secrets.randbelow(2**31) if body.seed is None else body.seed
        numbered = number_prompts(prompts, labels=[body.label] * len(prompts))
        penalties: dict[str, Any] = {name: getattr(body, name) for name in ("frequency_penalty", "presence_penalty")}
        grammar = model.loaded.compile_grammar(body.response_format, tools=_tool_use(body))
        restrictions = Restrictions(body.stops, grammar=grammar, logit_bias=body.biases, **penalties)
        asked = {*options} if body.label is None else {*options, "label"}
        common: dict[str, Any] = {"restrictions": restrictions, "tokenizer": self.tokenizer, "asked": asked}
        return Request(numbered, settings, seed, body.n, **common)

    def _answers(self, model: ServedModel, body: ChatBody | CompletionBody, request: Request) -> list[Answer]:
        count = len(request.prompts) * body.n
        with self._lock:
            first, self._answers_before = self._answers_before, self._answers_before + count
        of_model = model.loaded.model
        answers = make_answers(request, of_model.llm.architecture, path_config(of_model), first=first)
        for answer in answers:
            answer.is_scored = body.alternatives is not None
        if body.trace:
            check_single_sample(request.settings)
            require(count == 1, "a trace is of one answer: leave out n, and give one prompt")
            grammar = request.restrictions.grammar
            require(grammar is None, "a trace does not know response_format or tools: leave one of the two out")
            require(body.longest != 0, "a trace is of an answer: give max_tokens of at least 1")
        return answers

    def _echoed(self, asked: Asked, body: CompletionBody, request: Request, options: dict[str, Any]) -> Asked:
        """Add the prompts that the reply repeats to a request."""
        shown_texts = [one if isinstance(one, str) else to_text(one, self.tokenizer) for one in body.prompts]
        echoes = [echo.Echo(text, prompt.ids) for text, prompt in zip(shown_texts, request.prompts, strict=True)]
        if body.logprobs is None:
            return replace(asked, echoes=echoes)
        settings, name = request.settings, "draws" if body.score_draws is None else "score_draws"
        usual = settings.draws if settings.draws > 1 or "draws" in options else DRAWS
        draws = usual if body.score_draws is None else body.score_draws
        check_draws(draws, budget=settings.budget, name=name, most=max(self._limits.draws, settings.draws))
        pairs = zip(echoes, request.prompts, strict=True)
        scorer = asked.model.scorer(settings)
        scoring = [echo.score(scorer, one, request, prompt=prompt, draws=draws) for one, prompt in pairs]
        return replace(asked, echoes=echoes, scoring=scoring)

    def _ranked(self, asked: Asked, choices: Sequence[str], request: Request, *, draws: int | None) -> Asked:
        """Add the choices whose probabilities the reply has to a request."""
        count, ids = draws or DRAWS, text_ids(choices, self.tokenizer)
        check_draws(count, budget=request.settings.budget, name="score_draws", most=self._limits.draws)
        longest = max(len(prompt.ids) for prompt in request.prompts)
        check_choices(choices, ids, prompt=longest, context=self._limits.context)
        ranked = [RankedChoices(choices, ids) for _ in request.prompts]
        pairs = zip(ranked, request.prompts, strict=True)
        scorer = asked.model.scorer(request.settings)
        scoring = [score_choices(scorer, one, request, prompt=prompt, draws=count) for one, prompt in pairs]
        return replace(asked, ranked=ranked, scoring=[*asked.scoring, *scoring])

    def _complete(self, body: CompletionBody) -> list[list[int]]:
        """The prompts as token ids."""
        self._limits.check_count(len(body.prompts), samples=body.n)
        prompts = [self._prompt(prompt) for prompt in body.prompts]
        check_tokens(prompts, self._vocab_size)
        return prompts

    def _chat(self, body: ChatBody) -> list[int]:
        """A conversation as token ids."""
        self._limits.check_count(1, samples=body.n)
        messages: Any = body.messages
        self._limits.check_messages(messages)
        use = body.tool_use
        tools = None if use is None else [*use.tools]
        self._limits.check_text(text_length([messages, tools]), longest_token=self._longest_token)
        return prompt_ids(name_system(messages, self.tokenizer), self.tokenizer, tools=tools)

    def _prompt(self, prompt: str | list[int]) -> list[int]:
        """A prompt as token ids; the tokenizer adds its special tokens to a text, such as a BOS token."""
        if isinstance(prompt, list):
            return prompt
        self._limits.check_text(len(prompt), longest_token=self._longest_token)
        ids: list[int] = self.tokenizer(prompt, verbose=False)["input_ids"]
        return ids


def _tool_use(body: ChatBody | CompletionBody) -> ToolUse | None:
    return body.tool_use if isinstance(body, ChatBody) else None
