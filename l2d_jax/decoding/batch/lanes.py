"""Lanes: the rows of a batch, in which answers with different settings are decoded together, one after the other.

When an answer ends, its lane goes to the next one. Notable: the slots for new tokens are a ring, which all lanes write
at the same place, so no lane needs a cursor. Positions, not slots, decide what a query sees. A prompt is read into a
separate state (`prompt_reader`) and then takes the row of a free lane; a long prompt is read in pieces, between the
chunks of the other answers. This compiles a new program only if the longest prompt or answer needs a larger bucket.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import compress
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from l2d_jax.decoding.batch.lane_options import LaneOptions, Options
from l2d_jax.decoding.batch.lane_paths import LanePaths
from l2d_jax.decoding.batch.places import Places
from l2d_jax.decoding.batch.prompt_reader import NO_SERVICE, PIECE, PromptReader, Service, answers_room
from l2d_jax.decoding.buckets import CHUNK, is_long, sample_bucket
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.parallel import stream_state
from l2d_jax.decoding.parallel.pace import Order, Pace
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.parallel.stream_state import Stream
from l2d_jax.decoding.requests import Answer, Piece, Request, TokenCost, TokenScore
from l2d_jax.decoding.sampler import Tokens, allow
from l2d_jax.decoding.state import State, fan_out
from l2d_jax.distributed import processes
from l2d_jax.errors import contained
from l2d_jax.model.l2d import Model

READ = 16  # reading this number of prompt tokens takes about as long as an evaluation of all lanes


class Lanes(Places):
    """Decodes any number of answers, `lanes` at a time. All share solver, velocity, noise samples and reader."""

    def __init__(
        self,
        model: Model,
        *,
        lanes: int,
        stop_ids: Sequence[int],
        group: int = 1,
        known: Request | None = None,
        service: Service = NO_SERVICE,
    ) -> None:
        """Make empty lanes.

        Args:
          model: a model that reads the context (`Model.reading`), with or without a path.
          lanes: number of answers decoded at a time.
          stop_ids: tokens that end an answer.
          group: number of answers whose prompts are read at a time.
          known: the request all answers belong to, if there is only one; this saves compilation. None if requests
            arrive one at a time.
          service: how they work in a server; `group` is then 1, and `known` None.
        """
        assert service == NO_SERVICE or group == 1
        self._paths = LanePaths(model, lanes) if service.are_mixed else None
        self._model = model
        super().__init__(lanes)
        self._stop_ids = tuple(stop_ids) or (-1,)  # -1 fills ended answers if there is no stop token
        self._ends = jnp.array(self._stop_ids, jnp.int32)
        self._group = group
        self._is_known = known is not None
        allowed, shared = None, None
        if known is not None:
            settings = {prompt.settings or known.settings for prompt in known.prompts}
            shared = settings.pop() if len(settings) == 1 else None
            restrictions, vocab_size = known.restrictions, model.llm.architecture.vocab_size
            mask = allow(vocab_size, allowed=restrictions.allowed, banned=restrictions.banned)
            allowed = None if mask is None else jnp.asarray(mask)[None]
        self.cost = 0  # approximate cost of the last step, in passes over the weights
        self.pace = Pace(self.model, lanes, is_fixed=service.context is not None)
        masked: dict[str, Any] = {"allowed": allowed, "is_masked": known is None}
        self._maker = LaneOptions(self.pace, shared=shared, paths=self._paths, **masked)
        self._reader = PromptReader(model, self._maker, known=known, service=service)
        self.order = Order.SEQUENTIAL
        self.state: State | Stream | None = None
        self._reading: list[tuple[Sequence[Answer], Iterator[State | Stream | None]]] = []
        self._options: Options | None = None  # options for the running answers; None: to be made anew

    @property
    def model(self) -> Model:
        """The model that decodes."""
        return self._model if self._paths is None else self._paths.model

    @property
    def _is_running(self) -> bool:
        """Whether an answer is being decoded: its prompt has been read."""
        return any(answer is not None and answer.is_read for answer in self._answers)

    def admit(self, answers: Sequence[Answer]) -> None:
        """Give each answer a free lane; there must be enough. The next steps read their prompts."""
        if self.state is None and self._is_known and len(answers) == len(self._answers):
            self._answers, self._options, self.order = list(answers), None, self._choose(answers)
            state = next(self._reader.read(answers, order=lambda: self.order))
            assert state is not None
            self.state = self._reader.enter(state, answers, self.order)
            for answer in answers:
                answer.is_read = True
            return
        for first in range(0, len(answers), self._group):
            group = answers[first : first + self._group]
            for answer in group:
                self._answers[self._answers.index(None)] = answer
            rows = [*group, *[group[-1]] * (self._group - len(group))]
            self._reading.append((group, self._reader.read(rows, order=partial(self._joined, rows), piece=PIECE)))

    def drop(self, answer: Answer) -> None:
        """Stop decoding an answer and free its lane. Reading of a prompt stops if no other answer waits for it."""
        if answer in self._answers:
            self._answers[self._answers.index(answer)] = self._options = None
            self._reading = [(group, read) for group, read in self._reading if any(map(self._answers.count, group))]

    def step(self, *, is_rehearsal: bool = False) -> list[Piece]:
        """Read prompts, and decode the next few tokens of all running answers.

        A rehearsal decodes one token at a time, each in the next order of evaluations, so that their programs are
        compiled.

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
            read += min(PIECE, max(len(answer.prompt.ids) - answer.cached for answer in group)) * self._group
            is_alone = self._is_known and not self._is_running
            if state is not None:
                self._reading.pop(0)
                self._place(group, state)
            elif not is_alone:
                break
            if not self._is_known and read >= PIECE:
                break
        decoded = self._decode(is_rehearsal=is_rehearsal)
        if is_rehearsal:
            self.pace.leave(self.order)
        self.cost = 1 + read // READ + max((piece.passes for piece in decoded), default=0)
        return pieces + decoded

    def _decode(self, *, is_rehearsal: bool) -> list[Piece]:
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
        new, is_new, is_broken = self._run(options, live, is_single=has_grammar, is_rehearsal=is_rehearsal)
        columns = (new.ids, new.evaluations, new.passes, is_new, is_broken)
        ids, costs, passes, is_new, is_broken = (processes.gather_array(column).tolist() for column in columns)
        scores = None
        if new.log_probs is not None:
            gathered = [processes.gather_array(column).tolist() for column in new[3:]]
            scores = [list(map(TokenScore, *rows)) for rows in zip(*gathered, strict=True)]
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
                if piece.is_last:
                    if piece.ending != "broken":
                        self._reader.keep(answer, self.state, row=lane)
                    self.drop(answer)
        return pieces

    def _run(
        self, options: Options, live: Sequence[Answer], *, is_single: bool, is_rehearsal: bool
    ) -> tuple[Tokens, Bool[Array, "B steps"], Bool[Array, " B"]]:
        """Decode the next tokens; also says which entries are real tokens, and which sequences cannot go on."""
        state, chosen = self.state, options._asdict() | {"stop_ids": self._ends}
        assert state is not None
        length = steps = 1 if is_single else CHUNK
        if not self._is_known:  # others wait for this chunk, and a client for its first token; one program serves both
            is_slow = self.order is Order.SEQUENTIAL and any(is_long(a.settings.budget, a.settings.draws) for a in live)
            is_short = is_single or is_slow or is_rehearsal or not all(answer.said for answer in live)
            steps = 1 if is_short else CHUNK
            length, chosen["limit"] = CHUNK, jnp.int32(steps)
        if isinstance(state, Stream):
            del chosen["labels"]
            after, emitted = stream_decoder()(self.model, state, passes=length, **chosen)
            self.state = after
            return emitted.tokens, emitted.is_new, after.state.broken
        chosen |= {"noise_samples": sample_bucket(live[0].settings.draws)}
        ahead, new = token_decoder()(self.model, state, steps=length, **chosen)
        self.state = ahead
        return new, jnp.broadcast_to(jnp.arange(length) < steps, new.ids.shape), ahead.broken

    def _reorder(self, live: Sequence[Answer]) -> None:
        """Change the order of evaluations if another one is now better for these answers or the passes they took."""
        in_stream = isinstance(self.state, Stream)
        order = self._choose(live, in_stream=in_stream)
        if order is not self.order:
            self.order, self._options = order, None
        if isinstance(self.state, Stream) and order is not Order.STREAM:
            self.state = stream_state.leave_stream(self.model.llm, self.state)

    def _choose(self, answers: Sequence[Answer], *, in_stream: bool | None = None) -> Order:
        """Choose the order of evaluations for these answers."""
        settings = {answer.settings for answer in answers}
        has_label = answers[0].prompt.label is not None
        has_grammar = any(answer.grammar is not None for answer in answers)
        return self.pace.order(settings, has_label=has_label, has_grammar=has_grammar, in_stream=in_stream)

    def _joined(self, answers: Sequence[Answer]) -> Order:
        """The order of evaluations that answers join: that of the running ones, if there are any."""
        owned = [answer for answer in self._answers if answer is not None]
        return self.order if self._is_running else self._choose(owned or answers)

    def _place(self, answers: Sequence[Answer], new: State | Stream) -> None:
        """Put answers whose prompts have been read into their lanes, except those dropped in the meantime."""
        lanes, owned = self._answers, [answer for answer in self._answers if answer is not None]
        capacity, slots = self._reader.lane_size(owned or answers)
        self.order = self._joined(answers)
        if self.state is None or not self._is_running:
            copies, read = jnp.zeros(len(lanes), jnp.int32), new.state if isinstance(new, Stream) else new
            # `_decode` ends the rows that belong to no answer.
            empty = fan_out(read, copies, read.keys[copies])
            is_stream = self.order is Order.STREAM
            self.state = stream_state.blank(empty, size=answers_room(answers)) if is_stream else empty
        new = self._reader.enter(new, answers, self.order)
        ring = max(capacity, stream_state.ring(self.state), stream_state.ring(new))
        state, entered = (stream_state.fit(one, ring=ring, slots=slots) for one in (self.state, new))
        places = [lanes.index(answer) if answer in lanes else len(lanes) for answer in answers]
        places += [len(lanes)] * (self._group - len(answers))  # beyond the last lane: dropped
        self.state, self._options = stream_state.put(state, entered, jnp.array(places)), None
        for answer, lane in zip(answers, places, strict=False):
            answer.is_read = True
            if self._paths is not None and answer.path is not None and answer.settings.budget > 1 and lane < len(lanes):
                self._paths.put(lane, answer.path, answer.settings)
