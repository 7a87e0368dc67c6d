"""Compiles the programs of usual requests before a server is ready, by answering some of them."""

import itertools
import json
import queue
import time
from collections.abc import Iterator, Sequence
from typing import Any

from l2d_jax.decoding.batch.prompt_reader import PIECE
from l2d_jax.decoding.requests import Answer
from l2d_jax.errors import InputError
from l2d_jax.serving.api.protocol import Protocol
from l2d_jax.serving.engine import Engine
from l2d_jax.serving.front import Readiness
from l2d_jax.serving.models import Catalogue, ServedModel
from l2d_jax.serving.work import EndingError, FullError, Work

SHORT, LONG = 32, 2 * PIECE + 1  # tokens of prompts; a long one is read in pieces
OTHERS = (96, 192, 384)  # tokens of further prompts, one for each number of slots
TAILS = (48, 112, 144)  # numbers of tokens that follow a known beginning
LONGER = 512  # tokens of an answer that needs more room than usual ones
LAST = 4  # tokens after which no further program follows: one in each order of evaluations, and one more
OPTIONS = {"budget", "logprobs", "response_format"}
FORMAT: dict[str, Any] = {"type": "regex", "regex": f"[a-z]{{{2 * LAST}}}"}


def usual_requests(models: Catalogue, *, has_prefixes: bool = False) -> list[dict[str, Any]]:
    """The bodies of requests for completions that need the usual programs of all models.

    Of paths that share lanes, the first one stands for all. `has_prefixes`: whether there is a cache of prefixes.
    """
    firsts, tokens = {model.shared or model: model for model in reversed(models.models)}, itertools.count()
    return [body for model in reversed(firsts.values()) for body in _usual(model, tokens, has_prefixes=has_prefixes)]


def _usual(model: ServedModel, tokens: Iterator[int], *, has_prefixes: bool) -> list[dict[str, Any]]:
    """The bodies for one model, each of which fits the context.

    They are: answers with the default options, of the language model alone, and with the budget of each effort; with
    log-probabilities and with a grammar; to prompts of all usual lengths; and long answers. With a cache of prefixes,
    there are also prompts that begin as these and end differently. Prompts of each length are answered by the language
    model alone, too: the same program reads them where their answers join others that are evaluated one by one. Each
    prompt repeats one of the `tokens`.
    """
    defaults, context = model.loaded.defaults, model.limits.context
    budgets = {1, *model.limits.efforts.values()} - {defaults.budget} if defaults.budget > 1 else set()
    options: list[tuple[int, dict[str, Any]]]
    options = [(SHORT, each) for each in ({}, *({"budget": budget} for budget in sorted(budgets)), {"logprobs": 1})]
    options += [(SHORT, {"response_format": FORMAT}), *((length, {}) for length in OTHERS)]
    options += [(LONG, {}), (LONG, {"response_format": FORMAT}), (SHORT, {"max_tokens": LONGER})]
    vocab_size = model.loaded.model.llm.architecture.vocab_size
    if defaults.budget > 1:
        options += [(length, {"budget": 1}) for length in OTHERS]
    prompts = [([next(tokens) % vocab_size] * length, own) for length, own in options]
    if has_prefixes:
        known = {len(prompt): prompt for prompt, _ in prompts if len(prompt) > SHORT}
        new = next(tokens) % vocab_size
        prompts += [
            ([*prompt[:-tail], *[new] * tail], {}) for prompt in known.values() for tail in TAILS if tail < len(prompt)
        ]
    bodies = []
    for prompt, own in prompts:
        longest = {"max_tokens": min(defaults.max_new_tokens, context - len(prompt))} | own
        if 0 < longest["max_tokens"] <= context - len(prompt):
            bodies.append({"model": model.name, "prompt": [prompt], "seed": 0, **longest})
    return bodies


class WarmUp:
    """Answers requests, and forgets the answers."""

    def __init__(self, engine: Engine, protocol: Protocol, *, readiness: Readiness) -> None:
        self._engine, self._protocol, self._readiness = engine, protocol, readiness

    def run(self, bodies: Sequence[dict[str, Any]]) -> None:
        """Answer requests, as far as needed for their programs; then the server is ready. Ends early with the engine.

        First each is answered alone, and then those that differ in their lengths alone are answered together, so that
        lanes change their size. Requests that this model or this installation refuses are skipped. Raises what ends an
        answer.
        """
        plain = [body for body in bodies if not OPTIONS & {*body}]
        rounds = [*([body] for body in bodies), *([plain] if plain else [])]
        self._readiness.begin(len(rounds))
        try:
            for together in rounds:
                self._decode([one for body in together for one in self._read(body)])
                self._readiness.advance()
        except EndingError:
            return
        self._readiness.finish()

    def _read(self, body: dict[str, Any]) -> Sequence[tuple[Answer, ServedModel]]:
        try:
            asked = self._protocol.read(json.dumps(body).encode(), is_chat=False)
        except InputError:
            return ()
        return [(answer, asked.model) for answer in asked.answers]

    def _decode(self, answers: Sequence[tuple[Answer, ServedModel]]) -> None:
        """Decode the first tokens of some answers together."""
        pieces: queue.SimpleQueue[Any] = queue.SimpleQueue()
        works = {one.number: Work(one, pieces.put, model, is_rehearsal=True) for one, model in answers}
        waiting = {*works}
        for work in works.values():
            self._submit(work)
        try:
            while waiting:
                told = pieces.get()
                if isinstance(told, Exception):
                    raise told
                if told.is_last or len(works[told.answer].tokens) >= LAST:
                    waiting.discard(told.answer)
        finally:
            self._engine.cancel([*works.values()])

    def _submit(self, work: Work) -> None:
        while True:
            try:
                self._engine.submit([work])
            except EndingError:
                raise
            except FullError:  # clients fill the queue
                time.sleep(1)
            else:
                return
