"""Requests (prompts and settings), the checks that need no weights, and the state of running answers."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Int
from transformers import PreTrainedTokenizerFast

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value, from_dict, nearest
from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.refinement.solver import ADAPTIVE, AMPLE
from l2d_jax.decoding.sampler import BIASES, check_tokens
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.errors import require, shown
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model, check_labels

SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "gate", "max_new_tokens")  # a likelihood does not depend on them


class Prompt(NamedTuple):
    """A prompt, and what its answer depends on besides the settings and the seed."""

    number: int  # seed and number determine the noise and the sampled tokens
    ids: Sequence[int]
    label: int | None = None  # class for guidance
    settings: DecodeConfig | None = None  # for this prompt alone; None: the request's settings


class Restrictions(NamedTuple):
    """What ends an answer (in addition to stop tokens), and which tokens it may contain."""

    stops: Sequence[str] = ()  # strings and names of special tokens; an answer ends before the first of them
    allowed: Sequence[int] | None = None  # token ids that may be sampled; None: all
    banned: Sequence[int] = ()  # token ids that may not be sampled
    grammar: Grammar | None = None  # grammar that the answers follow
    frequency_penalty: float = 0.0  # subtracted from a token's logit for each occurrence in the answer
    presence_penalty: float = 0.0  # subtracted once from the logit of a token that occurs in the answer
    logit_bias: Mapping[int, float] = MappingProxyType({})  # added to the logits of these tokens

    @property
    def has_penalties(self) -> bool:
        """Whether the logits are changed before a token is sampled."""
        return bool(self.frequency_penalty or self.presence_penalty or self.logit_bias)

    def check_penalties(self, vocab_size: int) -> None:
        """Raise `InputError` for penalties and biases out of range, and for tokens that the model lacks."""
        for name in ("frequency_penalty", "presence_penalty"):
            check_value(getattr(self, name), ranges.Penalty, name)
        check_biases(self.logit_bias)
        check_tokens([list(self.logit_bias)], vocab_size)


def check_biases(bias: Any) -> None:
    """Raise `InputError` unless a `logit_bias` maps at most `BIASES` token ids to numbers in the allowed range."""
    is_right = isinstance(bias, Mapping) and all(isinstance(token, Integral) for token in bias)
    require(is_right, f"logit_bias must map token ids to numbers, got {shown(bias)}: write {{50256: -100}}")
    require(len(bias) <= BIASES, f"logit_bias has at most {BIASES} tokens, got {len(bias)}: take fewer")
    for token, value in bias.items():
        check_value(value, ranges.Bias, f"logit_bias of token {token}")


UNRESTRICTED = Restrictions()
OFF: dict[str, Any] = {  # options of the path, with the values that have no effect
    "end": 1.0,
    "velocity": "sample",
    "velocity_temperature": 0.0,
    "anneal": False,
    "guidance": 1.0,
    "draws": 1,
    "gate": 0.0,
    "parallel": "auto",
}


@dataclass(frozen=True)
class Request:
    """Prompts that are answered together, and how."""

    prompts: Sequence[Prompt]
    settings: DecodeConfig  # solver, budget, temperatures and length
    seed: int = 0  # seed and prompt number determine the noise and the sampled tokens
    samples: int = 1  # answers per prompt; they share its prefill and have consecutive numbers
    prefix: int = 0  # length of the prefix that all prompts share, which is read once; each prompt is longer
    restrictions: Restrictions = UNRESTRICTED
    stop_ids: Sequence[int] = ()  # tokens that end an answer; they are not part of it
    tokenizer: PreTrainedTokenizerFast | None = None  # for stop strings
    asked: Collection[str] = ()  # names of the options that the user set for this request, including "label"


class TokenScore(NamedTuple):
    """The log-probability of the chosen token and of the top alternatives, in nats."""

    log_prob: float
    likeliest: list[int]
    likeliest_log_probs: list[float]
    error: float | None = None  # standard error of `log_prob` over noise samples; None: not estimated


class TokenCost(NamedTuple):
    """The cost of a token."""

    evaluations: int  # evaluations of the path
    passes: int  # passes over the weights, including those of the language model


class Piece(NamedTuple):
    """New tokens of one answer."""

    answer: int  # number of the answer; answers to one prompt have consecutive numbers
    tokens: list[int]
    is_last: bool
    ending: str = ""  # why the answer ended, in its last piece: "stop", "length", or "broken" after an error
    evaluations: int = 0  # evaluations of the path for all decoded tokens, also those held back or cut off
    passes: int = 0  # passes over the weights for the same tokens, including those of the language model
    decoded: int = 0  # the number of these tokens
    scores: Sequence[TokenScore] = ()  # scores of `tokens`, if the answer is scored
    rest: str = ""  # text before a stop string, from the token in which the stop string begins
    stop: tuple[int, TokenScore] | None = None  # the stop token that ended a scored answer; it is not in `tokens`
    error: Exception | None = None  # the error that ended this answer alone (ending "broken")


@dataclass(eq=False)
class Answer:
    """A requested answer and its progress."""

    number: int
    prompt: Prompt
    settings: DecodeConfig
    stops: StopSearch
    seed: int = 0
    copy: int = 0  # its number among the answers to its prompt
    grammar: Grammar | None = None  # the grammar that it follows
    path: DiffusionPath | None = None  # the path that refines it, in lanes that several paths share
    is_scored: bool = False  # whether its tokens come with log-probabilities
    is_read: bool = False  # whether its prompt has been read
    cached: int = 0  # tokens of its prompt that came from a prefix cache
    is_stuck: bool = False  # whether its grammar became too large
    restrictions: Restrictions = UNRESTRICTED  # only penalties and bias are read from here
    said: list[int] = field(default_factory=list)  # all tokens so far, including those held back
    _scores: list[TokenScore] = field(default_factory=list)  # scores of tokens that are held back

    def add(
        self,
        row: Sequence[int],
        stop_ids: Sequence[int],
        *,
        is_broken: bool,
        costs: Sequence[TokenCost],
        scores: Sequence[TokenScore],
    ) -> Piece:
        """Add new tokens; returns those up to the answer's end, except tokens that may belong to a stop string.

        `costs` has the cost of each token of `row`.
        """
        row = row[: self.settings.max_new_tokens - len(self.said)]
        self.said += row
        stop = next((i for i, token in enumerate(row) if token in stop_ids), None)
        if self.grammar is not None:
            for token in row[:stop]:
                self.grammar.accept(token)
        is_last = is_broken or stop is not None or len(self.said) >= self.settings.max_new_tokens
        tokens, rest, has_stop = self.stops.add(row[:stop], is_last=is_last)
        self._scores.extend(scores[: len(row[:stop])])
        scored, self._scores = self._scores[: len(tokens)], self._scores[len(tokens) :]
        ending = "broken" if is_broken else "stop" if stop is not None or has_stop else "length" if is_last else ""
        end = None if stop is None or not scores else (row[stop], scores[stop])
        count = len(row) if stop is None else stop + 1
        evaluations, passes = (sum(column) for column in zip(*costs[:count], strict=True)) if count else (0, 0)
        return Piece(self.number, tokens, bool(ending), ending, evaluations, passes, count, scored, rest, end)

    def fail(self, error: Exception) -> Piece:
        """The last piece of an answer that an error ends."""
        return Piece(self.number, [], is_last=True, ending="broken", error=error)


def number_prompts(prompts: Sequence[Sequence[int]], *, labels: Sequence[int | None] | None = None) -> list[Prompt]:
    """Number prompts from 0, and add their labels if given; raises `InputError` for a wrong number of labels."""
    labels = [None] * len(prompts) if labels is None else labels
    problem = f"guidance takes one class label per prompt, got {len(labels)} for {len(prompts)} prompts"
    require(len(labels) == len(prompts), problem)
    return [Prompt(number, ids, label) for number, (ids, label) in enumerate(zip(prompts, labels, strict=True))]


def path_config(model: Model) -> PathConfig | None:
    """The config of the model's path; None for the LM alone."""
    return None if model.path is None else model.path.config


