"""Structured answers: which tokens may come next in an answer that is JSON, meets an expression, or is one of a list.

llguidance follows the grammar; stop tokens are ours, and allowed exactly where it may end. JSON has at most one space
between its parts, so that blanks cannot go on for ever, but nothing makes an answer end before `max_new_tokens`; nor is
a schema found out that requires itself within itself. A decoder that drops the first space of a text (Llama 2's) drops
that of an answer, too. A format is bounded in size, so that it compiles within about a second, and a mask takes a
fraction of one.
"""

import functools
import json
import math
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import numpy as np
from jaxtyping import Bool
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import nearest
from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.errors import InputError, first_line, require, shorten, shown

FORMAT = "response_format"
FIELDS = {"text": "type", "json_object": "type", "json_schema": "json_schema", "regex": "regex", "choice": "choices"}
SPACING: Any = {"whitespace_pattern": " "}
LONGEST = 64 * 1024  # bytes of a schema, an expression or all choices
MOST = {"keys": 1000, "choices": 1000}  # keys of all mappings of a schema: the time grows with their square
LARGEST = 20_000  # sum, and common multiple, of all `multipleOf` of a schema: llguidance builds a state for each
# Of llguidance's own units, as measured on two CPU cores: its defaults allow for minutes.
LIMITS: Any = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "max_grammar_size": 50_000}
PROBE = 'é 東 ☃ {"a": 1}'  # characters of several bytes, and spaces


class Grammar:
    """What the answers to a request may be: compiled once, and followed by a copy for each answer."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int], vocab_size: int) -> None:
        """Of llguidance's matcher, and the model's vocabulary, which may exceed the tokenizer's."""
        self.is_ended = False  # whether a stop token was accepted
        self._matcher, self.stop_ids, self._vocab_size = matcher, stop_ids, vocab_size

    @classmethod
    def compile(
        cls, format: Any, tokenizer: PreTrainedTokenizerFast | None, *, vocab_size: int, stop_ids: Sequence[int]
    ) -> "Grammar | None":
        """Compile a `response_format`: OpenAI's `json_object` or `json_schema`, or one of ours; None for `text`.

        Ours are {"type": "regex", "regex": "[0-9]+"}, in Rust's syntax, for the whole answer, and {"type": "choice",
        "choices": ["yes", "no"]}. Raises `InputError` for any other format, for one that no answer can meet or that is
        too large, for a tokenizer that llguidance does not know, without a stop token, and without llguidance.
        """
        kind, value = _parse({"type": "text"} if format is None else format)
        if kind == "text":
            return None
        try:
            from llguidance import LLMatcher, LLParserLimits, grammar_from
        except ImportError:
            raise InputError(f"{FORMAT} needs the extra structured: pip install 'l2d_jax[structured]'") from None
        tokens = _tokens(tokenizer, vocab_size, tuple(stop_ids))
        try:
            is_json, schema = kind.startswith("json"), LLMatcher.grammar_from_json_schema
            written = value if kind == "regex" else json.dumps(value)
            _check_size(kind, value, written)
            text = schema(written, overrides=SPACING) if is_json else grammar_from(kind, value)
            matcher = LLMatcher(tokens, text, log_level=0, limits=LLParserLimits(**LIMITS))
            grammar = cls(matcher, stop_ids, vocab_size)
        except InputError:
            raise
        except (TypeError, ValueError, RecursionError) as error:  # neither JSON nor UTF-8
            raise _refusal(str(error)) from None
        probe = grammar.start()  # what is empty or too large shows at the first token or at the second
        inside = np.setdiff1d(np.flatnonzero(probe.mask()), stop_ids)
        if inside.size:
            probe.accept(int(inside[0]))
            probe.mask()
        return grammar

    def start(self) -> "Grammar":
        """A copy that has not accepted a token yet, if this has not; it follows one answer."""
        return Grammar(self._matcher.deep_copy(), self.stop_ids, self._vocab_size)

    def mask(self) -> Bool[np.ndarray, " V"]:
        """The tokens that may come next, never none; after the end, the stop tokens.

        Raises `InputError` where the grammar becomes too large, or needs a byte that the vocabulary does not have.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask &= not self.is_ended
        mask[list(self.stop_ids)] = self._matcher.is_accepting()
        if self._matcher.is_error() or not mask.any():
            raise _refusal(self._matcher.get_error() or "the vocabulary lacks a byte that has to come")
        return mask

    def accept(self, token: int) -> None:
        """Go on with a token that the mask allows; after any other, the next mask raises."""
        self.is_ended = self.is_ended or token in self.stop_ids
        if not self.is_ended:
            self._matcher.consume_token(token)


def _check_size(kind: str, value: Any, written: str) -> None:
    """Raise `InputError` for a format that would take long to compile."""
    size = len(written.encode(errors="surrogatepass"))
    require(size <= LONGEST, f"{FORMAT} must have at most {LONGEST} bytes, got {size}: shorten it")
    counts, multiples, waiting = {"keys": 0, "choices": len(value) if kind == "choice" else 0}, list[Decimal](), [value]
    while waiting:  # no recursion: a schema may be deeper than Python's stack
        part = waiting.pop()
        if isinstance(part, dict):
            counts["keys"] += len(part)
            multiple: Any = part.get("multipleOf")
            if type(multiple) in (int, float) and 0 < abs(multiple) < math.inf:
                multiples.append(abs(Decimal(repr(multiple))))
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    for name, most in MOST.items():
        require(counts[name] <= most, f"{FORMAT} must have at most {most} {name}, got {counts[name]}: take fewer")
    unit = Decimal(10) ** min([0, *(int(multiple.as_tuple().exponent) for multiple in multiples)])
    states = [int(multiple / unit) for multiple in multiples]
    largest = max(sum(states), math.lcm(*states))
    rule = f"all multipleOf of {FORMAT} must have a common multiple of at most {LARGEST} of their last decimal"
    require(not states or largest <= LARGEST, f"{rule}, got {shown(largest)}: take smaller ones")


def _refusal(reason: str) -> InputError:
    """The error of a format that cannot be followed, for llguidance's reason, which may have many lines."""
    [line] = re.findall("^error: (.+)", reason, re.MULTILINE)[:1] or reason.splitlines()[:1]
    line = "there is none" if line.startswith("NoExtension") else shorten(line, 160)
    return InputError(f"{FORMAT} must be one that answers of this model can meet ({line}): change or simplify it")


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: PreTrainedTokenizerFast | None, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    """llguidance's view of a tokenizer, which takes a second to build."""
    from llguidance.hf import from_tokenizer

    if tokenizer is None or not stop_ids:
        raise InputError(f"{FORMAT} needs a tokenizer and a stop token: add tokenizer files that name an eos_token")
    try:
        tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stop_ids))
        [ids] = text_ids([PROBE], tokenizer)
        require(tokens.decode_bytes(ids).decode().strip() == to_text(ids, tokenizer).strip(), "it is read differently")
    except ValueError as error:
        problem = f"{FORMAT} needs a tokenizer of bytes, or one that falls back to them, with ids that the model has"
        raise InputError(f"{problem} ({first_line(error)[:100]}): use another model") from error
    return tokens


