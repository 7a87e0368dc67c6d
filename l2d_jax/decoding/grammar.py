"""Structured answers: which tokens may come next in JSON, in a text that matches a regex, and in calls of tools.

llguidance follows the grammar. Stop tokens are handled here: they are allowed exactly where the grammar may end. JSON
has at most one space between its parts, so whitespace cannot go on forever. Nothing else makes an answer end before
`max_new_tokens`, and a schema that requires itself within itself is not detected. A decoder that drops the first space
of a text (Llama 2's) also drops the first space of an answer. The size of a format is limited, so that it compiles
within about a second and a mask takes a fraction of a second.
"""

import functools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Bool
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.parsing import nearest
from l2d_jax.data.tokenizer import text_ids
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.decoding.tools.call_format import find_call_format
from l2d_jax.decoding.tools.call_grammar import begun_calls, call_grammar
from l2d_jax.decoding.tools.schema_fault import find_fault
from l2d_jax.decoding.tools.tool_use import ToolUse
from l2d_jax.errors import InputError, first_line, require, shorten, shown

FORMAT, TOOLS = "response_format", "tools"  # fields of a request
FIELDS = {"text": "type", "json_object": "type", "json_schema": "json_schema", "regex": "regex", "choice": "choices"}
SPACING: Any = {"whitespace_pattern": " "}
LONGEST = 64 * 1024  # largest schema, regex or list of choices, in bytes
MOST = {"keys": 1000, "choices": 1000}  # keys are counted over all mappings: time grows with the square of their number
TOGETHER: Any = {"longest": 256 * 1024, "most": {"keys": 5000}}  # limits of the schemas of all tools of a request
LARGEST = 20_000  # limit on the sum and the common multiple of all `multipleOf`: llguidance builds a state for each
# In llguidance's own units, chosen by measuring on two CPU cores. Its defaults allow compilation to take minutes.
LIMITS: Any = {"initial_lexer_fuel": 200_000, "step_lexer_fuel": 50_000, "max_grammar_size": 50_000}
ESCAPES = {"/": r"\x2F", "\\/": r"\x2F", "\n": r"\n"}  # within the slashes of Lark
PROBE = 'é 東 ☃ {"a": 1}'  # characters of several bytes, and spaces


