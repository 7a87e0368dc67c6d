"""The exceptions that programs print as one line: for what a user can fix, and for what has stopped a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LONGEST_LINE = 300  # characters of a message
LONGEST_SHOWN = 80  # characters of a value in it


class InputError(ValueError):
    """Raised for input that the user can correct. The message is one line: the rule, the value and the remedy.

    It is a `ValueError`. A program that ends with it has exit status 2.
    """

    def __init__(self, message: str) -> None:
        """Of a message that is too long, the ends are kept."""
        super().__init__(shorten(message, LONGEST_LINE))


class SharedError(InputError):
    """Bad input that all processes know about, so that they end together."""


class RunError(RuntimeError):
    """Raised when a run cannot go on, or when something was lost. The message is one line.

    It is a `RuntimeError`. A program that ends with it has exit status 1.
    """

    def __init__(self, message: str) -> None:
        """Of a message that is too long, the ends are kept."""
        super().__init__(shorten(message, LONGEST_LINE))


def contained(error: BaseException) -> Exception:
    """An error that ends one piece of work alone; raises what ends the program. Panics of Rust are no `Exception`."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        raise error
    return (
        error if isinstance(error, Exception) else RunError(shorten(f"{type(error).__name__}: {error}", LONGEST_LINE))
    )


def require(condition: bool, message: str) -> None:  # noqa: FBT001 (like the condition of an assert)
    """Raise `InputError(message)` unless `condition` holds."""
    if not condition:
        raise InputError(message)


@contextmanager
def about(subject: object) -> Iterator[None]:
    """Within, an `InputError` begins with what it is about, such as a file, unless it names that.

    A long path is shortened, before the message is.
    """
    try:
        yield
    except InputError as error:
        if str(subject) in str(error):
            raise
        room = max(30, LONGEST_LINE - len(f"error: : {error}"))
        raise InputError(f"{shorten(str(subject), room)}: {error}") from error


def shown(value: Any) -> str:
    """A value as an error message shows it: its middle is left out if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError) as error:  # Python writes no number of over 4300 digits
        text = f"a {type(value).__name__} that cannot be written ({error})"
    return shorten(text, LONGEST_SHOWN)


def shorten(text: str, length: int) -> str:
    """The text, or its ends with dots between them if it is longer."""
    part = (length - 5) // 2
    return text if len(text) <= length else f"{text[: length - 5 - part]} ... {text[-part:]}"


def first_line(error: BaseException) -> str:
    """The first line of the message of an error's cause, or of the error if it has none."""
    cause = error.__cause__ or error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
