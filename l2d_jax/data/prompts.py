"""The forms of a prompt: text, a conversation, or token ids."""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from l2d_jax.data.messages import Message

OnePrompt: TypeAlias = str | Sequence[Message] | Sequence[int]


def has_text(prompt: Any) -> bool:
    """Whether a prompt is text or a conversation, rather than token ids."""
    return isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Mapping))


def as_list(values: Any) -> tuple[Sequence[Any], bool]:
    """One prompt or several as a list, and whether it was one."""
    is_list = hasattr(values, "__len__") and not has_text(values)
    is_single = not is_list or (len(values) > 0 and isinstance(values[0], Integral))
    return ([values] if is_single else values), is_single
