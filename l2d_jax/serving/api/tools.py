"""Calls of tools in replies of `/v1/chat/completions`: whole, and as the deltas of a stream."""

import secrets
import string
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from l2d_jax.data.tokenizer import require_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.tools.call_format import CallFormat, find_call_format
from l2d_jax.decoding.tools.call_reader import CallReader
from l2d_jax.decoding.tools.tool_use import ToolUse

ID_LENGTH = 9  # letters and digits of the id of a call: Mistral's templates accept no other ids


def format_of_calls(loaded: LoadedModel, use: ToolUse | None, response_format: Any) -> CallFormat | None:
    """How an answer with tools is read; None if it has no calls. With a `response_format`, calls begin an answer."""
    if use is None or not use.may_call:
        return None
    form = find_call_format(require_tokenizer(loaded.tokenizer), loaded.stop_ids)
    is_text = not isinstance(response_format, Mapping) or response_format.get("type") == "text"
    return form if is_text else replace(form, begins=True)


class CallMessage:
    """The message of one answer that may call tools, as far as it has arrived."""

    def __init__(self, form: CallFormat) -> None:
        self._reader, self._ids = CallReader(form), list[str]()

    @property
    def has_called(self) -> bool:
        """Whether the answer has calls, and all of them are complete."""
        return self._reader.is_complete

    def add(self, text: str, *, is_last: bool) -> dict[str, Any]:
        """Add text of the answer; returns the `delta` for it, in which one call may have several entries."""
        delta, calls = dict[str, Any](), list[dict[str, Any]]()
        for part in self._reader.add(text, is_last=is_last):
            if part.call is None:
                delta["content"] = delta.get("content", "") + part.text
            elif part.name is None:
                calls.append({"index": part.call, "function": {"arguments": part.text}})
            else:
                self._ids.append(_new_id())
                function = {"name": part.name, "arguments": part.text}
                calls.append({"index": part.call, "id": self._ids[-1], "type": "function", "function": function})
        return delta | ({"tool_calls": calls} if calls else {})

    def whole(self) -> dict[str, Any]:
        """The fields of the message after the last text; `content` is None if there is nothing but calls."""
        calls = [
            {"id": number, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for number, call in zip(self._ids, self._reader.calls, strict=True)
        ]
        text = self._reader.text
        return {"content": text or None, "tool_calls": calls} if calls else {"content": text}


def _new_id() -> str:
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(ID_LENGTH))
