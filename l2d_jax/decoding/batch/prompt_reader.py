"""Reads the prompts of answers, each distinct one once: at once or in pieces, into a state or a stream.

With a cache of prefixes, the longest known beginning of a prompt is copied, and only what follows is read.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from l2d_jax.decoding.batch.lane_options import LaneOptions
from l2d_jax.decoding.batch.prefill import prefill, read_piece, read_prefix, start
from l2d_jax.decoding.batch.prefix_cache import BLOCK, PrefixCache
from l2d_jax.decoding.buckets import answer_slots, lane_bucket, pad, prompt_bucket, round_up
from l2d_jax.decoding.parallel.begin import enter, read_and_enter
from l2d_jax.decoding.parallel.pace import Order, room
from l2d_jax.decoding.parallel.stream_state import Stream
from l2d_jax.decoding.requests import Answer, Request
from l2d_jax.decoding.sampler import answer_keys
from l2d_jax.decoding.state import State, fan_out
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model

PIECE = 256  # prompts with more than twice this number of tokens are read in pieces of this size
FIXED = (32, 64, 128)  # sizes of the last piece of a prompt for deterministic answers
WHOLE = FIXED[-1]  # size of all its other pieces
AFTER_PREFIX = (64, 128, PIECE)  # sizes of a piece after a prefix from the cache; few, for few programs


class Service(NamedTuple):
    """How lanes work in a server, where requests arrive one at a time and prompts are read one by one."""

    are_mixed: bool = False  # whether each answer names its path (`Answer.path`), of the config of the model's path
    prefixes: PrefixCache | None = None  # cache of the beginnings of prompts
    reader: Hashable = None  # tells the model that reads the context apart in the cache
    # Number of slots of a lane, a multiple of `WHOLE`, for deterministic answers: then no program depends on other
    # answers, if all that run at a time have the same `lane_options.program_key`. None: as many slots as the answers
    # need, and the order of evaluations that is fastest.
    context: int | None = None


NO_SERVICE = Service()  # of lanes that belong to a single request


class PromptReader:
    """Reads prompts for lanes, into a state or a stream with a row for each answer."""

    def __init__(
        self,
        model: Model,
        maker: LaneOptions,
        *,
        known: Request | None,
        service: Service = NO_SERVICE,
    ) -> None:
        """`known` is the request that all answers belong to, if there is only one."""
        assert known is None or service == NO_SERVICE
        assert service.context is None or service.context % WHOLE == 0
        self._model, self._maker = model, maker
        self._prefixes, self._name, self._context = service.prefixes, service.reader, service.context
        # answers per prompt, which share its reading; the length of the common prefix
        self._copies, self._shorter = (1, 0) if known is None else (known.samples, known.prefix)
        self._capacity: int | None = None  # slots for the longest answer; None: a bucket for the running answers
        self._prefix: KVCache | None = None
        if known is not None:
            settings = {prompt.settings or known.settings for prompt in known.prompts}
            self._capacity = answer_slots(max(one.max_new_tokens for one in settings))
        if known is not None and known.prefix:
            self._prefix = read_prefix(model.llm, jnp.array(known.prompts[0].ids[: known.prefix], jnp.int32))

    def size(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """The numbers of slots for the longest of these answers, and for the longest of their prompts."""
        if self._context is not None:
            return self._context, 0
        longest = max(len(answer.prompt.ids) for answer in answers)
        if self._capacity is not None:
            return self._capacity, round_up(longest - self._shorter)
        return lane_bucket(max(answer.settings.max_new_tokens for answer in answers)), prompt_bucket(longest)

    def lane_size(self, answers: Sequence[Answer]) -> tuple[int, int]:
        """The same numbers for answers that share lanes: where requests arrive one at a time, there are fewer."""
        ring, slots = self.size(answers)
        return ring, slots if self._capacity is not None or self._context is not None else lane_bucket(slots)

    def read(
        self, answers: Sequence[Answer], *, order: Callable[[], Order], piece: int | None = None
    ) -> Iterator[State | Stream | None]:
        """Read prompts: yields None after each piece of long prompts, and finally what comes after them.

        If the answers join a stream, by their `order` when they are read, their first tokens begin in the same pass,
        except those of prompts that are read in pieces, or that several answers share.
        """
        llm = self._model.llm
        capacity, slots = (None, self._context) if self._context else self.size(answers)
        prompts, rows = [answer.prompt for answer in answers], list(range(len(answers)))
        if self._copies > 1:  # read each prompt once
            prompts = list({id(prompt): prompt for prompt in prompts}.values())
            rows = [next(i for i, prompt in enumerate(prompts) if prompt is answer.prompt) for answer in answers]
            whole = -(-len(answers) // self._copies) + (piece is not None)  # the same number each time
            prompts += prompts[-1:] * (whole - len(prompts))
        whole = len(prompts)
        texts = [prompt.ids[self._shorter :] for prompt in prompts]
        ids, lengths = pad(texts, length=slots)
        keys = _keys(answers)
        given = keys if self._copies == 1 else keys[jnp.array([0] * whole)]
        shared: dict[str, Any] = {"capacity": capacity, "prefix": self._prefix}
        state: State | Stream
        places = [] if self._prefixes is None else self._prefixes.find(self._name, prompts[0].ids[:-1])
        pieces = self._pieces(max(map(len, texts)), known=len(places) * BLOCK, slots=slots, piece=piece)
        begin = pieces[0][0] if pieces else 0
        if self._prefixes is not None:
            answers[0].cached = begin
            self._prefixes.count(found=begin, read=len(texts[0]) - begin)
        if pieces:
            hidden = jnp.zeros((whole, llm.architecture.hidden_size), llm.dtype)
            read = KVCache.empty(llm.architecture, whole, slots, dtype=llm.dtype, prefix=self._prefix)
            if begin and self._prefixes is not None:
                read = self._prefixes.load(places, tokens=begin, slots=slots)
            for first, size in pieces:
                part, _ = pad([text[first : first + size] for text in texts], length=size)
                read, hidden = read_piece(llm, read, hidden, part, lengths)
                if (first, size) != pieces[-1]:
                    yield None
            state = start(llm, replace(read, prefix=None), hidden, ids, lengths, given, **shared)
        elif self._copies == 1 and order() is Order.STREAM:
            state = read_and_enter(self._model_of(answers), ids, lengths, given, **shared, **self._beginning(answers))
        else:
            state = prefill(llm, ids, lengths, given, **shared)
        self.keep(answers[0], state, row=0)
        yield state if self._copies == 1 else fan_out(state, jnp.array(rows), keys)

    def keep(self, answer: Answer, state: State | Stream, *, row: int) -> None:
        """Keep what a row has read of an answer for later prompts: its prompt, and its tokens except the last one."""
        if self._prefixes is not None:
            cache = state.state.cache if isinstance(state, Stream) else state.cache
            ids = [*answer.prompt.ids, *answer.said[:-1]]
            if self._context is not None:  # only what the program of whole pieces has read
                ids = ids[: len(answer.prompt.ids) // WHOLE * WHOLE]
            self._prefixes.keep(self._name, ids, cache, row=row)

    def _pieces(self, length: int, *, known: int, slots: int, piece: int | None) -> list[tuple[int, int]]:
        """The pieces of prompts to read, of which `known` tokens are in the cache: first token and size of each.

        There are none if the prompts are read at once; `length` is the number of tokens of the longest.
        """
        if self._context is not None:
            last = (length - 1) // WHOLE * WHOLE
            size = next(size for size in FIXED if size >= length - last)
            whole = range(min(known // WHOLE * WHOLE, last), last, WHOLE)
            return [*((first, WHOLE) for first in whole), (last, size)]
        size = next((size for size in AFTER_PREFIX if size >= length - known), PIECE)
        begin = min(known, slots - -(-(length - known) // size) * size)  # all pieces must fit into the slots
        if begin > 0:
            return [(first, size) for first in range(begin, length, size)]
        return [] if piece is None or slots <= 2 * piece else [(first, piece) for first in range(0, length, piece)]

    def enter(self, state: State | Stream, answers: Sequence[Answer], order: Order) -> State | Stream:
        """Turn what comes after the prompts into what the order needs; extra rows repeat the last answer."""
        if order is not Order.STREAM:
            return state.state if isinstance(state, Stream) else state
        if isinstance(state, Stream):
            return state
        rows = [*answers, *[answers[-1]] * (len(state.count) - len(answers))]
        return enter(self._model_of(answers), state, **self._beginning(rows))

    def _model_of(self, answers: Sequence[Answer]) -> Model:
        """The model that refines these answers, all of which have the same path."""
        path = answers[0].path
        return self._model if path is None else replace(self._model, path=path, table=None, updating=None)

    def _beginning(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """How a stream begins the first token of these answers."""
        options = self._maker.make(answers, Order.STREAM, tabulates=False)
        return {"settings": options.settings, "sampling": options.sampling, "size": answers_room(answers)}


def answers_room(answers: Sequence[Answer]) -> int:
    """The number of evaluations of a token that a program for these answers has room for."""
    return room({answer.settings for answer in answers if answer.settings.budget > 1} or {answers[0].settings})


def _keys(answers: Sequence[Answer]) -> Any:
    numbers = [(answer.seed, answer.prompt.number, answer.copy) for answer in answers]
    seeds, *others = map(np.array, zip(*numbers, strict=True))
    return answer_keys(seeds.astype(np.uint32), *(column.astype(np.int32) for column in others))
