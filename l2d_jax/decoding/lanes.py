"""Lanes: the rows of a batch, in which answers with different settings are decoded together, one after the other.

When an answer ends, its lane goes to the next one. Notable: the slots for new tokens are a ring, which all lanes write
at the same place, so no lane needs a cursor. Positions, not slots, decide what a query sees. A prompt is read into a
separate state and then takes the row of a free lane; a long prompt is read in pieces, between the chunks of the other
answers. This compiles a new program only if the longest prompt or answer needs a larger bucket.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import compress

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from l2d_jax.decoding.buckets import CHUNK, answer_slots, is_long, pad, round_up, sample_bucket
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.lane_options import LaneOptions, Options
from l2d_jax.decoding.parallel import stream_state
from l2d_jax.decoding.parallel.pace import Order, Pace, room
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.parallel.stream_state import Stream
from l2d_jax.decoding.prefill import prefill, read_piece, read_prefix, start
from l2d_jax.decoding.requests import Answer, Piece, Request, TokenCost, TokenScore
from l2d_jax.decoding.sampler import Tokens, allow, answer_keys
from l2d_jax.decoding.state import State, fan_out
from l2d_jax.distributed import processes
from l2d_jax.errors import contained
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model

PIECE = 256  # prompts with more than twice this number of tokens are read in pieces of this size
READ = 16  # reading this number of prompt tokens takes about as long as an evaluation of all lanes


class Lanes:
    """Decodes any number of answers, `lanes` at a time. All share solver, velocity, noise samples and reader."""

    def __init__(
        self, model: Model, *, lanes: int, stop_ids: Sequence[int], group: int = 1, known: Request | None = None
    ) -> None:
        """Make empty lanes.

        Args:
          model: a model that reads the context (`Model.reading`), with or without a path.
          lanes: number of answers decoded at a time.
          stop_ids: tokens that end an answer.
          group: number of answers whose prompts are read at a time.
          known: the request all answers belong to, if there is only one; this saves compilation. None if requests
            arrive one at a time.
        """
        self.model = model
        self._answers: list[Answer | None] = [None] * lanes
        self._stop_ids = tuple(stop_ids) or (-1,)  # -1 fills ended answers if there is no stop token
        self._ends = jnp.array(self._stop_ids, jnp.int32)
        self._group = group
        self._copies, self._shorter = 1, 0  # answers per prompt, which share its reading; length of the common prefix
        self._capacity: int | None = None  # slots for the longest answer; None: a bucket for the running answers
        self._prefix: KVCache | None = None
        allowed, shared = None, None
        if known is not None:
            self._copies, self._shorter = known.samples, known.prefix
            settings = {prompt.settings or known.settings for prompt in known.prompts}
            self._capacity = answer_slots(max(one.max_new_tokens for one in settings))
            shared = settings.pop() if len(settings) == 1 else None
            restrictions, vocab_size = known.restrictions, model.llm.architecture.vocab_size
            mask = allow(vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
            allowed = None if mask is None else jnp.asarray(mask)[None]
            if known.prefix:
                ids = known.prompts[0].ids[: known.prefix]
                self._prefix = read_prefix(model.llm, jnp.array(ids, jnp.int32))
        self.cost = 0  # approximate cost of the last step, in passes over the weights
        self.pace = Pace(model, lanes)
        self._maker = LaneOptions(self.pace, shared=shared, allowed=allowed)
        self.order = Order.SEQUENTIAL
        self.state: State | Stream | None = None
        self._reading: list[tuple[Sequence[Answer], Iterator[State | None]]] = []
        self._options: Options | None = None  # options for the running answers; None: to be made anew

    @property
    def free(self) -> int:
        """The number of lanes without an answer."""
        return self._answers.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no answer is running."""
        return self.free == len(self._answers)

    def admit(self, answers: Sequence[Answer]) -> None:
        """Give each answer a free lane; there must be enough. The next steps read their prompts."""
        if self.state is None and self._capacity is not None and len(answers) == len(self._answers):
            self._answers, self._options, self.order = list(answers), None, self._choose(answers)
            self.state = self._enter(self.read(answers), answers)
            for answer in answers:
                answer.is_read = True
            return
        for first in range(0, len(answers), self._group):
            group = answers[first : first + self._group]
            for answer in group:
                self._answers[self._answers.index(None)] = answer
            self._reading.append((group, self._read([*group, *[group[-1]] * (self._group - len(group))], piece=PIECE)))

    def drop(self, answer: Answer) -> None:
        """Stop decoding an answer and free its lane. Reading of a prompt stops if no other answer waits for it."""
        if answer in self._answers:
            self._answers[self._answers.index(answer)] = self._options = None
            self._reading = [(group, read) for group, read in self._reading if any(map(self._answers.count, group))]

    def step(self) -> list[Piece]:
        """Read prompts, and decode the next few tokens of all running answers.

        A prompt that is read in pieces delays other answers: if any are running, only one piece is read per step.
        If requests arrive one at a time, other lanes may be waiting too: about `PIECE` tokens are read per step.
        """
        pieces, read = list[Piece](), 0
        while self._reading:
            group, reading = self._reading[0]
            try:
                state = next(reading)
            except BaseException as error:  # it concerns only these prompts
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
        self.cost = 1 + read // READ + max((piece.passes for piece in decoded), default=0)
        return pieces + decoded

    def _decode(self) -> list[Piece]:
        answers = [answer if answer is not None and answer.is_read else None for answer in self._answers]
        live = [answer for answer in answers if answer is not None]
        if not live or self.state is None:
            return []
        self._reorder(live)
        if self._options is None:
            self._options = self._maker.make(answers, self.order)
            if isinstance(self.state, Stream) and (stages := self._options.settings.stages) is not None:
                self.state = stream_state.make_room(self.state, stages.size)
            self.state = stream_state.end(self.state, jnp.array([answer is None for answer in answers]))
        options, has_grammar = self._options, any(answer.grammar is not None for answer in live)
        if has_grammar:
            options = self._maker.restrict(options, answers)
        if any(answer.restrictions.has_penalties for answer in live):
            options = self._maker.penalize(options, answers, length=stream_state.ring(self.state))
        new, is_new, is_broken = self._run(options, live, is_single=has_grammar)
        columns = (new.ids, new.evaluations, new.passes, is_new, is_broken)
        ids, costs, passes, is_new, is_broken = (processes.gather_array(column).tolist() for column in columns)
        scores = None
        if new.log_probs is not None:
            told = [processes.gather_array(column).tolist() for column in new[3:]]
            scores = [list(map(TokenScore, *rows)) for rows in zip(*told, strict=True)]
        pieces = []
        for lane, answer in enumerate(answers):
            if answer is not None:
                scored = scores[lane] if scores is not None and answer.is_scored else ()
                row, scored, cost, taken = (
                    list(compress(column, is_new[lane])) for column in (ids[lane], scored, costs[lane], passes[lane])
                )
                is_bad = is_broken[lane] or answer.is_stuck
                try:
                    costed = list(map(TokenCost, cost, taken))
                    piece = answer.add(row, self._stop_ids, is_broken=is_bad, costs=costed, scores=scored)
                    self.pace.add(tokens=piece.decoded, passes=piece.passes, order=self.order)
                except BaseException as error:  # from a tokenizer or a grammar: the other answers continue
                    piece = answer.fail(contained(error))
                pieces.append(piece)
                if pieces[-1].is_last:
                    self.drop(answer)
        return pieces

    def _run(
        self, options: Options, live: Sequence[Answer], *, is_single: bool
    ) -> tuple[Tokens, Bool[Array, "B steps"], Bool[Array, " B"]]:
        """Decode the next tokens; also says which entries are real tokens, and which sequences cannot go on."""
        state, chosen = self.state, options._asdict() | {"stop_ids": self._ends}
        assert state is not None
        if isinstance(state, Stream):
            del chosen["labels"]
            after, emitted = stream_decoder()(self.model, state, passes=CHUNK, **chosen)
            self.state = after
            return emitted.tokens, emitted.is_new, after.state.broken
        # If requests arrive one at a time, others wait for this chunk: a chunk of expensive tokens is a single token.
        is_slow = self.order is Order.SEQUENTIAL
        waits = is_slow and self._capacity is None and any(is_long(a.settings.budget, a.settings.draws) for a in live)
        chosen |= {"noise_samples": sample_bucket(live[0].settings.draws)}
        steps = 1 if is_single or waits else CHUNK
        ahead, new = token_decoder()(self.model, state, steps=steps, **chosen)
        self.state = ahead
        return new, jnp.ones(new.ids.shape, bool), ahead.broken

    def _reorder(self, live: Sequence[Answer]) -> None:
        """Change the order of evaluations if another one is now better for these answers or the passes they took."""
        in_stream = isinstance(self.state, Stream)
        order = self._choose(live, in_stream=in_stream)
        if order is not self.order:
            self.order, self._options = order, None
        if isinstance(self.state, Stream) and order is not Order.STREAM:
            self.state = stream_state.leave(self.model.llm, self.state)

    def options(self, answer: Answer, *, rows: int) -> Options:
        """The options for a search with `rows` beams for one answer, which does not use the lanes."""
        self.pace.lanes = rows
        return self._maker.make([answer], self._choose([answer], in_stream=False))

    def _choose(self, answers: Sequence[Answer], *, in_stream: bool | None = None) -> Order:
        """Choose the order of evaluations for these answers."""
        settings = {answer.settings for answer in answers}
        has_label = answers[0].prompt.label is not None
        has_grammar = any(answer.grammar is not None for answer in answers)
        return self.pace.order(settings, has_label=has_label, has_grammar=has_grammar, in_stream=in_stream)

    def _enter(self, state: State, answers: Sequence[Answer]) -> State | Stream:
        """Turn the state after the prompts into what the order needs; extra rows repeat the last answer."""
        if self.order is not Order.STREAM:
            return state
        rows = [*answers, *[answers[-1]] * (len(state.count) - len(answers))]
        is_plain = jnp.array([answer.settings.budget == 1 for answer in rows])
        gate = jnp.array([answer.settings.gate for answer in rows], jnp.float32)
        size = room({answer.settings for answer in answers if answer.settings.budget > 1} or {answers[0].settings})
        return stream_state.enter(self.model.llm, state, is_plain=is_plain, gate=gate, size=size)

    def read(self, answers: Sequence[Answer]) -> State:
        """Read the prompts at once; returns the state after them, with a row per answer."""
        state = next(self._read(answers))
        assert state is not None
        return state

    def _read(self, answers: Sequence[Answer], *, piece: int | None = None) -> Iterator[State | None]:
        """Read prompts: yields None after each piece of long prompts, and finally the state after them."""
        llm, (capacity, slots) = self.model.llm, self._size(answers)
        prompts, rows = [answer.prompt for answer in answers], list(range(len(answers)))
        if self._copies > 1:  # read each prompt once
            prompts = list({id(prompt): prompt for prompt in prompts}.values())
            rows = [next(i for i, prompt in enumerate(prompts) if prompt is answer.prompt) for answer in answers]
            whole = -(-len(answers) // self._copies) + (piece is not None)  # the same number each time
            prompts += prompts[-1:] * (whole - len(prompts))
        whole = len(prompts)
        texts = [prompt.ids[self._shorter :] for prompt in prompts]
        ids, lengths = pad(texts, length=slots)
        numbers = [(answer.seed, answer.prompt.number, answer.copy) for answer in answers]
        seeds, *others = map(np.array, zip(*numbers, strict=True))
        keys = answer_keys(seeds.astype(np.uint32), *(column.astype(np.int32) for column in others))
        given = keys if self._copies == 1 else keys[jnp.array([0] * whole)]
        if piece is None or slots <= 2 * piece:
            state = prefill(llm, ids, lengths, given, capacity=capacity, prefix=self._prefix)
        else:
            read = KVCache.empty(llm.architecture, whole, slots, dtype=llm.dtype, prefix=self._prefix)
            hidden = jnp.zeros((whole, llm.architecture.hidden_size), llm.dtype)
            for first in range(0, max(map(len, texts)), piece):
                part, _ = pad([text[first : first + piece] for text in texts], length=piece)
                read, hidden = read_piece(llm, read, hidden, part, lengths)
                yield None
            read = replace(read, prefix=None)
            state = start(llm, read, hidden, ids, lengths, given, capacity=capacity, prefix=self._prefix)
        yield state if self._copies == 1 else fan_out(state, jnp.array(rows), keys)

    def _place(self, answers: Sequence[Answer], new: State) -> None:
        """Put answers whose prompts have been read into their lanes, except those dropped in the meantime."""
        lanes, owned = self._answers, [answer for answer in self._answers if answer is not None]
        capacity, slots = self._size(owned or answers)
        if self.state is None or not any(answer.is_read for answer in owned):
            copies, self.order = jnp.zeros(len(lanes), jnp.int32), self._choose(owned or answers)
            # `_decode` ends the rows that belong to no answer.
            self.state = self._enter(fan_out(new, copies, new.keys[copies]), answers)
        ring = max(capacity, stream_state.ring(self.state), new.cache.ring)
        pair = (self.state, self._enter(new, answers))
        state, entered = (stream_state.fit(one, ring=ring, slots=slots) for one in pair)
        places = [lanes.index(answer) if answer in lanes else len(lanes) for answer in answers]
        places += [len(lanes)] * (self._group - len(answers))  # beyond the last lane: dropped
        self.state, self._options = stream_state.put(state, entered, jnp.array(places)), None
        for answer in answers:
            answer.is_read = True

    def _size(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """The numbers of slots for the longest of these answers, and for the longest of their prompts."""
        longest = answer_slots(max(answer.settings.max_new_tokens for answer in answers))
        slots = round_up(max(len(answer.prompt.ids) for answer in answers) - self._shorter)
        return self._capacity or round_up(longest), slots