def class_labels(path: PathConfig | None, prompts: Sequence[Prompt]) -> Int[Array, " B"] | None:
    """The class labels of the prompts, or None if there are none.

    Raises `InputError` for an unknown class, and if only some of the prompts have a label.
    """
    labels = [prompt.label for prompt in prompts if prompt.label is not None]
    if not labels:
        return None
    problem = f"guidance takes one class label per prompt, got {len(labels)} for {len(prompts)} prompts"
    require(len(labels) == len(prompts), problem)
    check_labels(path, labels)
    return jnp.array(labels, jnp.int32)


def override_settings(
    settings: DecodeConfig, options: Mapping[str, Any], *, others: Iterable[str] = ()
) -> DecodeConfig:
    """Change options of `settings`. An adaptive solver that is given without a budget gets a budget of `AMPLE`.

    Raises `InputError` for an invalid value, and for an unknown option, with the nearest name among all and `others`.
    """
    names = [option.name for option in fields(DecodeConfig)]
    for name in options:
        require(name in names, f"unknown option {name!r}{nearest(name, [*names, *others])}")
    ample = {"budget": AMPLE} if options.get("solver") in ADAPTIVE else {}
    changed: DecodeConfig = from_dict(DecodeConfig, vars(settings) | ample | dict(options), prefix="config.decode")
    if options.get("velocity_temperature") == 0:  # arg max: defaults for other temperatures are unused
        changed = replace(changed, **{name: OFF[name] for name in ("anneal", "velocity") if name not in options})
    return changed


