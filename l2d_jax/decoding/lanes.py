"""Lanes: answers that are decoded together, each with settings of its own; one that ends makes room for another.

Notable: the slots for new tokens are a ring that all lanes write at the same place, so that no lane needs a cursor of
its own; positions, not slots, say what a query sees. A prompt is read into a state of its own, a long one in pieces
between the chunks of tokens of the others, and then takes the row of a free lane. No program is compiled for that but
where the longest prompt or answer needs a larger bucket.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import decode
from l2d_jax.decoding.buckets import CHUNK, answer_slots, is_long, pad, round_up, sample_bucket
from l2d_jax.decoding.condition_table import ConditionTable
from l2d_jax.decoding.refine import Refinement
from l2d_jax.decoding.requests import UNRESTRICTED, Answer, Piece, Request, TokenScore
from l2d_jax.decoding.sampler import Penalized, Penalties, SamplingOptions, allow, answer_keys
from l2d_jax.distributed import processes
from l2d_jax.errors import contained
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model

PIECE = 256  # tokens of a prompt that are read at a time, where it has more than twice as many
READ = 16  # tokens of prompts that take about as long as an evaluation of all lanes


class Lanes:
    """Decodes any number of answers, so many at a time, which share solver, velocity, noise samples and reader."""

    def __init__(
        self, model: Model, *, lanes: int, stop_ids: Sequence[int], group: int = 1, known: Request | None = None
    ) -> None:
        """Lanes for a model that reads the context, with or without a path; `stop_ids` are tokens that end an answer.

        Prompts of `group` answers are read at a time. All answers will belong to `known`, which saves work; None:
        requests come one by one.
        """
        self.model = model
        self._answers: list[Answer | None] = [None] * lanes
        self._stop_ids = tuple(stop_ids) or (-1,)  # -1: an ended answer goes on with it where there is no stop token
        self._ends = jnp.array(self._stop_ids, jnp.int32)
        self._group = group
        self._copies, self._shorter = 1, 0  # answers to a prompt that are read together; its tokens in the prefix
        self._capacity: int | None = None  # slots for the longest answer; None: a bucket for those under way
        self._shared: DecodeConfig | None = None  # settings of all answers
        self._prefix: KVCache | None = None
        self._allowed: jax.Array | None = None
        if known is not None:
            self._copies, self._shorter = known.samples, known.prefix
            settings = {prompt.settings or known.settings for prompt in known.prompts}
            self._capacity = answer_slots(max(one.max_new_tokens for one in settings))
            self._shared = settings.pop() if len(settings) == 1 else None
            restrictions, vocab_size = known.restrictions, model.llm.architecture.vocab_size
            mask = allow(vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
            self._allowed = None if mask is None else jnp.asarray(mask)[None]
            if known.prefix:
                ids = known.prompts[0].ids[: known.prefix]
                self._prefix = decode.read_prefix(model.llm, jnp.array(ids, jnp.int32))
        self.cost = 0  # of the last step, in evaluations, about
        self._state: decode.State | None = None
        self._reading: list[tuple[Sequence[Answer], Iterator[decode.State | None]]] = []
        self._options: dict[str, Any] | None = None  # of the answers under way; None: these have changed
        self._table: tuple[set[int], ConditionTable | None] | None = None  # of these budgets

    @property
    def free(self) -> int:
        """The lanes without an answer."""
        return self._answers.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is under way."""
        return self.free == len(self._answers)

    def admit(self, answers: Sequence[Answer]) -> None:
        """Give answers free lanes, of which there are enough; the next steps read their prompts."""
        if self._state is None and self._capacity is not None and len(answers) == len(self._answers):
            self._answers, self._state, self._options = list(answers), self.read(answers), None
            for answer in answers:
                answer.is_read = True
            return
        for first in range(0, len(answers), self._group):
            group = answers[first : first + self._group]
            for answer in group:
                self._answers[self._answers.index(None)] = answer
            self._reading.append((group, self._read([*group, *[group[-1]] * (self._group - len(group))], piece=PIECE)))

    def drop(self, answer: Answer) -> None:
        """Leave an answer as it is, and free its lane; a prompt that no answer waits for is not read on."""
        if answer in self._answers:
            self._answers[self._answers.index(answer)] = self._options = None
            self._reading = [(group, read) for group, read in self._reading if any(map(self._answers.count, group))]

    def step(self) -> list[Piece]:
        """Read prompts, and decode the next few tokens.

        Of prompts that are read in pieces, one piece is read where it holds up other answers, and all where it does
        not. Where requests come one by one, there may be others elsewhere: about `PIECE` tokens are read at a time.
        """
        pieces, read = list[Piece](), 0
        while self._reading:
            group, reading = self._reading[0]
            try:
                state = next(reading)
            except BaseException as error:  # of these prompts alone
                self._reading.pop(0)
                for answer in (one for one in group if one in self._answers):
                    pieces.append(answer.fail(contained(error)))
                    self.drop(answer)
                continue
            read += min(PIECE, max(len(answer.prompt.ids) for answer in group)) * self._group
            is_alone = self._capacity is not None and not any(one is not None and one.is_read for one in self._answers)
            if state is not None:
                self._reading.pop(0)
                self._place(group, state)
            elif not is_alone:
                break
            if self._capacity is None and read >= PIECE:
                break
        decoded = self._decode()
        self.cost = 1 + read // READ + max((piece.evaluations for piece in decoded), default=0)
        return pieces + decoded

    def _decode(self) -> list[Piece]:
        answers = [answer if answer is not None and answer.is_read else None for answer in self._answers]
        live = [answer for answer in answers if answer is not None]
        if not live or self._state is None:
            return []
        if self._options is None:
            self._options = self.options(answers)
            self._state = replace(self._state, done=jnp.array([answer is None for answer in answers]))
        options, has_grammar = self._options, any(answer.grammar is not None for answer in live)
        if has_grammar:
            options = self._mask(options, answers)
        if any(answer.restrictions.has_penalties for answer in live):
            options = self._penalize(options, answers)
        # Where requests come one by one, others wait for a chunk, so a chunk of long tokens is one token.
        waits = self._capacity is None and any(is_long(one.settings.budget, one.settings.draws) for one in live)
        steps = 1 if has_grammar or waits else CHUNK
        options = options | {"steps": steps, "noise_samples": sample_bucket(live[0].settings.draws)}
        self._state, new = decode.token_decoder()(self.model, self._state, stop_ids=self._ends, **options)
        columns = (new.ids, new.evaluations, self._state.broken)
        ids, costs, is_broken = (processes.gather_array(column).tolist() for column in columns)
        scores = None
        if new.log_probs is not None:
            told = [processes.gather_array(column).tolist() for column in new[2:]]
            scores = [list(map(TokenScore, *rows)) for rows in zip(*told, strict=True)]
        pieces = []
        for lane, answer in enumerate(answers):
            if answer is not None:
                scored = scores[lane] if scores is not None and answer.is_scored else ()
                row, is_bad = ids[lane], is_broken[lane] or answer.is_stuck
                try:
                    piece = answer.add(row, self._stop_ids, is_broken=is_bad, costs=costs[lane], scores=scored)
                except BaseException as error:  # of a tokenizer or a grammar: the other answers go on
                    piece = answer.fail(contained(error))
                pieces.append(piece)
                if pieces[-1].is_last:
                    self.drop(answer)
        return pieces

    def options(self, answers: Sequence[Answer | None]) -> dict[str, Any]:
        """How to integrate and to sample answers, and their labels; None, no answer, costs no evaluation."""
        live = [answer for answer in answers if answer is not None]
        labels = None
        if live[0].prompt.label is not None:
            labels = jnp.array([0 if answer is None else answer.prompt.label for answer in answers], jnp.int32)
        first = self._shared or live[0].settings
        rows = [replace(first, budget=1) if answer is None else answer.settings for answer in answers]
        budgets = {first.budget} if self._shared else {row.budget for row in rows}
        if self._table is None or self._table[0] != budgets:
            self._table = budgets, Refinement.tabulate(self.model, first.solver, budgets)
        if self._shared:
            refinement, sampling = Refinement.from_config(first), SamplingOptions.from_config(first)
        else:
            refinement = _stack([Refinement.from_config(row) for row in rows])
            sampling = _stack([SamplingOptions.from_config(row) for row in rows])
        refinement, sampling = replace(refinement, table=self._table[1]), replace(sampling, allowed=self._allowed)
        sampling = replace(sampling, is_scored=any(answer.is_scored for answer in live))
        return {"settings": refinement, "sampling": sampling, "labels": labels}

    def _mask(self, options: dict[str, Any], answers: Sequence[Answer | None]) -> dict[str, Any]:
        """The options, with the tokens that each answer's grammar allows next, in estimates too."""
        rows = np.ones((len(answers), self.model.llm.architecture.vocab_size), bool)
        for row, answer in zip(rows, answers, strict=True):
            if answer is not None and answer.grammar is not None:
                try:
                    row[:] = answer.grammar.mask()
                except BaseException as error:
                    contained(error)
                    answer.is_stuck = True
        masks = jnp.asarray(rows)
        sampled = masks if self._allowed is None else masks & self._allowed
        settings, sampling = replace(options["settings"], allowed=masks), replace(options["sampling"], allowed=sampled)
        return options | {"settings": settings, "sampling": sampling}

    def _penalize(self, options: dict[str, Any], answers: Sequence[Answer | None]) -> dict[str, Any]:
        """The options, with the penalties of each answer and its tokens so far."""
        assert self._state is not None
        rows = list[Penalized]()
        for answer in answers:
            of = UNRESTRICTED if answer is None else answer.restrictions
            said = answer.said if answer is not None and of.has_penalties else ()
            rows.append(Penalized(of.frequency_penalty, of.presence_penalty, of.logit_bias, said))
        penalties = Penalties.stack(rows, length=self._state.cache.ring)
        return options | {"sampling": replace(options["sampling"], penalties=penalties)}

    def read(self, answers: Sequence[Answer]) -> decode.State:
        """The state behind the prompts, read at once, with a row for each of the answers."""
        state = next(self._read(answers))
        assert state is not None
        return state

    def _read(self, answers: Sequence[Answer], *, piece: int | None = None) -> Iterator[decode.State | None]:
        """Yield None after each piece of long prompts, and at last the state behind them."""
        llm, (capacity, slots) = self.model.llm, self._size(answers)
        prompts, rows = [answer.prompt for answer in answers], list(range(len(answers)))
        if self._copies > 1:  # each is read once
            prompts = list({id(prompt): prompt for prompt in prompts}.values())
            rows = [next(i for i, prompt in enumerate(prompts) if prompt is answer.prompt) for answer in answers]
            whole = -(-len(answers) // self._copies) + (piece is not None)  # as many each time
            prompts += prompts[-1:] * (whole - len(prompts))
        whole = len(prompts)
        texts = [prompt.ids[self._shorter :] for prompt in prompts]
        ids, lengths = pad(texts, length=slots)
        numbers = [(answer.seed, answer.prompt.number, answer.copy) for answer in answers]
        seeds, *others = map(np.array, zip(*numbers, strict=True))
        keys = answer_keys(seeds.astype(np.uint32), *(column.astype(np.int32) for column in others))
        given = keys if self._copies == 1 else keys[jnp.array([0] * whole)]
        if piece is None or slots <= 2 * piece:
            state = decode.prefill(llm, ids, lengths, given, capacity=capacity, prefix=self._prefix)
        else:
            read = KVCache.empty(llm.architecture, whole, slots, dtype=llm.dtype, prefix=self._prefix)
            hidden = jnp.zeros((whole, llm.architecture.hidden_size), llm.dtype)
            for first in range(0, max(map(len, texts)), piece):
                part, _ = pad([text[first : first + piece] for text in texts], length=piece)
                read, hidden = decode.read_piece(llm, read, hidden, part, lengths)
                yield None
            read = replace(read, prefix=None)
            state = decode.start(llm, read, hidden, ids, lengths, given, capacity=capacity, prefix=self._prefix)
        yield state if self._copies == 1 else decode.fan_out(state, jnp.array(rows), keys)

    def _place(self, answers: Sequence[Answer], new: decode.State) -> None:
        """Put answers whose prompts have been read into their lanes; one that was dropped meanwhile has none."""
        lanes, owned = self._answers, [answer for answer in self._answers if answer is not None]
        capacity, slots = self._size(owned or answers)
        is_used = any(answer.is_read for answer in owned)
        if self._state is None or (self._state.cache.ring > capacity and not is_used):
            copies = jnp.zeros(len(lanes), jnp.int32)
            self._state = decode.fan_out(new, copies, new.keys[copies])  # `_decode` ends those that are no answer's
        ring = max(capacity, self._state.cache.ring, new.cache.ring)
        state, new = (decode.resize(one, ring=ring, slots=slots) for one in (self._state, new))
        places = [lanes.index(answer) if answer in lanes else len(lanes) for answer in answers]
        places += [len(lanes)] * (self._group - len(answers))  # beyond the last: nowhere
        self._state, self._options = decode.refill(state, new, jnp.array(places)), None
        for answer in answers:
            answer.is_read = True

    def _size(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """The slots that the longest of these answers needs, and those that the longest of their prompts does."""
        longest = answer_slots(max(answer.settings.max_new_tokens for answer in answers))
        slots = round_up(max(len(answer.prompt.ids) for answer in answers) - self._shorter)
        return self._capacity or round_up(longest), slots


def _stack(parts: Sequence[Any]) -> Any:
    """One tree whose leaves have a row for each part."""
    return jax.tree.map(lambda *leaves: jnp.asarray(np.concatenate([np.atleast_1d(a) for a in leaves])), *parts)
