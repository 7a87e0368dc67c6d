"""What clients ask of the engine: answers of some kind, and other work in pieces; and why it may be refused."""

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from l2d_jax.decoding.requests import Answer, Piece
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.errors import contained
from l2d_jax.serving.models import LaneModel, ServedModel

PATIENCE = 5  # seconds after which a client may retry if the server is starting or ending


class FullError(Exception):
    """The queue is full; it will have space again in about `seconds`."""

    def __init__(self, seconds: int, *, problem: str = "the queue is full") -> None:
        super().__init__(f"{problem}: ask again in {seconds} s")
        self.seconds = seconds


class EndingError(FullError):
    """The engine takes no more work."""

    def __init__(self) -> None:
        super().__init__(PATIENCE, problem="this server is ending")


class StartingError(FullError):
    """The model is not loaded yet."""

    def __init__(self) -> None:
        super().__init__(PATIENCE, problem="this server is starting")


class Kind(NamedTuple):
    """The properties that answers must share to be decoded together."""

    lane_model: LaneModel
    solver: str
    velocity: str
    parallel: str
    samples: int  # bucket of the number of noise samples
    has_label: bool
    refines: bool  # whether the path itself reads the context
    is_long: bool  # whether a token takes many evaluations
    program: Hashable = None  # what else selects a program, if answers are deterministic

    @property
    def programs(self) -> Hashable:
        """What the programs of this kind depend on."""
        return self.lane_model.programs, *self[1:]


@dataclass(eq=False)
class Work:
    """A requested answer, and the callback that gets its pieces."""

    answer: Answer
    tell: Callable[[Piece | list[TokenTrace] | Exception], None]  # the trace comes before the last piece
    model: ServedModel
    is_traced: bool = False
    is_rehearsal: bool = False  # whether it is decoded for its programs, in all orders of evaluations
    is_cancelled: bool = False
    tokens: list[int] = field(default_factory=list)
    began: float = 0.0  # time at which it got its lane


@dataclass(eq=False)
class PieceWork:
    """Other work with the model. Its pieces take turns with the kinds of answers."""

    pieces: Iterator[int]  # does a piece per step; yields its approximate cost, in passes over the weights
    tell: Callable[[Exception | None], None]  # called at its end
    is_cancelled: bool = False


def tell(work: Work, told: Piece | list[TokenTrace] | Exception) -> None:
    """Call a client's callback; if that fails, the client has left."""
    try:
        work.tell(told)
    except BaseException as error:
        contained(error)
        work.is_cancelled = True
