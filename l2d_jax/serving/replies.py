"""OpenAI's replies: pieces of answers as chunks of a stream, or gathered into one object."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.decoding.requests import Piece, TokenScore
from l2d_jax.decoding.stop_strings import GrowingText
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.serving.protocol import Asked, ChatBody


@dataclass
class Choice:
    """One answer of a reply, and how far it has come."""

    index: int
    text: GrowingText
    scores: list[TokenScore] = field(default_factory=list)
    ending: str = ""
    evaluations: int = 0
    is_opened: bool = False  # whether a stream has begun to tell of it


class Reply:
    """The reply to one request."""

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerFast, *, name: str) -> None:
        self._asked, self._tokenizer, self._is_chat = asked, tokenizer, isinstance(asked.body, ChatBody)
        number = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": number, "created": int(time.time()), "model": name}
        self._choices = {one.number: Choice(i, GrowingText(tokenizer)) for i, one in enumerate(asked.answers)}
        self.trace: Sequence[TokenTrace] | None = None  # of a single answer, before its last piece

    def add(self, piece: Piece) -> dict[str, Any]:
        """Take in a piece; the chunk of a stream that tells of it."""
        choice = self._choices[piece.answer]
        role = {} if choice.is_opened else {"role": "assistant"}
        text = choice.text.add(piece.tokens, is_last=piece.is_last, rest=piece.rest)
        choice.scores += piece.scores
        choice.evaluations += piece.evaluations
        choice.ending, choice.is_opened = piece.ending, True
        content = {"delta": role | {"content": text}} if self._is_chat else {"text": text}
        return self._object([self._shown(choice, piece.tokens, piece.scores, content)], chunk=True)

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(choice.ending for choice in self._choices.values())

    def whole(self) -> dict[str, Any]:
        """The reply as one object, once all answers have ended."""
        shown = []
        for choice in self._choices.values():
            message = {"role": "assistant", "content": choice.text.shown, "refusal": None}
            content = {"message": message} if self._is_chat else {"text": choice.text.shown}
            shown.append(self._shown(choice, choice.text.ids, choice.scores, content))
        return self._object(shown) | {"usage": self.usage()}

    def usage(self) -> dict[str, int]:
        """Tokens, and evaluations of the path."""
        new = sum(len(choice.text.ids) for choice in self._choices.values())
        counts = {"prompt_tokens": self._asked.prompt_tokens, "completion_tokens": new}
        evaluations = sum(choice.evaluations for choice in self._choices.values())
        return counts | {"total_tokens": self._asked.prompt_tokens + new, "evaluations": evaluations}

    def last_chunk(self) -> dict[str, Any]:
        """What a stream ends with where usage is asked for."""
        return self._object([], chunk=True) | {"usage": self.usage()}

    def _object(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {**self._head, "object": kind, "choices": choices}

    def _shown(
        self, choice: Choice, tokens: Sequence[int], scores: Sequence[TokenScore], content: dict[str, Any]
    ) -> dict[str, Any]:
        log_probs = None if self._asked.alternatives is None else self._scores(tokens, scores)
        shown = {"index": choice.index, "finish_reason": choice.ending or None, "logprobs": log_probs} | content
        return shown if self.trace is None else shown | {"trace": self._traced(self.trace)}

    def _scores(self, tokens: Sequence[int], scores: Sequence[TokenScore]) -> dict[str, Any]:
        count = self._asked.alternatives or 0
        texts = [self._text(token) for token in tokens]
        tops = [[*zip(map(self._text, one.likeliest[:count]), one.likeliest_log_probs, strict=False)] for one in scores]
        log_probs = [score.log_prob for score in scores]
        if not self._is_chat:
            return {"tokens": texts, "token_logprobs": log_probs, "top_logprobs": [dict(top) for top in tops]}
        content = [_scored(*pair) for pair in zip(texts, log_probs, strict=True)]
        for scored, top in zip(content, tops, strict=True):
            scored["top_logprobs"] = [_scored(*pair) for pair in top]
        return {"content": content}

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _traced(self, trace: Sequence[TokenTrace]) -> list[dict[str, Any]]:
        """How each token was settled; at a budget of 1 nothing moved."""
        told = []
        for token in trace:
            settled, first = token.settled if token.evaluations > 1 else None, self._text(token.plain_likeliest)
            told.append({"text": token.text, "settled": settled, "first": first, "entropy": token.entropy})
            told[-1]["evaluations"] = token.evaluations
        return told


def event(value: Any) -> str:
    """A server-sent event."""
    return f"data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def _scored(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
