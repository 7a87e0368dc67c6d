"""Which lanes of a batch have an answer."""

from l2d_jax.decoding.requests import Answer


class Places:
    """The lanes of a batch, each of which has an answer or none."""

    def __init__(self, lanes: int) -> None:
        """Make free lanes."""
        self._answers: list[Answer | None] = [None] * lanes

    @property
    def free(self) -> int:
        """The number of lanes without an answer."""
        return self._answers.count(None)

    @property
    def is_idle(self) -> bool:
        """Whether no lane has an answer."""
        return self.free == len(self._answers)
