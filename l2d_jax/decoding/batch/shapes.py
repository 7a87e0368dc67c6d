"""The sizes and options of running answers for which lanes need programs of their own."""

from collections.abc import Iterable
from typing import NamedTuple

from l2d_jax.decoding.buckets import lane_bucket, prompt_bucket
from l2d_jax.decoding.refinement.stages import SIZES, room_for
from l2d_jax.decoding.requests import Answer


class Shape(NamedTuple):
    """What programs depend on besides the kind of the answers. Together, answers have the largest of each field."""

    slots: int  # for the prompt
    ring: int  # slots for the answer
    room: int  # for evaluations of a token, side by side
    has_grammar: bool
    has_penalties: bool
    is_scored: bool

    @classmethod
    def of(cls, answer: Answer) -> "Shape":
        """The shape in which the prompt of an answer is read."""
        settings = answer.settings
        sizes = prompt_bucket(len(answer.prompt.ids)), lane_bucket(settings.max_new_tokens)
        options = answer.grammar is not None, answer.restrictions.has_penalties, answer.is_scored
        return cls(*sizes, room_for(min(settings.budget, SIZES[-1])), *options)

    @classmethod
    def together(cls, shapes: Iterable["Shape"]) -> "Shape":
        """The shape of answers that share lanes."""
        slots, *others = map(max, zip(*shapes, strict=True))
        return cls(lane_bucket(slots), *others)
