"""The lanes of one kind of answers, and the works in them."""

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.batch.prompt_reader import Service
from l2d_jax.decoding.batch.shapes import Shape
from l2d_jax.decoding.requests import Piece, Request
from l2d_jax.decoding.trace import trace
from l2d_jax.errors import contained
from l2d_jax.serving.turns import Worker
from l2d_jax.serving.work import Kind, Work, tell


class Group:
    """The lanes of one kind, which take turns with the others; and the works that have a lane or get one next.

    All of it runs in one worker, except `add` and what it reads.
    """

    def __init__(self, kind: Kind, *, lanes: int, spent: int, worker: Worker, service: Service) -> None:
        """Make a group without works, whose lanes are opened at its first step."""
        self.kind, self.worker = kind, worker
        self.spent = spent  # passes over the weights that it has cost so far
        self.works: dict[int, Work] = {}  # keys: numbers of answers
        self.is_proven = False  # whether it has decoded tokens
        self._size, self._service = lanes, service
        self._lanes: Lanes | None = None
        self._joining: list[Work] = []
        self._ring = 0  # slots for the longest answer so far: the lanes keep them

    @property
    def free(self) -> int:
        """The number of lanes without a work."""
        return self._size - len(self.works)

    def add(self, work: Work) -> None:
        """Give a work a lane, from the next step on."""
        self.works[work.answer.number], work.began = work, time.monotonic()
        self._joining.append(work)

    def shape_of(self, works: Iterable[Work]) -> Shape:
        """The shape that these works have in the lanes of this group."""
        shape = Shape.together(Shape.of(work.answer) for work in works)
        return shape._replace(ring=max(shape.ring, self._ring))

    def step(self) -> tuple[list[Shape], Shape | None]:
        """Decode the next tokens, and report them. An error of a program is reported to all works of the group.

        Returns the shapes of the works whose prompts have been read, and the shape in which tokens were decoded.
        """
        try:
            pieces = self._decode()
        except BaseException as error:
            self.fail(contained(error))
            return [], None
        read = [work for work in self.works.values() if work.answer.is_read]
        shape = self.shape_of(read) if read else None
        self._ring, self.is_proven = (self._ring if shape is None else shape.ring), self.is_proven or bool(read)
        for piece in pieces:
            work = self.works[piece.answer]
            work.tokens += piece.tokens
            if piece.is_last:
                self._leave(work)
            self._report(work, piece)
        return [Shape.of(work.answer) for work in read], shape

    def fail(self, error: Exception) -> None:
        """Report an error to all works; drop the lanes and all prefixes, whose values may be lost."""
        if self._service.prefixes is not None:
            self._service.prefixes.clear()
        works, self.works, self._joining, self._lanes = [*self.works.values()], {}, [], None
        for work in works:
            tell(work, error)

    def _decode(self) -> list[Piece]:
        if self._lanes is None:
            options: dict[str, Any] = {"refines": self.kind.refines, "service": self._service}
            self._lanes = self.kind.lane_model.open(lanes=self._size, **options)
        for work in [*self.works.values()]:
            if work.is_cancelled:
                self._leave(work)
        joining, self._joining = self._joining, []
        for work in joining:
            _fit(work, self.kind)
        self._lanes.admit([work.answer for work in joining])
        pieces = self._lanes.step(is_rehearsal=any(work.is_rehearsal for work in self.works.values()))
        self.spent += self._lanes.cost
        return pieces

    def _report(self, work: Work, piece: Piece) -> None:
        """Report a piece; before the last piece, also the trace."""
        if piece.error is not None:
            tell(work, piece.error)
            return
        if piece.is_last and work.is_traced and piece.ending != "broken" and not work.is_cancelled:
            request = Request([work.answer.prompt], work.answer.settings, work.answer.seed)
            try:
                scorer = work.model.scorer(work.answer.settings)
                [traced] = trace(scorer, request, [work.tokens], counts_passes=False)
            except BaseException as error:
                tell(work, contained(error))
                return
            tell(work, traced)
        tell(work, piece)

    def _leave(self, work: Work) -> None:
        if self._lanes is not None:
            self._lanes.drop(work.answer)
        self._joining = [other for other in self._joining if other is not work]
        self.works.pop(work.answer.number, None)


def _fit(work: Work, kind: Kind) -> None:
    """Give an answer what lanes of its kind need: its path, and at a budget of 1 their options, which do not matter."""
    answer = work.answer
    if kind.lane_model.are_mixed:
        answer.path = work.model.loaded.model.path or kind.lane_model.of.loaded.model.path
    if answer.settings.budget == 1:
        options: Any = {"solver": kind.solver, "velocity": kind.velocity, "parallel": kind.parallel}
        answer.settings = replace(answer.settings, draws=kind.samples, **options)
