"""What a model is asked, prompts and settings, with the checks that need no weights; and answers on their way."""

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
from l2d_jax.decoding.buckets import TOGETHER, answer_slots, round_up, sample_bucket
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.pace import can_be_parallel, window
from l2d_jax.decoding.refinement.condition_table import CAPACITY
from l2d_jax.decoding.refinement.solver import ADAPTIVE, AMPLE
from l2d_jax.decoding.sampler import BIASES, check_tokens
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.distributed.memory import require_memory, tree_bytes
from l2d_jax.errors import require, shown
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.l2d import Model, check_labels
from l2d_jax.model.llm import LLM

# The options of `DecodeConfig` that a likelihood does not depend on.
SAMPLING_OPTIONS = ("temperature", "top_k", "top_p", "gate", "max_new_tokens")


class Prompt(NamedTuple):
    """A prompt, and what its answer depends on besides the settings and the seed."""

    number: int  # the keys of its noise and of its sampled tokens are a function of the seed and this number
    ids: Sequence[int]
    label: int | None = None  # class for guidance
    settings: DecodeConfig | None = None  # its own, in place of the request's


class Restrictions(NamedTuple):
    """What ends an answer besides stop tokens, and which tokens it may contain."""

    stops: Sequence[str] = ()  # strings and names of special tokens that end an answer, and are left out of it
    allowed: Sequence[int] | None = None  # token ids that may be sampled; None: all
    banned: Sequence[int] = ()  # token ids that may not
    grammar: Grammar | None = None  # which the answers follow
    frequency_penalty: float = 0.0  # taken from a token's logit for each time that its answer has it
    presence_penalty: float = 0.0  # taken once, where its answer has the token
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
    """Raise `InputError` unless a `logit_bias` maps token ids, not too many, to numbers in their range."""
    is_right = isinstance(bias, Mapping) and all(isinstance(token, Integral) for token in bias)
    require(is_right, f"logit_bias must map token ids to numbers, got {shown(bias)}: write {{50256: -100}}")
    require(len(bias) <= BIASES, f"logit_bias has at most {BIASES} tokens, got {len(bias)}: take fewer")
    for token, value in bias.items():
        check_value(value, ranges.Bias, f"logit_bias of token {token}")


UNRESTRICTED = Restrictions()

