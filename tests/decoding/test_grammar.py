"""Answers drawn at random from the masks keep to their grammar, whatever the tokenizer and the seed."""

import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import decoders

from l2d_jax.data.tokenizer import byte_tokenizer, load_tokenizer, stop_ids
from l2d_jax.decoding.grammar import Grammar
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.errors import InputError
from tests.support.tiny_tokenizers import piece_tokenizer

hf = pytest.importorskip("llguidance.hf", reason="needs llguidance: the extra structured")

PADDING = 37  # ids that a model has and its tokenizer has not
CLOSING = ('"', "}", "]", ",")  # what ends JSON soonest; a string first, in which the others may be, too
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é", 3, None]}, "maxItems": 3},
        "mother": {"$ref": "#"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
CHOICES = ["yes", "yes, sir", "no", 'a "b"\\\n', "☃", "/[x]/"]


def schema(schema, **fields):
    return {"type": "json_schema", "json_schema": {"schema": schema, **fields}}


def regex(expression):
    return {"type": "regex", "regex": expression}


def is_person(value):
    assert {"name", "age"} <= value.keys() <= PERSON["properties"].keys()
    assert len(value["name"]) > 0
    assert value["age"] in range(121)
    assert len(value.get("tags", [])) <= 3
    assert all(tag in ("a", "é", 3, None) for tag in value.get("tags", []))
    return "mother" not in value or is_person(value["mother"])


DATE = r"\d{4}-(0[1-9]|1[0-2]) /été|[^a-z]{1,9}☃"
FORMATS = {
    "object": ({"type": "json_object"}, lambda text: isinstance(json.loads(text), dict)),
    "schema": (schema(PERSON, name="person", strict=True), lambda text: is_person(json.loads(text))),
    "number": (schema({"type": "number", "minimum": -2.5, "maximum": 7}), lambda text: -2.5 <= json.loads(text) <= 7),
    "date": (regex(DATE), re.compile(DATE).fullmatch),
    "choice": ({"type": "choice", "choices": CHOICES}, CHOICES.__contains__),
}


@pytest.fixture(scope="module", params=["bytes", "pieces", "smollm2"])
def tokenizer(request):
    if request.param != "smollm2":
        return byte_tokenizer() if request.param == "bytes" else piece_tokenizer()
    folder = Path(os.environ.get("L2D_JAX_TOKENIZERS", "")) / "smollm2"
    if not (folder / "tokenizer.json").is_file():
        pytest.skip("set L2D_JAX_TOKENIZERS to a folder that holds smollm2/tokenizer.json")
    return load_tokenizer(folder)


def compile_for(tokenizer, format, stops=None):
    stops = stop_ids(tokenizer) if stops is None else stops
    return Grammar.compile(format, tokenizer, vocab_size=len(tokenizer) + PADDING, stop_ids=stops)


def draw(grammar, tokenizer, seed, *, limit=40):
    """An answer whose tokens are drawn uniformly from the masks, and which is closed soon after `limit` tokens."""
    matcher, generator, ids = grammar.start(), np.random.default_rng(seed), []
    special = np.setdiff1d(tokenizer.all_special_ids, grammar.stop_ids)
    closing = [list(grammar.stop_ids), *tokenizer(list(CLOSING), add_special_tokens=False)["input_ids"]]
    while not matcher.is_ended:
        mask = matcher.mask()
        assert mask.shape == (len(tokenizer) + PADDING,)
        assert mask.any()
        assert not mask[len(tokenizer) :].any()
        assert not mask[special].any()
        choices = np.flatnonzero(mask)
        if len(ids) >= limit:
            choices = next((tokens for tokens in closing if mask[tokens].all()), choices)
        ids.append(int(generator.choice(choices)))
        matcher.accept(ids[-1])
        assert len(ids) < 20 * limit
    assert np.flatnonzero(matcher.mask()).tolist() == sorted(grammar.stop_ids)
    return to_text(ids[:-1], tokenizer)


@pytest.mark.parametrize("name", FORMATS)
def test_random_answers_keep_to_the_grammar(tokenizer, name):
    format, is_met = FORMATS[name]
    grammar = compile_for(tokenizer, format)
    answers = [draw(grammar, tokenizer, seed) for seed in range(50)]
    assert all(map(is_met, answers)), answers
    assert len(set(answers)) > 3


def after(grammar, text):
    """The mask of a byte tokenizer's model after a text: as characters, and special ids."""
    matcher = grammar.start()
    for byte in text.encode():
        assert matcher.mask()[byte]
        matcher.accept(byte)
    return [chr(token) if token < 256 else token for token in np.flatnonzero(matcher.mask())]


def test_stop_tokens_are_allowed_exactly_where_an_answer_may_end():
    tokenizer = byte_tokenizer()
    grammar = compile_for(tokenizer, {"type": "choice", "choices": ["yes", "yes no"]}, stops=(258, 256))
    assert [after(grammar, text) for text in ("", "ye", "yes", "yes n", "yes no")] == [
        ["y"],
        ["s"],
        [" ", 256, 258],
        ["o"],
        [256, 258],
    ]
    assert after(compile_for(tokenizer, regex("a*")), "") == ["a", 258]
    assert after(compile_for(tokenizer, regex("(?s).*")), "<|")[-2:] == ["ô", 258]  # no other special token


def test_a_stop_token_that_is_text_ends_answers_all_the_same():
    tokenizer, stops = byte_tokenizer(), (ord("b"),)
    assert after(compile_for(tokenizer, regex("ab?"), stops=stops), "") == ["a"]
    assert after(compile_for(tokenizer, regex("ab?"), stops=stops), "a") == ["b"]
    with pytest.raises(InputError, match="the vocabulary lacks a byte that has to come"):
        compile_for(tokenizer, regex("abc"), stops=stops)


@pytest.mark.parametrize("options", [{}, {"x-guidance": {"whitespace_pattern": r"\s+"}}])
def test_blanks_do_not_follow_each_other(options):
    grammar = compile_for(byte_tokenizer(), schema({"type": "object", **options}))
    for text in ('{"a": ', '{"a":1, ', "{ "):
        assert not {" ", "\n", "\t", "\r"} & set(after(grammar, text))
    assert " " in after(grammar, '{"a":')


def test_answers_do_not_disturb_each_other():
    grammar = compile_for(byte_tokenizer(), {"type": "choice", "choices": ["ab", "cd"]})
    first, second = grammar.start(), grammar.start()
    first.accept(ord("a"))
    second.accept(ord("c"))
    assert [np.flatnonzero(matcher.mask()).tolist() for matcher in (first, second)] == [[ord("b")], [ord("d")]]


def test_a_tokenizer_is_read_once(monkeypatch):
    read = []
    original = hf.from_tokenizer
    monkeypatch.setattr(hf, "from_tokenizer", lambda *given, **named: read.append(given) or original(*given, **named))
    tokenizer = byte_tokenizer()
    for expression in ("a", "b"):
        compile_for(tokenizer, regex(expression))
    assert len(read) == 1


@pytest.mark.parametrize("format", [None, {"type": "text"}])
def test_text_has_no_grammar(format):
    assert Grammar.compile(format, None, vocab_size=1, stop_ids=()) is None


DEEP = {"type": "string"}
for _ in range(5000):
    DEEP = {"type": "array", "items": DEEP}
BELOW = {"type": "integer", "minimum": 5, "maximum": 3}


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ([], r"must be a mapping, got \[\]"),
        ({}, r"\.type must be of type str, got None"),
        ({"type": "json_shema"}, r"unknown response_format\.type 'json_shema': did you mean 'json_schema'\?"),
        ({"type": "regex", "regx": "a"}, r"unknown field response_format\.regx: did you mean 'regex'\?"),
        ({"type": "regex", "regex": "a", "choices": []}, r"unknown field response_format\.choices"),
        ({"type": "text", "regex": "a"}, r"unknown field response_format\.regex"),
        (regex(3), r"\.regex must be of type str, got 3"),
        (regex("(a"), "unclosed group"),
        (regex("(?=a)b"), "look-around"),
        (regex("a\\"), "must not end within an escape"),
        (regex(r"[^\s\S]"), "there is none"),
        (regex("(a{1000}){1000}"), "too many"),
        (regex("\ud800"), "surrogates not allowed"),
        ({"type": "choice", "choices": []}, r"must be texts, at least one, got \[\]"),
        ({"type": "choice", "choices": ["a", None]}, r"must be texts, at least one, got \['a', None\]"),
        ({"type": "choice", "choices": "ab"}, r"\.choices must be of type list, got 'ab'"),
        ({"type": "json_schema", "json_schema": {"schem": {}}}, r"json_schema\.schem: did you mean 'schema'\?"),
        ({"type": "json_schema"}, r"\.json_schema must be of type dict, got None"),
        (schema([]), r"\.schema must be of type dict, got \[\]"),
        (schema(BELOW), r"minimum \(5\) is greater than maximum \(3\)"),
        (schema({"type": "object", "properties": {"a": BELOW}, "required": ["a"]}), "'a' is unsatisfiable"),
        (schema({"enum": []}), "anyOf is empty"),
        (schema({"$ref": "#"}), "there is none"),
        (schema({"$ref": "https://example.com/schema"}), "example.com"),
        (schema({"not": {}}), "Unimplemented"),
        (schema({"const": {1, 2}}), "not JSON serializable"),
        (schema({"enum": [f"v{number}" for number in range(100_000)]}), "at most 65536 bytes, got 988900: shorten it"),
        (schema({"properties": {f"k{number}": True for number in range(1001)}}), "at most 1000 keys, got 1002"),
        ({"type": "choice", "choices": [str(number) for number in range(1001)]}, "at most 1000 choices, got 1001"),
        (regex("a" * 70_000), "at most 65536 bytes, got 70000"),
        (schema({"multipleOf": 9_999_991}), "multiple of at most 20000 of their last decimal, got 9999991"),
        (schema({"allOf": [{"multipleOf": number} for number in (97, 89, 83)]}), "got 716539: take smaller ones"),
        (schema({"items": [{"multipleOf": 99.991}]}), "got 99991"),
        (schema({"multipleOf": 1e300}), "multiple of at most"),
        (schema({"multipleOf": 10**4000}), "multiple of at most"),
        (schema({"multipleOf": True}), "Expected f64"),
        (schema({"allOf": [{"anyOf": [{"minimum": i + j} for j in range(3)]} for i in range(9)]}), "meet"),
        (schema(DEEP), "recursion"),
    ],
)
def test_formats_that_are_refused(format, message):
    with pytest.raises(InputError, match=message) as caught:
        compile_for(byte_tokenizer(), format)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 300


