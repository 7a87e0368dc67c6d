"""The prefix cache behind HTTP: usage and `/metrics` tell what it did."""

import re
from typing import Any

import httpx2 as httpx

from tests.support.served import serving, talking_base

QUESTION = "Tell me about the brown fox and the lazy dog, which it jumps over again and again and again and again."


def ask(url: str, messages: list[dict[str, str]], **options: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 16, "budget": 1, **options}
    reply: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    return reply


def figure(metrics: str, name: str) -> float:
    found = re.search(f"^{re.escape(name)} (.*)$", metrics, re.MULTILINE)
    assert found is not None, metrics
    return float(found[1])


def test_the_second_turn_of_a_chat_and_several_answers_read_little() -> None:
    first = [{"role": "user", "content": QUESTION}]
    with serving(talking_base(), cached=2**22) as url:
        reply = ask(url, first, n=2)
        [said, same] = [choice["message"]["content"] for choice in reply["choices"]]
        assert said == same
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}  # the second answer's do not count
        second = [*first, {"role": "assistant", "content": said}, {"role": "user", "content": "Why?"}]
        reply = ask(url, second)
        count, cached = reply["usage"]["prompt_tokens"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached >= count - 64
        metrics = httpx.get(f"{url}/metrics").text
        assert figure(metrics, 'l2d_prefix_cache_tokens_total{source="cache"}') > cached
        assert figure(metrics, 'l2d_prefix_cache_tokens_total{source="read"}') > 0
        assert figure(metrics, "l2d_prefix_cache_evictions_total") == 0
        assert 0 < figure(metrics, "l2d_prefix_cache_used_bytes") < figure(metrics, "l2d_prefix_cache_bytes") <= 2**22


def test_without_a_cache_nothing_is_counted() -> None:
    with serving(talking_base()) as url:
        reply = ask(url, [{"role": "user", "content": QUESTION}])
        assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert "prefix_cache" not in httpx.get(f"{url}/metrics").text