OFF: dict[str, Any] = {  # the values of options of the path that ask for nothing
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
    """Prompts to be answered together."""

    prompts: Sequence[Prompt]
    settings: DecodeConfig  # solver, budget, temperatures and length
    seed: int = 0  # with a prompt's number, determines its noise and its sampled tokens
    samples: int = 1  # answers to each prompt, which share its prefill and follow each other
    prefix: int = 0  # tokens that all prompts begin with, which are read once; each prompt is longer
    restrictions: Restrictions = UNRESTRICTED
    stop_ids: Sequence[int] = ()  # tokens that end an answer, and are left out of it
    tokenizer: PreTrainedTokenizerFast | None = None  # for stop strings
    asked: Collection[str] = ()  # names of the options that the user gave for this request, "label" among them


class TokenScore(NamedTuple):
    """Log-probabilities, in nats, of a token and of the likeliest ones in its place."""

    log_prob: float
    likeliest: list[int]
    likeliest_log_probs: list[float]


class TokenCost(NamedTuple):
    """What a token took."""

    evaluations: int  # of the path
    passes: int  # over the weights, those of the language model included


class Piece(NamedTuple):
    """New tokens of one answer."""

    answer: int  # its number; those of one prompt follow each other
    tokens: list[int]
    is_last: bool
    ending: str = ""  # of the last piece: "stop", "length", or "broken" where it could not go on
    evaluations: int = 0  # of the path, for the tokens that were decoded, also where they are held back or left out
    passes: int = 0  # over the weights, those of the language model included, likewise
    decoded: int = 0  # these tokens
    scores: Sequence[TokenScore] = ()  # of the tokens, where the answer has them
    rest: str = ""  # what a token that is left out says before the stop string that begins in it
    stop: tuple[int, TokenScore] | None = None  # the stop token that ended a scored answer, which is left out of it
    error: Exception | None = None  # which ended this answer alone, as "broken"


@dataclass(eq=False)
class Answer:
    """An answer that is asked for, and how far it is."""

    number: int
    prompt: Prompt
    settings: DecodeConfig
    stops: StopSearch
    seed: int = 0
    copy: int = 0  # its number among the answers to its prompt
    grammar: Grammar | None = None  # which it follows
    is_scored: bool = False
    is_read: bool = False
    is_stuck: bool = False  # whether its grammar became too large on the way
    restrictions: Restrictions = UNRESTRICTED  # of which penalties and bias are read here
    said: list[int] = field(default_factory=list)  # its tokens so far, also where they are held back
    _scores: list[TokenScore] = field(default_factory=list)  # of tokens that are held back

    def add(
        self,
        row: Sequence[int],
        stop_ids: Sequence[int],
        *,
        is_broken: bool,
        costs: Sequence[TokenCost],
        scores: Sequence[TokenScore],
    ) -> Piece:
        """The new tokens up to the answer's end, less what may belong to a stop string; `costs` are those of a row."""
        row = row[: self.settings.max_new_tokens - len(self.said)]
        self.said += row
        stop = next((i for i, token in enumerate(row) if token in stop_ids), None)
        if self.grammar is not None:
            for token in row[:stop]:
                self.grammar.accept(token)
        is_last = is_broken or stop is not None or len(self.said) >= self.settings.max_new_tokens
        tokens, rest, has_stop = self.stops.add(row[:stop], is_last=is_last)
        self._scores.extend(scores[: len(row[:stop])])
        told, self._scores = self._scores[: len(tokens)], self._scores[len(tokens) :]
        ending = "broken" if is_broken else "stop" if stop is not None or has_stop else "length" if is_last else ""
        end = None if stop is None or not scores else (row[stop], scores[stop])
        count = len(row) if stop is None else stop + 1
        evaluations, passes = (sum(column) for column in zip(*costs[:count], strict=True)) if count else (0, 0)
        return Piece(self.number, tokens, bool(ending), ending, evaluations, passes, count, told, rest, end)

    def fail(self, error: Exception) -> Piece:
        """The last piece of an answer that an error ends."""
        return Piece(self.number, [], is_last=True, ending="broken", error=error)


def number_prompts(prompts: Sequence[Sequence[int]], *, labels: Sequence[int | None] | None = None) -> list[Prompt]:
    """Prompts numbered from 0, with one class each or none; raises `InputError` for another number of classes."""
    labels = [None] * len(prompts) if labels is None else labels
    problem = f"guidance takes one class label per prompt, got {len(labels)} for {len(prompts)} prompts"
    require(len(labels) == len(prompts), problem)
    return [Prompt(number, ids, label) for number, (ids, label) in enumerate(zip(prompts, labels, strict=True))]


def path_config(model: Model) -> PathConfig | None:
    """How the model's path is made; None for the LM alone."""
    return None if model.path is None else model.path.config


def class_labels(path: PathConfig | None, prompts: Sequence[Prompt]) -> Int[Array, " B"] | None:
    """The classes of the prompts, or None; raises `InputError` unless the path knows each, and all or none have one."""
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
    """Change options of decoding by name; an adaptive solver that comes without a budget gets an ample one.

    Raises `InputError` for an option that does not exist, with the nearest name among those of `DecodeConfig` and
    `others`, and for a value that does not fit.
    """
    names = [option.name for option in fields(DecodeConfig)]
    for name in options:
        require(name in names, f"unknown option {name!r}{nearest(name, [*names, *others])}")
    ample = {"budget": AMPLE} if options.get("solver") in ADAPTIVE else {}
    changed: DecodeConfig = from_dict(DecodeConfig, vars(settings) | ample | dict(options), prefix="config.decode")
    if options.get("velocity_temperature") == 0:  # the arg max: what the defaults say of other temperatures is unused
        changed = replace(changed, **{name: OFF[name] for name in ("anneal", "velocity") if name not in options})
    return changed


def check_asked(
    asked: Collection[str], chosen: Collection[DecodeConfig], path: PathConfig | None, *, has_label: bool
) -> None:
    """Raise `InputError` for an option that the user gave, and that changes nothing at any of the `chosen` settings.

    `asked` has the names of what the user gave for this call, "label" among them; a default may be unused. Top-k and
    top-p go with temperature 0, whose token is in each such set.
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
    rule = f"tolerance is of adaptive solvers ({', '.join(ADAPTIVE)})"
    require(is_adaptive or "tolerance" not in asked, f"{rule}: choose one of them, or leave tolerance out")
    is_guided = has_label or "guidance" not in asked or all(one.guidance == 1 for one in chosen)
    require(is_guided, "guidance is the strength of a class, and no label is given: give one, or leave guidance out")


def check_prompts(prompts: Sequence[Sequence[int]], architecture: Architecture, *, new_tokens: int) -> None:
    """Raise `InputError` for an empty prompt, and for one that is too long to be answered."""
    require(len(prompts) > 0 and all(prompts), "a prompt is empty: give at least one token")
    longest, limit = max(map(len, prompts)), architecture.max_position_embeddings
    problem = f"a prompt of {longest} tokens and {new_tokens} new ones exceed the {limit} positions of the model"
    require(longest + new_tokens <= limit, f"{problem}: shorten the prompt or lower max_new_tokens")


def check_decoding_memory(
    llm: LLM,
    path: PathConfig | None,
    settings: DecodeConfig,
    *,
    rows: int,
    longest: int,
    remedy: str,
    candidates: int = 0,
) -> None:
    """Raise `InputError` if so many `rows` cannot be decoded together in the memory of the devices.

    The model may be declared; its longest prompt has `longest` tokens. Token search extends each of its beams, the
    rows, by `candidates`; 0 is no search. The `remedy` is what to lower.
    """
    is_parallel = path is not None and settings.parallel != "off" and can_be_parallel(settings)
    evaluations = window([settings], vocab_size=llm.architecture.vocab_size, lanes=rows) + 1 if is_parallel else 1
    a, item, slots = llm.architecture, jnp.dtype(llm.dtype).itemsize, answer_slots(settings.max_new_tokens)
    width = 2 * a.num_hidden_layers * a.num_key_value_heads * a.head_dim * item
    needs: dict[str, Any] = {
        "weights": tree_bytes(llm),
        "KV cache": rows * (round_up(longest) + slots) * width * (2 if candidates else 1),  # beams move to other rows
        "logits": 4 * rows * min(sample_bucket(settings.draws), TOGETHER) * a.vocab_size * evaluations,
        "candidates": rows * candidates * (12 + slots),  # compared with all tokens of their answers
    }
    if path is not None:
        needs["conditions"] = CAPACITY * (path.classes + 1) * 6 * a.num_hidden_layers * a.hidden_size * item
    require_memory(needs, remedy)