TAKEN = {
    "optional keys": schema({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(450)}}),
    "values": schema({"enum": [f"value {i}" for i in range(4000)]}),
    "choices": {"type": "choice", "choices": [f"choice {i} of many" for i in range(1000)]},
    "expression": regex("|".join(f"word{i}" for i in range(5000))),
    "multiples": schema({"type": "integer", "multipleOf": 9973}),
    "decimals": schema({"properties": {"price": {"multipleOf": 0.01}, "weight": {"multipleOf": 2.5}}}),
}


@pytest.mark.parametrize("name", TAKEN)
def test_the_largest_formats_compile_soon(name):
    """Within about a second on a free core; the limit leaves room for a busy one. Each mask takes a part of that."""
    tokenizer = byte_tokenizer()
    compile_for(tokenizer, {"type": "json_object"})  # reads the tokenizer
    began = time.perf_counter()
    grammar = compile_for(tokenizer, TAKEN[name])
    matcher, masks = grammar.start(), []
    for _ in range(8):
        before = time.perf_counter()
        allowed = np.flatnonzero(matcher.mask())
        masks.append(time.perf_counter() - before)
        matcher.accept(int(allowed[0]))
    assert time.perf_counter() - began < 8
    assert max(masks) < 2


def test_models_that_cannot_follow_a_grammar(monkeypatch):
    object_format, tokenizer = {"type": "json_object"}, byte_tokenizer()
    with pytest.raises(InputError, match="needs a tokenizer and a stop token"):
        compile_for(tokenizer, object_format, stops=())
    with pytest.raises(InputError, match="needs a tokenizer and a stop token"):
        Grammar.compile(object_format, None, vocab_size=300, stop_ids=(258,))
    with pytest.raises(InputError, match="vocab size too small"):
        Grammar.compile(object_format, tokenizer, vocab_size=100, stop_ids=(2,))
    other = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])  # which llguidance takes for plain text
    with pytest.raises(InputError, match="it is read differently"):
        compile_for(piece_tokenizer(other), object_format)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"pip install 'l2d_jax\[structured\]'"):
        compile_for(tokenizer, object_format)
