"""Replies of OpenAI's Responses API: the objects and events that stand for a chat's reply and its chunks.

A stream opens with `response.created`. Each item of the output is added, grows by deltas, and is done before the next
one. The last event has the whole response, which equals the reply without a stream.
"""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from l2d_jax.config.schema import DecodeConfig

CODES = {429: "rate_limit_exceeded", 400: "invalid_prompt"}  # OpenAI's codes of failures; others: server_error


class ResponseReply:
    """The reply to one request, as one object or as events."""

    def __init__(self, settings: DecodeConfig, repeated: Mapping[str, Any], *, name: str) -> None:
        """`settings` are those of the answer; `repeated`: fields of the request; `name`: the model's."""
        self._key, self._count = secrets.token_hex(12), 0
        self._head = {
            "id": f"resp_{self._key}",
            "object": "response",
            "created_at": int(time.time()),
            "model": name,
            "background": False,
            "error": None,
            "incomplete_details": None,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "max_output_tokens": settings.max_new_tokens,
            **repeated,
        }
        self._items: list[dict[str, Any]] = []  # items of a stream so far
        self._calls: set[int] = set()  # numbers of the function calls among these
        self._is_open = False  # whether the last of them may grow
        self._log_probs: list[Any] = []  # those of tokens whose text is still to come

    def whole(self, chat: Mapping[str, Any]) -> dict[str, Any]:
        """The reply as one object, from that of a chat."""
        [choice] = chat["choices"]
        message, is_cut = choice["message"], choice["finish_reason"] == "length"
        calls = message.get("tool_calls") or []
        items = []
        if message.get("content") or not calls:
            part = _part(message.get("content") or "", _log_probs(choice), choice)
            items.append({**self._message(0), "content": [part]})
        for call in calls:
            items.append(self._call(len(items), call["id"], call["function"]["name"]))
            items[-1]["arguments"] = call["function"]["arguments"]
        for item in items:
            item["status"] = "completed"
        items[-1]["status"] = "incomplete" if is_cut else "completed"
        reply = self._response("incomplete" if is_cut else "completed", items)
        if is_cut:
            reply["incomplete_details"] = {"reason": "max_output_tokens"}
        else:
            reply["completed_at"] = int(time.time())
        traced = {"trace": choice["trace"]} if "trace" in choice else {}
        return reply | {"usage": _usage(chat["usage"])} | traced

    def opening(self) -> list[dict[str, Any]]:
        """The first events of a stream."""
        names = ("created", "in_progress")
        return [self._event(f"response.{name}", response=self._response("in_progress", [])) for name in names]

    def add(self, chunk: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The events for a chunk of a chat's stream."""
        events = []
        for choice in chunk["choices"]:
            delta = choice["delta"]
            self._log_probs += _log_probs(choice)
            if delta.get("content"):
                events += [] if self._is_open else self._open(self._message(len(self._items)))
                events += self._grow_text(delta["content"])
            for call in delta.get("tool_calls") or []:
                function = call.get("function", {})
                if call["index"] not in self._calls:
                    self._calls.add(call["index"])
                    events += self._close()
                    events += self._open(self._call(len(self._items), call["id"], function["name"]))
                events += self._grow_arguments(function.get("arguments") or "")
        return events

    def closing(self, chat: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The last events of a stream, from the chat's reply as one object."""
        events = [] if self._items else self._open(self._message(0))
        if self._log_probs and self._items[-1]["type"] == "message":
            events += self._grow_text("")
        if "l2d_choices" in chat["choices"][0]:
            self._items[-1]["content"][0]["l2d_choices"] = chat["choices"][0]["l2d_choices"]
        reply = self.whole(chat)
        events += self._close(reply["status"])
        return [*events, self._event(f"response.{reply['status']}", response=reply | {"output": self._items})]

    def failure(self, told: Mapping[str, Any]) -> dict[str, Any]:
        """The last event of a stream that fails; `told` is OpenAI's error object."""
        error = told["error"]
        reply = self._response("failed", self._items)
        reply["error"] = {"code": CODES.get(error["code"], "server_error"), "message": error["message"]}
        return self._event("response.failed", response=reply)

    def _response(self, status: str, items: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {**self._head, "status": status, "output": [*items], "usage": None}

    def _message(self, place: int) -> dict[str, Any]:
        begun = {"id": f"msg_{self._key}_{place}", "type": "message", "status": "in_progress", "role": "assistant"}
        return begun | {"content": []}

    def _call(self, place: int, number: str, name: str) -> dict[str, Any]:
        begun = {"id": f"fc_{self._key}_{place}", "type": "function_call", "status": "in_progress"}
        return begun | {"call_id": number, "name": name, "arguments": ""}

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._count += 1
        return {"type": kind, "sequence_number": self._count - 1, **fields}

    def _on_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        """An event about the last item, or about its only part."""
        place = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        part = {"content_index": 0} if self._items[-1]["type"] == "message" else {}
        return self._event(f"response.{kind}", **place, **part, **fields)

    def _about_item(self, kind: str) -> dict[str, Any]:
        """An event that has a copy of the last item."""
        return self._event(f"response.output_item.{kind}", output_index=len(self._items) - 1, item={**self._items[-1]})

    def _open(self, item: dict[str, Any]) -> list[dict[str, Any]]:
        self._items.append(item)
        self._is_open = True
        events = [self._about_item("added")]
        if item["type"] == "message":
            events.append(self._on_item("content_part.added", part=_part("", [], {})))
            item["content"] = [_part("", [], {})]
        return events

    def _grow_text(self, text: str) -> list[dict[str, Any]]:
        part, log_probs = self._items[-1]["content"][0], self._log_probs
        part["text"] += text
        part["logprobs"] += log_probs
        self._log_probs = []
        return [self._on_item("output_text.delta", delta=text, logprobs=log_probs)]

    def _grow_arguments(self, text: str) -> list[dict[str, Any]]:
        self._items[-1]["arguments"] += text
        return [self._on_item("function_call_arguments.delta", delta=text)] if text else []

    def _close(self, status: str = "completed") -> list[dict[str, Any]]:
        """Complete the last item, if it is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self._items[-1]
        item["status"] = status
        if item["type"] == "message":
            [part] = item["content"]
            text = {"text": part["text"], "logprobs": part["logprobs"]}
            events = [self._on_item("output_text.done", **text), self._on_item("content_part.done", part=part)]
        else:
            told = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._on_item("function_call_arguments.done", **told)]
        return [*events, self._about_item("done")]


def _part(text: str, log_probs: Sequence[Any], choice: Mapping[str, Any]) -> dict[str, Any]:
    ranked = {"l2d_choices": choice["l2d_choices"]} if "l2d_choices" in choice else {}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": [*log_probs], **ranked}


def _log_probs(choice: Mapping[str, Any]) -> list[Any]:
    return (choice.get("logprobs") or {}).get("content") or []


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Usage by the names of the Responses API; the server's own counts keep theirs."""
    cached = usage.get("prompt_tokens_details", {}).get("cached_tokens", 0)
    thoughts = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thoughts},
        "total_tokens": usage["total_tokens"],
        "evaluations": usage["evaluations"],
        "passes": usage["passes"],
    }