class Grammar:
    """The grammar that the answers to a request follow: compiled once, then copied for each answer."""

    def __init__(self, matcher: Any, stop_ids: Sequence[int], vocab_size: int, *, source: str = FORMAT) -> None:
        """`matcher` is llguidance's; `vocab_size` is the model's; `source` is the field that errors name."""
        self.is_ended = False  # whether a stop token was accepted
        self._matcher, self.stop_ids, self._vocab_size, self._source = matcher, stop_ids, vocab_size, source

    @classmethod
    def compile(
        cls,
        format: Any,
        tokenizer: PreTrainedTokenizerFast | None,
        *,
        vocab_size: int,
        stop_ids: Sequence[int],
        tools: ToolUse | None = None,
    ) -> "Grammar | None":
        """Compile a `response_format`, and the calls of tools; None for the type `text` without tools.

        Formats are OpenAI's `json_object` and `json_schema`, {"type": "regex", "regex": "[0-9]+"} for the whole answer,
        in Rust's syntax, and {"type": "choice", "choices": ["yes", "no"]}. With `tools`, the format is that of an
        answer without calls. Calls are written as in the chat template, and their arguments follow the schemas.
        Raises `InputError` for any other format, for one that no answer can satisfy or that is too large, for a
        tokenizer that llguidance cannot use, without a stop token, and if llguidance is not installed. For tools, it
        names the tool and the place in its schema.
        """
        kind, value = _parse({"type": "text"} if format is None else format)
        if kind == "text" and tools is None:
            return None
        source = FORMAT if tools is None else TOOLS
        try:
            from llguidance import LLMatcher, LLParserLimits
        except ImportError:
            raise InputError(f"{source} needs the extra structured: pip install 'l2d_jax[structured]'") from None
        tokens = _tokens(tokenizer, vocab_size, tuple(stop_ids))
        assert tokenizer is not None
        limits = LLParserLimits(**LIMITS)

        def compiled(text: str, source: str) -> Grammar:
            grammar = cls(LLMatcher(tokens, text, log_level=0, limits=limits), stop_ids, vocab_size, source=source)
            grammar.start().probe()
            return grammar

        _check_size(kind, value, FORMAT)
        if tools is None:
            return compiled(_write(kind, value), source)
        form = find_call_format(tokenizer, stop_ids)
        _check_size("schemas", [*tools.schemas.values()], TOOLS, **TOGETHER)
        for name, schema in tools.schemas.items():
            _check_size("schema", schema, f"tool {name!r}")
        rule = None if kind == "text" else _rule(kind, value)
        if rule is not None:
            compiled(_write(kind, value), FORMAT)  # an error of the format alone
        is_clear = rule is None or not form.is_bare or tools.is_required or not tools.may_call
        problem = f"the chat template writes calls as bare JSON, which may be an answer with {FORMAT}"
        require(is_clear, f"{problem}: leave {FORMAT} out, or set tool_choice to 'required' or 'none'")
        options: dict[str, Any] = {"stop_ids": stop_ids, "json_options": SPACING, "text": rule}
        try:
            grammar = compiled(call_grammar(tools, form, tokenizer, **options), source)
            for ids in text_ids(begun_calls(tools, form), tokenizer):
                grammar.start().probe(ids)
            return grammar
        except InputError:
            _blame(tools, lambda schema: compiled(_write("json_schema", schema), source))
            raise

    def start(self) -> "Grammar":
        """A copy, to follow one answer; make it before this grammar has accepted any token."""
        return Grammar(self._matcher.deep_copy(), self.stop_ids, self._vocab_size, source=self._source)

    def probe(self, begun: Sequence[int] = ()) -> None:
        """Accept one token after `begun`; raises `InputError` for a grammar that is empty or too large by then.

        Tokens that the grammar does not allow are not tried: a tokenizer may write the same text in another way.
        """
        if self._matcher.validate_tokens([*begun]) < len(begun):
            return
        for token in begun:
            self.accept(token)
        inside = np.setdiff1d(np.flatnonzero(self.mask()), self.stop_ids)
        if inside.size:
            self.accept(int(inside[0]))
            self.mask()

    def mask(self) -> Bool[np.ndarray, " V"]:
        """The tokens that may come next, at least one; after the end, only stop tokens.

        Raises `InputError` if the grammar becomes too large, or needs a byte that the vocabulary lacks.
        """
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        mask &= not self.is_ended
        mask[list(self.stop_ids)] = self._matcher.is_accepting()
        if self._matcher.is_error() or not mask.any():
            raise _refusal(self._matcher.get_error() or "the vocabulary lacks a byte that has to come", self._source)
        return mask

    def accept(self, token: int) -> None:
        """Advance by a token that the mask allows. After any other token, the next call of `mask` raises."""
        self.is_ended = self.is_ended or token in self.stop_ids
        if not self.is_ended:
            self._matcher.consume_token(token)


def _write(kind: Any, value: Any) -> str:
    """The grammar of a format alone, for llguidance."""
    from llguidance import LLMatcher, grammar_from

    try:
        if kind in ("json_object", "json_schema"):
            return str(LLMatcher.grammar_from_json_schema(json.dumps(value), overrides=SPACING))
        return str(grammar_from(kind, value if kind == "regex" else json.dumps(value)))
    except (TypeError, ValueError, RecursionError) as error:  # neither JSON nor UTF-8
        raise _refusal(str(error), FORMAT) from None


def _rule(kind: str, value: Any) -> str:
    """A format as the body of a rule in Lark."""
    if kind == "regex":
        written = re.sub(r"\\.|/|\n", lambda found: ESCAPES.get(found[0], found[0]), value, flags=re.DOTALL)
        return f"/{written}/"
    if kind == "choice":
        return " | ".join(map(json.dumps, value))
    return f"%json {json.dumps({**value, 'x-guidance': SPACING})}"


