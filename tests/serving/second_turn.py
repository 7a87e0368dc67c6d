"""How long the second turn of a chat waits for its first token: `python -m tests.serving.second_turn [TOKENS]`.

The model has 90 million random parameters in float32, and answers with a budget of 1 in eight lanes. Another chat of
the same length comes first, so that all programs are compiled.
"""

import json
import statistics
import sys
import time
from typing import Any

import httpx2 as httpx

from tests.support.served import serving, talking_model

SIZES = {"hidden_size": 768, "intermediate_size": 2560, "num_hidden_layers": 12, "max_position_embeddings": 4096}
SIZES |= {"num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64}
CACHED = 2**30  # bytes
TURNS = 3  # chats that are timed


def ask(url: str, messages: list[dict[str, str]], **options: Any) -> tuple[float, str, dict[str, Any]]:
    """The seconds to the first token, the answer, and its usage."""
    body = {"messages": messages, "stream": True, "stream_options": {"include_usage": True}, "seed": 0, **options}
    text, first, usage = "", None, {}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                first = first or time.perf_counter() - began
                text += "".join(choice["delta"].get("content", "") for choice in chunk["choices"])
                usage = chunk.get("usage") or usage
    assert first is not None
    return first, text, usage


def chat(url: str, name: str, tokens: int, **options: Any) -> list[tuple[float, dict[str, Any]]]:
    """Two turns of a chat, whose first question has about `tokens` tokens."""
    question = (f"{name}: " + "the quick brown fox jumps over the lazy dog. " * tokens)[:tokens]
    messages = [{"role": "user", "content": question}]
    first, answer, usage = ask(url, messages, **options)
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "And what does the dog do?"}]
    second, _, later = ask(url, messages, **options)
    return [(first, usage), (second, later)]


def main() -> None:
    """Print the seconds of both turns, with the cache and without it."""
    tokens = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    loaded = talking_model(sizes=SIZES)
    for cached in (CACHED, 0):
        with serving(loaded, cached=cached, lanes=8, context=2 * tokens) as url:
            options = {"max_tokens": 16, "budget": 1}
            chat(url, "compile", tokens, **options)
            turns = [chat(url, f"chat {number}", tokens, **options) for number in range(TURNS)]
        for number, name in enumerate(("first", "second")):
            seconds = [turn[number][0] for turn in turns]
            details = turns[0][number][1]
            prompt, found = details["prompt_tokens"], details["prompt_tokens_details"]["cached_tokens"]
            known = f"{prompt} tokens, {found} of them from a cache of {cached >> 20} MiB"
            spread = ", ".join(f"{one:.2f}" for one in sorted(seconds))
            print(f"{name} turn: {known}: first token after {statistics.median(seconds):.2f} s ({spread})", flush=True)


if __name__ == "__main__":
    main()
