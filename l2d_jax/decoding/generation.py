"""Generates token ids: a prefill of the prompts, then chunks of tokens until every answer has ended.

The rows of a batch are computed apart: an answer is a function of its prompt, its number, the seed and the settings, up
to rounding, which depends on the shape of the batch (rows, padded length, common prefix). In float32 that changes a
logit by some 1e-5, so that a token changes only where two are as good as equal. In bfloat16 and int8 it may change one
by some tenths, and answers with it.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from transformers import PreTrainedTokenizerFast

from l2d_jax.config import ranges
from l2d_jax.config.parsing import check_value, require
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import decode
from l2d_jax.decoding.buckets import CHUNK, answer_slots, pad, round_up
from l2d_jax.decoding.refine import Refinement, check_budget
from l2d_jax.decoding.requests import Request, check_decoding_memory, check_prompts, check_seed, class_labels
from l2d_jax.decoding.sampler import SamplingOptions, allow
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.distributed import processes
from l2d_jax.errors import InputError
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model

GROUPS = 8  # prompts are read for an eighth of the lanes at a time: later, lanes wait; earlier, reading costs more


class Piece(NamedTuple):
    """New tokens of one answer."""

    answer: int  # its number; those of one prompt follow each other
    tokens: list[int]
    is_last: bool


def generate_tokens(
    model: Model, request: Request, *, stop_ids: Sequence[int] = (), tokenizer: PreTrainedTokenizerFast | None = None
) -> list[list[int]]:
    """The token ids of each answer, without the stop token; the other prompts change the rounding alone.

    Arguments and errors are those of `decode_lanes`.
    """
    answers: list[list[int]] = [[] for _ in range(len(request.prompts) * request.samples)]
    for pieces in decode_lanes(model, request, stop_ids=stop_ids, tokenizer=tokenizer):
        for piece in pieces:
            answers[piece.answer] += piece.tokens
    return answers


def decode_lanes(
    model: Model,
    request: Request,
    *,
    lanes: int | None = None,
    stop_ids: Sequence[int] = (),
    tokenizer: PreTrainedTokenizerFast | None = None,
) -> Iterator[list[Piece]]:
    """Yield the next few token ids of the answers that are being decoded, until all have ended.

    At most `lanes` of them (None: all) are decoded at a time. One that ends makes room for the next, in the order of
    the prompts, without a new program; longest prompts first takes the least time. One of the `stop_ids` ends an
    answer, and is left out of it; the tokenizer is for stop strings.

    Raises:
      InputError: for an empty prompt, one that leaves no positions for its answer, a budget that the solver or the
        model does not know, an unknown class or token, a stop string that cannot occur; and, once all other answers
        have ended, for those whose logits were not numbers.
    """
    stop_ids = stop_ids or (-1,)  # -1 is what an ended answer goes on with where the model has no stop token
    count = len(request.prompts) * check_value(request.samples, ranges.Rows, "samples")
    search = StopSearch(request.restrictions.stops, tokenizer, count, keeps_stop=request.restrictions.keeps_stop)
    lanes = min(lanes or count, count)
    reader = Reader.open(model, request, lanes=lanes)
    owner = list(range(lanes))  # the answer that each lane decodes; -1: none
    left = np.repeat([one.max_new_tokens for one in reader.chosen], request.samples)  # tokens of each answer
    waiting, broken, ends = range(lanes, count), list[int](), jnp.array(stop_ids, jnp.int32)
    state, settings = reader.read(owner), reader.settings(owner)
    while max(owner) >= 0:
        state, new = decode.decode_tokens(
            reader.model, state, stop_ids=ends, steps=CHUNK, noise_samples=reader.chosen[0].draws, **settings
        )
        rows, is_broken, pieces = processes.gather_array(new).tolist(), processes.gather_array(state.broken), []
        for lane, answer in enumerate(owner):
            if answer < 0:
                continue
            room = int(left[answer])
            piece = _cut(answer, rows[lane][:room], search, stop_ids, ends=room <= CHUNK)
            if is_broken[lane]:
                broken.append(answer)
            pieces.append(piece._replace(is_last=piece.is_last or bool(is_broken[lane])))
            left[answer] -= CHUNK
            owner[lane] = -1 if pieces[-1].is_last else answer
        yield pieces
        if any(piece.is_last for piece in pieces):
            while waiting and owner.count(-1) >= min(reader.group, len(waiting)):
                state = reader.admit(state, owner, waiting[: reader.group])
                waiting = waiting[reader.group :]
            settings = reader.settings(owner)
            state = replace(state, done=jnp.array(owner) < 0)
    if broken:
        problem = f"logits of sequences {sorted(broken)} were not numbers, which ended them there"
        raise InputError(f"{problem}: check the weights, or use float32")


@dataclass(frozen=True)
class Reader:
    """A request that has been checked, and what reads its prompts."""

    request: Request
    model: Model  # that reads the context
    chosen: Sequence[DecodeConfig]  # settings of each prompt
    shared: dict[str, Any] | None  # how to integrate and to sample all answers; None: they differ
    allowed: jax.Array | None  # mask of the tokens that may be sampled
    labels: np.ndarray | None  # class of each prompt
    prefix: KVCache | None
    group: int  # rows in which prompts are read while others are decoded

    @classmethod
    def open(cls, model: Model, request: Request, *, lanes: int) -> "Reader":
        """Raises `InputError` as `decode_lanes` does, before a prompt is read."""
        prompts, restrictions = request.prompts, request.restrictions
        path = None if model.path is None else model.path.config
        chosen = [prompt.settings or request.settings for prompt in prompts] or [request.settings]
        longest, architecture = max(chosen, key=lambda one: one.max_new_tokens), model.llm.architecture
        for one in set(chosen):
            check_budget(one, has_path=path is not None)
            check_prompts([p.ids for p, its in zip(prompts, chosen, strict=False) if its == one], one, architecture)
            require(
                (one.solver, one.velocity, one.draws) == (longest.solver, longest.velocity, longest.draws),
                "prompts that are answered together share solver, velocity and draws: ask for the others apart",
            )
        check_seed(request.seed)
        labels: Any = class_labels(model, prompts)
        mask = allow(architecture.vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
        allowed, shared = None if mask is None else jnp.asarray(mask), None
        group = max(1, lanes // GROUPS) if lanes < len(prompts) * request.samples else 0
        tokens = max(len(prompt.ids) for prompt in prompts) - request.prefix
        remedy = "the number of prompts, samples, draws or max_new_tokens"
        check_decoding_memory(model.llm, path, longest, rows=lanes + group, longest=tokens, remedy=remedy)
        reading = model.reading(refines=any(one.budget > 1 for one in chosen))
        require(
            reading.llm is model.llm or all(one.budget > 1 for one in chosen),
            "at a budget of 1 the language model reads the prompt, beyond that this path does: ask for them apart",
        )
        if len(set(chosen)) == 1:
            sampling = SamplingOptions.from_config(chosen[0], allowed=allowed)
            shared = {"settings": Refinement.prepare(reading, chosen[0]), "sampling": sampling}
        ids = prompts[0].ids[: request.prefix]
        prefix = decode.read_prefix(reading.llm, jnp.array(ids, jnp.int32)) if ids else None
        labels = None if labels is None else np.asarray(labels)
        return cls(request, reading, chosen, shared, allowed, labels, prefix, group)

    def settings(self, answers: Sequence[int]) -> dict[str, Any]:
        """How to integrate and to sample these answers, and their labels; -1, no answer, costs no evaluation."""
        places = np.array(answers) // self.request.samples
        labels = None if self.labels is None else jnp.asarray(self.labels[places])
        if self.shared is not None:
            return {**self.shared, "labels": labels}
        rows = [self.chosen[place] if place >= 0 else replace(self.chosen[0], budget=1) for place in places]
        refinement = _stack([Refinement.from_config(row) for row in rows])
        sampling = replace(_stack([SamplingOptions.from_config(row) for row in rows]), allowed=self.allowed)
        return {"settings": refinement, "sampling": sampling, "labels": labels}

    def slots(self, answers: Iterable[int]) -> int:
        """The slots that the prompts of these answers take, each; -1 is no answer."""
        prompts = (self.request.prompts[answer // self.request.samples] for answer in answers if answer >= 0)
        return round_up(max(len(prompt.ids) for prompt in prompts) - self.request.prefix)

    def read(self, answers: Sequence[int], *, slots: int | None = None) -> decode.State:
        """The state behind the prompts, with a row for each of the answers, and room for a whole number of chunks."""
        request, samples = self.request, self.request.samples
        places = list(dict.fromkeys(answer // samples for answer in answers))  # each prompt is read once
        rows = [places.index(answer // samples) for answer in answers]
        whole = -(-len(answers) // samples) + (slots is not None and samples > 1)  # as many each time
        places += places[-1:] * (whole - len(places))
        prompts = [request.prompts[place] for place in places]
        ids, lengths = pad([prompt.ids[request.prefix :] for prompt in prompts], length=slots)
        numbers = jnp.array([prompt.number for prompt in prompts])
        keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(request.seed), numbers)
        capacity = answer_slots(max(one.max_new_tokens for one in self.chosen))
        state = decode.prefill(self.model.llm, ids, lengths, keys, capacity=capacity, prefix=self.prefix)
        if samples == 1:
            return state
        return decode.fan_out(state, jnp.array(rows), jnp.array([answer % samples for answer in answers]))

    def admit(self, state: decode.State, owner: list[int], answers: Sequence[int]) -> decode.State:
        """Give these answers free lanes, and read their prompts; `owner` says who has which lane."""
        lanes = [lane for lane, answer in enumerate(owner) if answer < 0][: len(answers)]
        for lane, answer in zip(lanes, answers, strict=True):
            owner[lane] = answer
        slots, spare = state.cache.positions.shape[1] - state.cache.ring, self.group - len(answers)
        if (needed := self.slots(owner)) < slots:
            state, slots = replace(state, cache=state.cache.shorten(needed)), needed
        added = self.read([*answers, *[answers[-1]] * spare], slots=slots)
        return decode.refill(state, added, jnp.array([*lanes, *[len(owner)] * spare]))  # beyond the last: nowhere


def _stack(parts: Sequence[Any]) -> Any:
    """One tree whose leaves have a row for each part."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate([np.atleast_1d(a) for a in leaves])), *parts)


def _cut(answer: int, row: list[int], search: StopSearch, stop_ids: Sequence[int], *, ends: bool) -> Piece:
    """The new tokens of an answer up to its end."""
    stop = next((i for i, token in enumerate(row) if token in stop_ids), None)
    is_last = ends or stop is not None
    tokens, is_stopped = search.add(answer, row[:stop], is_last=is_last)
    return Piece(answer, tokens, is_last or is_stopped)