def _blame(tools: ToolUse, compiled: Callable[[Any], "Grammar"]) -> None:
    """Raise `InputError` for the first tool whose schema cannot be followed, with the place of the problem."""

    def problem_of(schema: Any) -> str | None:
        try:
            compiled(schema)
        except InputError as error:
            return str(error)
        return None

    for name, schema in tools.schemas.items():
        found = find_fault(schema, problem_of)
        if found is not None:
            place = ".".join(filter(None, ("parameters", found[0])))
            raise InputError(f"tool {name!r}, {shorten(place, 100)}: {found[1]}")


def _check_size(
    kind: str, value: Any, source: str, *, longest: int = LONGEST, most: Mapping[str, int] = MappingProxyType(MOST)
) -> None:
    """Raise `InputError` for a format that would take long to compile."""
    try:
        written = value if kind == "regex" else json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise _refusal(str(error), source) from None
    size = len(written.encode(errors="surrogatepass"))
    require(size <= longest, f"{source} must have at most {longest} bytes, got {size}: shorten it")
    counts, multiples, waiting = {"keys": 0, "choices": len(value) if kind == "choice" else 0}, list[Decimal](), [value]
    while waiting:  # no recursion: a schema may be deeper than Python's stack
        part = waiting.pop()
        if isinstance(part, dict):
            counts["keys"] += len(part)
            multiple: Any = part.get("multipleOf")
            if type(multiple) in (int, float) and 0 < abs(multiple) < math.inf:
                multiples.append(abs(Decimal(repr(multiple))))
        waiting += part.values() if isinstance(part, dict) else part if isinstance(part, list | tuple) else ()
    for name, limit in most.items():
        require(counts[name] <= limit, f"{source} must have at most {limit} {name}, got {counts[name]}: take fewer")
    unit = Decimal(10) ** min([0, *(int(multiple.as_tuple().exponent) for multiple in multiples)])
    states = [int(multiple / unit) for multiple in multiples]
    largest = max(sum(states), math.lcm(*states))
    rule = f"all multipleOf of {source} must have a common multiple of at most {LARGEST} of their last decimal"
    require(not states or largest <= LARGEST, f"{rule}, got {shown(largest)}: take smaller ones")


def _refusal(reason: str, source: str) -> InputError:
    """The error for a format that cannot be followed; `reason` is llguidance's, and may have many lines."""
    [line] = re.findall("^error: (.+)", reason, re.MULTILINE)[:1] or reason.splitlines()[:1]
    line = "there is none" if line.startswith("NoExtension") else shorten(line, 160)
    return InputError(f"{source} must be one that answers of this model can meet ({line}): change or simplify it")


@functools.lru_cache(maxsize=8)
def _tokens(tokenizer: PreTrainedTokenizerFast | None, vocab_size: int, stop_ids: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance needs it; building it takes a second."""
    from llguidance.hf import from_tokenizer

    if tokenizer is None or not stop_ids:
        raise InputError(
            f"{FORMAT} needs a tokenizer and a stop token, as tools do: add tokenizer files that name an eos_token"
        )
    try:
        tokens = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(stop_ids))
        [ids] = text_ids([PROBE], tokenizer)
        require(tokens.decode_bytes(ids).decode().strip() == to_text(ids, tokenizer).strip(), "it is read differently")
    except ValueError as error:
        problem = (
            f"{FORMAT}, or tools, need a tokenizer of bytes, or one that falls back to them, with ids of the model"
        )
        raise InputError(f"{problem} ({first_line(error)[:100]}): use another model") from error
    return tokens


def _parse(format: Any) -> tuple[Any, Any]:
    """The type of a format, and its schema, regex or choices."""
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
    """The field `name` of a section, which may have only this field and `others`."""
    require(isinstance(section, dict), f"{place} must be a mapping, got {shown(section)}: write {{...}}")
    for key in section:
        require(key in (name, *others), f"unknown field {place}.{key}{nearest(str(key), (name, *others))}")
    value, kind = section.get(name), declared.__name__
    require(isinstance(value, declared), f"{place}.{name} must be of type {kind}, got {shown(value)}: give one")
    return value
