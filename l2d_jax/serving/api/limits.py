"""The limits that an operator sets for requests."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.refinement.solver import ADAPTIVE
from l2d_jax.errors import InputError, require, shown

BUDGET, DRAWS = 64, 16  # largest values of a request, unless the operator or the model's options allow more
STOP_LENGTH = 256  # largest length of a stop string, in characters
DEPTH = 64  # largest nesting of lists and objects in a body
FORMAT_BYTES = 2**16  # largest response_format, as JSON
TOOLS_BYTES = 2**18  # largest list of tools, as JSON
LOG_PROBABILITIES = 2**18  # largest number of log-probabilities in a reply


@dataclass(frozen=True)
class RequestLimits:
    """The limits of a request, and the budgets of OpenAI's reasoning efforts."""

    context: int = 2048  # largest number of tokens of a prompt and its answer
    answers: int = 64  # largest number of answers of a request: more never fit the queue
    budget: int = BUDGET
    draws: int = DRAWS
    efforts: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))

    def check_settings(self, settings: DecodeConfig, *, options: Mapping[str, Any]) -> None:
        """Raise `InputError` for a budget or draws beyond the limits; `options` are those set in the request."""
        found = f"a budget of {settings.budget} exceeds the {self.budget} evaluations per token of this server"
        if "budget" not in options and settings.solver in ADAPTIVE:
            found = f"{settings.solver} takes up to {settings.budget} evaluations per token where no budget is given"
            found += f", and this server allows {self.budget}"
        require(settings.budget <= self.budget, f"{found}: give a budget of at most {self.budget}")
        problem = f"{settings.draws} draws exceed the {self.draws} of this server"
        require(settings.draws <= self.draws, f"{problem}: lower draws")

    def check_text(self, length: int, *, longest_token: int) -> None:
        """Raise `InputError`, before tokenising, for a text with more characters than `context` tokens can have."""
        most = self.context * longest_token
        problem = f"a prompt of {length} characters exceeds the {self.context} tokens of this server"
        require(length <= most, f"{problem}: shorten it")

    def check_messages(self, messages: Any) -> None:
        """Raise `InputError`, before a template is rendered, for more messages than tokens."""
        problem = f"{len(messages)} messages exceed the {self.context} tokens of this server: leave some out"
        require(len(messages) <= self.context, problem)

    def check_count(self, prompts: int, *, samples: int) -> None:
        """Raise `InputError` for more answers than the queue can ever hold."""
        problem = f"a request asks for at most {self.answers} answers here, got {prompts * samples}"
        require(prompts * samples <= self.answers, f"{problem}: ask several times")

    def check_reply(self, tokens: int, *, alternatives: int | None) -> None:
        """Raise `InputError` for a reply of `tokens` with too many log-probabilities."""
        numbers = 0 if alternatives is None else tokens * (1 + alternatives)
        problem = f"{numbers} log-probabilities exceed the {LOG_PROBABILITIES} of a reply"
        require(numbers <= LOG_PROBABILITIES, f"{problem}: lower n, max_tokens or the number of alternatives")

    def budget_of(self, effort: str) -> int:
        """The budget of a reasoning effort; raises `InputError` for an unknown one."""
        if not self.efforts:
            raise InputError("reasoning_effort has no meaning on this server: give a budget")
        names = ", ".join(self.efforts)
        require(effort in self.efforts, f"reasoning_effort must be one of {names}, got {shown(effort)}")
        return self.efforts[effort]
