"""OpenAI's replies: pieces of answers as chunks of a stream, or collected in one object."""

import json
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from l2d_jax.decoding.requests import Piece, TokenScore
from l2d_jax.decoding.stop_strings import GrowingText
from l2d_jax.decoding.trace import TokenTrace
from l2d_jax.serving.api.bodies import ChatBody
from l2d_jax.serving.api.choices import RankedChoices
from l2d_jax.serving.api.echo import Echo
from l2d_jax.serving.api.protocol import Asked
from l2d_jax.serving.api.tools import CallMessage


class Offsets:
    """Computes where each token of a text begins, in characters."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer, self._stream, self._count = tokenizer.backend_tokenizer, DecodeStream([], True), 0

    def add(self, ids: Sequence[int]) -> list[int]:
        """The places at which the next tokens begin."""
        places = []
        for token in ids:
            places.append(self._count)
            self._count += len(self._stream.step(self._tokenizer, token) or "")
        return places


@dataclass
class Choice:
    """One answer of a reply, and its progress."""

    index: int
    text: GrowingText
    offsets: Offsets
    echo: Echo | None = None  # the prompt, if the reply repeats it
    ranked: RankedChoices | None = None  # choices, if the reply has their probabilities
    calls: CallMessage | None = None  # its message, if it may call tools
    ids: list[int] = field(default_factory=list)  # all tokens that have log-probabilities
    scores: list[TokenScore | None] = field(default_factory=list)
    ending: str = ""
    evaluations: int = 0
    passes: int = 0
    is_opened: bool = False  # whether a stream has sent its first chunk


class Reply:
    """The reply to one request."""

    def __init__(self, asked: Asked, tokenizer: PreTrainedTokenizerFast, *, name: str) -> None:
        self._asked, self._tokenizer, self._is_chat = asked, tokenizer, isinstance(asked.body, ChatBody)
        number = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{secrets.token_hex(12)}"
        self._head = {"id": number, "created": int(time.time()), "model": name}
        self._choices: dict[int, Choice] = {}
        copies = asked.body.n
        for index, answer in enumerate(asked.answers):
            echo = asked.echoes[index // copies] if asked.echoes else None
            ranked = asked.ranked[index // copies] if asked.ranked else None
            ending = "" if asked.is_answered else "length"
            calls = None if asked.calls is None else CallMessage(asked.calls)
            text = GrowingText(tokenizer, markers={} if asked.calls is None else asked.calls.markers)
            choice = Choice(index, text, Offsets(tokenizer), echo, ranked, calls, ending=ending)
            self._choices[answer.number] = choice
        self.trace: Sequence[TokenTrace] | None = None  # trace of a single answer; it arrives before the last piece

    def opening(self) -> list[dict[str, Any]]:
        """The chunks of a stream that repeat the prompts, after these were scored."""
        chunks = []
        for choice in self._choices.values():
            if choice.echo is not None:
                ids = choice.echo.ids
                scores = [None, *choice.echo.scores] if self._asked.scoring else []
                choice.ids += ids
                choice.scores += scores
                chunks.append(self._object([self._shown(choice, ids, scores, {"text": choice.echo.text})], chunk=True))
        return chunks

    def add(self, piece: Piece) -> dict[str, Any] | None:
        """Add a piece; returns the stream chunk for it, or None while a call of a tool is opened."""
        choice = self._choices[piece.answer]
        role = {} if choice.is_opened else {"role": "assistant"}
        text = choice.text.add(piece.tokens, is_last=piece.is_last, rest=piece.rest)
        ids, scores = list(piece.tokens), list(piece.scores)
        if choice.echo is not None and piece.stop is not None:  # clients that score prompts expect the stop token
            ids, scores = [*ids, piece.stop[0]], [*scores, piece.stop[1]]
        choice.ids += ids
        choice.scores += scores
        choice.evaluations += piece.evaluations
        choice.passes += piece.passes
        choice.ending, choice.is_opened = piece.ending, True
        if choice.calls is None:
            content = {"delta": role | {"content": text}} if self._is_chat else {"text": text}
        else:
            empty = {"content": None} if role else {}
            content = {"delta": role | empty | choice.calls.add(text, is_last=piece.is_last)}
            if choice.ending == "stop" and choice.calls.has_called:
                choice.ending = "tool_calls"
            if not content["delta"] and not choice.ending:
                return None
        return self._object([self._shown(choice, ids, scores, content)], chunk=True)

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(choice.ending for choice in self._choices.values())

    def whole(self) -> dict[str, Any]:
        """The reply as one object, after all answers have ended."""
        shown = []
        for choice in self._choices.values():
            said = {"content": choice.text.shown} if choice.calls is None else choice.calls.whole()
            message = {"role": "assistant", "refusal": None} | said
            text = choice.text.shown if choice.echo is None else choice.echo.text + choice.text.shown
            content = {"message": message} if self._is_chat else {"text": text}
            shown.append(self._shown(choice, choice.ids, choice.scores, content, is_whole=True))
        return self._object(shown) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Numbers of tokens, evaluations of the path, and passes over the weights for the answers."""
        new = sum(len(choice.text.ids) for choice in self._choices.values())
        counts = {"prompt_tokens": self._asked.prompt_tokens, "completion_tokens": new}
        evaluations = sum(one.evaluations for one in self._choices.values())
        evaluations += sum(echo.evaluations for echo in self._asked.echoes)
        evaluations += sum(ranked.evaluations for ranked in self._asked.ranked)
        passes = sum(one.passes for one in self._choices.values())
        counts["total_tokens"] = self._asked.prompt_tokens + new
        cached = sum(answer.cached for answer in self._asked.answers if answer.copy == 0)  # a prompt counts once
        details: dict[str, Any] = {"prompt_tokens_details": {"cached_tokens": cached}}
        details |= {"completion_tokens_details": {"reasoning_tokens": 0}}
        return counts | details | {"evaluations": evaluations, "passes": passes}

    def last_chunk(self) -> dict[str, Any]:
        """The last chunk of a stream whose client wants usage."""
        return self._object([], chunk=True) | {"usage": self.usage()}

    def _object(self, choices: list[dict[str, Any]], *, chunk: bool = False) -> dict[str, Any]:
        kind = "text_completion"
        if self._is_chat:
            kind = "chat.completion.chunk" if chunk else "chat.completion"
        return {**self._head, "object": kind, "choices": choices}

    def _shown(
        self,
        choice: Choice,
        tokens: Sequence[int],
        scores: Sequence[TokenScore | None],
        content: dict[str, Any],
        *,
        is_whole: bool = False,
    ) -> dict[str, Any]:
        log_probs = None
        if self._asked.body.alternatives is not None:
            log_probs = self._chat_scores(tokens, scores) if self._is_chat else self._scores(tokens, scores)
            if not self._is_chat:
                offsets = Offsets(self._tokenizer) if is_whole else choice.offsets
                log_probs["text_offset"] = offsets.add(tokens)
                if choice.echo is not None:
                    log_probs["l2d_se"] = [None if score is None else score.error for score in scores]
        shown = {"index": choice.index, "finish_reason": choice.ending or None, "logprobs": log_probs} | content
        if choice.ranked is not None and choice.ending:
            shown["l2d_choices"] = choice.ranked.shown()
        return shown if self.trace is None else shown | {"trace": self._traced(self.trace)}

    def _scores(self, tokens: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        """Log-probabilities for `/v1/completions`: of each token, and of the most likely tokens, keyed by their texts.

        The score of a prompt's first token is None. Of several tokens with the same text, such as halves of a
        character, the most likely one is shown.
        """
        tops: list[dict[str, float] | None] = []
        for token, score in zip(tokens, scores, strict=True):
            top = {} if score is None else {self._text(token): score.log_prob}
            for other, log_prob in self._likeliest(score):
                if other != token:
                    text = self._text(other)
                    top[text] = max(log_prob, top.get(text, log_prob))
            tops.append(None if score is None else top)
        log_probs = [None if score is None else score.log_prob for score in scores]
        return {"tokens": [*map(self._text, tokens)], "token_logprobs": log_probs, "top_logprobs": tops}

    def _chat_scores(self, tokens: Sequence[int], scores: Sequence[TokenScore | None]) -> dict[str, Any]:
        content = []
        for token, score in zip(tokens, scores, strict=True):
            assert score is not None  # only a prompt's first token has no score
            top = [_scored(self._text(other), log_prob) for other, log_prob in self._likeliest(score)]
            content.append(_scored(self._text(token), score.log_prob) | {"top_logprobs": top})
        return {"content": content}

    def _likeliest(self, score: TokenScore | None) -> list[tuple[int, float]]:
        count = self._asked.body.alternatives or 0
        return [] if score is None else [*zip(score.likeliest[:count], score.likeliest_log_probs, strict=False)]

    def _text(self, token: int) -> str:
        return str(self._tokenizer.decode([token]))

    def _traced(self, trace: Sequence[TokenTrace]) -> list[dict[str, Any]]:
        """The trace of each token, for the reply; at a budget of 1 nothing was refined."""
        told = []
        for token in trace:
            settled, first = token.settled if token.evaluations > 1 else None, self._text(token.plain_likeliest)
            told.append({"text": token.text, "settled": settled, "first": first, "entropy": token.entropy})
            told[-1]["evaluations"] = token.evaluations
        return told


def event(value: Any, *, kind: str | None = None) -> str:
    """Encode a server-sent event; `kind` is its name, if it has one."""
    named = "" if kind is None else f"event: {kind}\n"
    return f"{named}data: {value if isinstance(value, str) else json.dumps(value)}\n\n"


def _scored(text: str, log_prob: float) -> dict[str, Any]:
    return {"token": text, "logprob": log_prob, "bytes": list(text.encode())}
