"""Loads a server: `python -m tests.serving.load URL PID 200` asks 200 built-in problems of it, 32 at a time.

Budgets, lengths and temperatures are mixed. It prints the time, the speed, the memory of process PID before and after,
and how many of every tenth request say the same when they are sent once more, alone.
"""

import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2 as httpx

from l2d_jax.data.word_problems import conversations

AT_A_TIME = 32


def main(url: str, pid: str, count: int) -> None:
    rows, rng = conversations(count, split="test"), random.Random(0)
    options = [
        {"budget": rng.choice([1, 3, 7, 15]), "max_tokens": rng.choice([8, 16, 32, 64]), "seed": number}
        | {"temperature": rng.choice([0.0, 0.7])}
        for number in range(count)
    ]

    def ask(number: int) -> tuple[str, dict[str, int], float]:
        body: dict[str, Any] = {"messages": rows[number]["messages"][:1], **options[number]}
        began = time.monotonic()
        reply = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=3600).raise_for_status().json()
        return reply["choices"][0]["message"]["content"], reply["usage"], time.monotonic() - began

    def memory() -> float:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        list(pool.map(ask, range(AT_A_TIME)))  # compiles what it needs
        before, began = memory(), time.monotonic()
        answers = list(pool.map(ask, range(count)))
    seconds, waits = time.monotonic() - began, sorted(wait for *_, wait in answers)
    tokens, evaluations = (sum(usage[name] for _, usage, _ in answers) for name in ("completion_tokens", "evaluations"))
    print(f"{count} requests in {seconds:.0f} s")
    print(f"{tokens / seconds:.1f} tokens/s, {evaluations / seconds:.0f} evaluations/s")
    print(f"waits: median {waits[count // 2]:.1f} s, 95 % below {waits[int(0.95 * count)]:.1f} s")
    print(f"memory: {before:.0f} MiB before, {memory():.0f} MiB after")
    again = range(0, count, 10)
    print(f"alone: {sum(ask(number)[0] == answers[number][0] for number in again)} of {len(again)} say the same")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
