"""beartype's checks, made when a function is first called: to make them all takes longer than most tests."""

import functools
from collections.abc import Callable
from typing import Any

from beartype import beartype


def check_when_called(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with beartype's check of each call."""
    made: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def checked(*arguments: Any, **options: Any) -> Any:
        if not made:
            made.append(beartype(function))
        return made[0](*arguments, **options)

    return checked