def check_asked(
    asked: Collection[str], chosen: Collection[DecodeConfig], path: PathConfig | None, *, has_label: bool
) -> None:
    """Raise `InputError` for an option that the user set but that has no effect with any of the `chosen` settings.

    `asked` has the names of the options that the user set for this call, including "label". Defaults may be unused.
    Top-k and top-p are allowed at temperature 0, because the most likely token is always in their sets.
    """
    refining = [one for one in chosen if one.budget > 1]
    for name in sorted({"solver", "tolerance", "label", *OFF} & set(asked)):
        if name in OFF and all(getattr(one, name) == OFF[name] for one in chosen):
            continue
        require(path is not None, f"{name} is an option of a diffusion path, and this model has none: leave it out")
        problem = f"{name} changes nothing at a budget of 1, which is the language model alone"
        require(refining != [], f"{problem}: raise the budget, or leave {name} out")
    is_sequential = all(one.solver in ADAPTIVE or one.velocity == "expectation" for one in refining)
    problem = "parallel 'off' changes nothing: an adaptive solver, and the velocity 'expectation', go one by one"
    is_off = "parallel" in asked and any(one.parallel == "off" for one in chosen)
    require(not (is_off and is_sequential), f"{problem}: leave it out")
    is_adaptive = any(one.solver in ADAPTIVE for one in refining)
    rule = f"tolerance is for adaptive solvers ({', '.join(ADAPTIVE)})"
    require(is_adaptive or "tolerance" not in asked, f"{rule}: choose one of them, or leave tolerance out")
    is_guided = has_label or "guidance" not in asked or all(one.guidance == 1 for one in chosen)
    require(is_guided, "guidance is the strength of a class, and no label is given: give one, or leave guidance out")


def check_prompts(prompts: Sequence[Sequence[int]], architecture: Architecture, *, new_tokens: int) -> None:
    """Raise `InputError` for an empty prompt, and for a prompt that leaves no positions for `new_tokens`."""
    require(len(prompts) > 0 and all(prompts), "a prompt is empty: give at least one token")
    longest, limit = max(map(len, prompts)), architecture.max_position_embeddings
    problem = f"a prompt of {longest} tokens and {new_tokens} new ones exceed the {limit} positions of the model"
    require(longest + new_tokens <= limit, f"{problem}: shorten the prompt or lower max_new_tokens")