def _parse(format: Any) -> tuple[Any, Any]:
    """The type of a format, and its schema, expression or choices."""
    kind = _field(format, "type", str, FORMAT, *FIELDS.values())
    require(kind in FIELDS, f"unknown {FORMAT}.type {shown(kind)}{nearest(kind, FIELDS)}")
    declared = {"json_schema": dict, "choice": list}.get(kind, str)
    value = _field(format, FIELDS[kind], declared, FORMAT, "type")
    if kind == "json_schema":
        value = _field(value, "schema", dict, f"{FORMAT}.json_schema", "name", "description", "strict")
    texts = kind != "choice" or (len(value) > 0 and all(isinstance(choice, str) for choice in value))
    require(texts, f"{FORMAT}.choices must be texts, at least one, got {shown(value)}: give them")
    halved = kind == "regex" and len(value[len(value.rstrip("\\")) :]) % 2 == 1  # llguidance would leave that out
    require(not halved, f"{FORMAT}.regex must not end within an escape, got {shown(value)}: complete it")
    return kind, {"type": "object"} if kind == "json_object" else value


def _field(section: Any, name: str, declared: type, place: str, *others: str) -> Any:
    """A field of a section, which may have others, but no more."""
    require(isinstance(section, dict), f"{place} must be a mapping, got {shown(section)}: write {{...}}")
    for key in section:
        require(key in (name, *others), f"unknown field {place}.{key}{nearest(str(key), (name, *others))}")
    value, kind = section.get(name), declared.__name__
    require(isinstance(value, declared), f"{place}.{name} must be of type {kind}, got {shown(value)}: give one")
    return value
