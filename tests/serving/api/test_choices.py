"""The probability of each choice of a format, and standard errors of the log-probabilities of a prompt."""

import json
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Piece
from l2d_jax.errors import InputError
from l2d_jax.serving.api.choices import MOST, split_format
from l2d_jax.serving.api.limits import RequestLimits
from l2d_jax.serving.api.protocol import Asked, Protocol
from l2d_jax.serving.api.replies import Reply
from l2d_jax.serving.models import Catalogue, ServedModel
from tests.support.served import ABOUT, catalogue, serving, talking_model

MESSAGES = [{"role": "user", "content": "Hi"}]
CHOICES = ["yes", "no", "yes, sure"]
FORMAT = {"type": "choice", "choices": CHOICES}


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return talking_model()


@pytest.fixture(scope="module")
def protocol(loaded: LoadedModel) -> Protocol:
    return Protocol(catalogue(loaded, context=256, answers=8))


def read(protocol: Protocol, *, is_chat: bool = True, query: dict[str, str] | None = None, **fields: Any) -> Asked:
    body = {"messages": MESSAGES, "max_tokens": 4} if is_chat else {"prompt": "Hi", "max_tokens": 4}
    return protocol.read(json.dumps({**body, "seed": 7, **fields}).encode(), is_chat=is_chat, query=query or {})


def finish(asked: Asked, protocol: Protocol) -> dict[str, Any]:
    """The reply, with answers of one token."""
    for pieces in asked.scoring:
        list(pieces)
    reply = Reply(asked, protocol.tokenizer, name="tiny")
    reply.opening()
    for answer in asked.answers if asked.is_answered else ():
        reply.add(Piece(answer.number, [65], is_last=True, ending="stop"))
    return reply.whole()


# --- formats ---


@pytest.mark.parametrize(
    ("format", "rest", "choices"),
    [
        (None, None, []),
        ({"type": "json_object"}, {"type": "json_object"}, []),
        (FORMAT, FORMAT, CHOICES),
        (FORMAT | {"probabilities": True}, FORMAT, CHOICES),
        (FORMAT | {"probabilities": None}, FORMAT, CHOICES),
        (FORMAT | {"probabilities": False}, FORMAT, []),
        ({"type": "choice", "choices": ["a", "b", "a"]}, {"type": "choice", "choices": ["a", "b", "a"]}, ["a", "b"]),
        ({"type": "choice", "choices": [1]}, {"type": "choice", "choices": [1]}, []),  # which the grammar refuses
    ],
)
def test_a_format_is_divided(format: Any, rest: Any, choices: list[str]) -> None:
    assert split_format(format) == (rest, choices)


def test_many_choices_have_probabilities_only_where_they_are_wanted() -> None:
    many = {"type": "choice", "choices": [str(number) for number in range(MOST + 1)]}
    assert split_format(many) == (many, [])
    with pytest.raises(InputError, match=r"probabilities are for at most 64 choices, got 65: take fewer, or"):
        split_format(many | {"probabilities": True})


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"response_format": FORMAT | {"probabilities": 1}}, "response_format.probabilities must be true or false, got 1"),
    ({"response_format": {"type": "regex", "regex": "a", "probabilities": True}}, "unknown field response_format.prob"),
    ({"response_format": {"type": "choice", "choices": ["a", ""]}}, "a choice needs at least one token, got ''"),
    ({"response_format": {"type": "choice", "choices": ["a" * 250]}}, "prompt and choice exceed the 256 tokens"),
    ({"response_format": FORMAT, "score_draws": 3}, "got score_draws 3: change score_draws"),
    ({"response_format": FORMAT, "score_draws": 32}, "score_draws 32 exceeds the 16 noise samples of this server"),
    ({"response_format": FORMAT, "score_draws": 1}, "score_draws must be in [2, 4096], got 1"),
    ({"score_draws": 4}, "score_draws changes nothing without echo and logprobs, or a response_format of type choice"),
    ({"response_format": FORMAT | {"probabilities": False}, "score_draws": 4}, "score_draws changes nothing"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_what_cannot_be_done_is_one_sentence(protocol: Protocol, fields: dict[str, Any], problem: str) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(InputError) as refused:
        read(protocol, **fields)
    assert problem in str(refused.value)
    assert "\n" not in str(refused.value)


# --- probabilities ---


@pytest.mark.parametrize(
    ("options", "draws"), [({"budget": 3, "score_draws": 4}, 4), pytest.param({"budget": 1}, 8, marks=pytest.mark.slow)]
)
def test_probabilities_are_those_of_score(
    protocol: Protocol, loaded: LoadedModel, options: dict[str, int], draws: int
) -> None:
    pytest.importorskip("llguidance")
    asked = read(protocol, response_format=FORMAT, n=2, **options)
    reply = finish(asked, protocol)
    wanted = loaded.score(MESSAGES, CHOICES, seed=7, budget=options["budget"], draws=draws)
    totals = np.array([one.total for one in wanted])
    for choice in reply["choices"]:
        found = choice["l2d_choices"]
        assert [one["text"] for one in found] == CHOICES
        assert [one["tokens"] for one in found] == [len(text) for text in CHOICES]
        np.testing.assert_allclose([one["logprob"] for one in found], totals, atol=1e-5)
        np.testing.assert_allclose([one["l2d_se"] for one in found], [one.error for one in wanted], atol=1e-5)
        shares = np.exp(totals) / np.exp(totals).sum()
        np.testing.assert_allclose([one["probability"] for one in found], shares, atol=1e-5)
    assert all(one.error > 0 for one in wanted) == (options["budget"] > 1)
    samples = 1 if options["budget"] == 1 else draws
    assert reply["usage"]["evaluations"] == sum(map(len, CHOICES)) * options["budget"] * samples


def test_each_prompt_has_separate_probabilities(protocol: Protocol, loaded: LoadedModel) -> None:
    pytest.importorskip("llguidance")
    prompts = [list(b"ab"), list(b"uvw")]
    asked = read(protocol, is_chat=False, prompt=prompts, response_format=FORMAT, budget=1)
    for choice, prompt in zip(finish(asked, protocol)["choices"], prompts, strict=True):
        wanted = loaded.score(prompt, [list(text.encode()) for text in CHOICES], budget=1)
        np.testing.assert_allclose(
            [one["logprob"] for one in choice["l2d_choices"]], [w.total for w in wanted], atol=1e-5
        )


def test_other_formats_have_no_probabilities(protocol: Protocol) -> None:
    pytest.importorskip("llguidance")
    asked = read(protocol, response_format=FORMAT | {"probabilities": False})
    assert list(asked.scoring) == []
    assert "l2d_choices" not in finish(asked, protocol)["choices"][0]


# --- prompts that a reply repeats ---


@pytest.mark.slow
def test_a_prompt_has_the_standard_errors_of_score(protocol: Protocol, loaded: LoadedModel) -> None:
    ids = list(b"2 + 2 = 4")
    options = {"is_chat": False, "prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 0}
    wanted = loaded.score([ids[:1]], [ids[1:]], seed=7, budget=3, draws=16)[0]
    for given in (
        {"budget": 3, "score_draws": 16},
        {"budget": 3, "draws": 16},
        {"query": {"budget": "3", "score_draws": "16"}},
        {"query": {"budget": "7", "score_draws": "16"}, "budget": 3},  # the body takes precedence
    ):
        found = finish(read(protocol, **options, **given), protocol)["choices"][0]["logprobs"]
        assert found["token_logprobs"][0] is found["l2d_se"][0] is None
        np.testing.assert_allclose(found["token_logprobs"][1:], wanted.tokens, atol=1e-5)
        np.testing.assert_allclose(found["l2d_se"][1:], wanted.token_errors, atol=1e-5)
        assert max(found["l2d_se"][1:]) > 0


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ({"buget": "3"}, "unknown field 'buget' in the address: did you mean 'budget'?"),
        ({"prompt": "3"}, "unknown field 'prompt' in the address"),
        ({"budget": "three"}, "config.decode.budget must be of type int, got 'three'"),
        ({"budget": "NaN"}, "config.decode.budget must be of type int, got 'NaN'"),
    ],
)
def test_an_address_is_checked_as_a_body_is(protocol: Protocol, query: dict[str, str], problem: str) -> None:
    with pytest.raises(InputError) as refused:
        read(protocol, query=query)
    assert problem in str(refused.value)


def test_a_named_budget_of_the_body_takes_precedence_over_the_address(loaded: LoadedModel) -> None:
    limits = RequestLimits(context=256, answers=8, efforts={"low": 3})
    protocol = Protocol(Catalogue(ServedModel("tiny", loaded, limits, ABOUT)))
    for fields, budget in (({}, 7), ({"reasoning_effort": "low"}, 3), ({"budget": None}, 7), ({"budget": 1}, 1)):
        asked = read(protocol, query={"budget": "7"}, **fields)
        assert {answer.settings.budget for answer in asked.answers} == {budget}


@pytest.mark.slow
def test_a_client_gets_text_and_probabilities(loaded: LoadedModel) -> None:
    pytest.importorskip("llguidance")
    body = {"messages": MESSAGES, "response_format": FORMAT, "seed": 7, "max_tokens": 12, "budget": 3}
    answer = loaded.generate(MESSAGES, seed=7, max_new_tokens=12, budget=3, response_format=FORMAT)
    with serving(loaded) as url:
        address = f"{url}/v1/chat/completions"
        [choice] = httpx.post(address, json=body, timeout=300).raise_for_status().json()["choices"]
        with httpx.stream("POST", address, json=body | {"stream": True}, timeout=300) as reply:
            chunks = [json.loads(line[6:])["choices"][0] for line in reply.iter_lines() if line.startswith("data: {")]
        refused = httpx.post(f"{address}?buget=3", json=body, timeout=300)
        options = {"max_tokens": 1, "response_format": FORMAT | {"probabilities": 1}}
        other = httpx.post(address, json=body | options, timeout=300)
    assert choice["message"]["content"] == answer
    assert answer in CHOICES
    assert sum(one["probability"] for one in choice["l2d_choices"]) == pytest.approx(1)
    assert [chunk.get("l2d_choices") for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["l2d_choices"] == choice["l2d_choices"]
    assert (refused.status_code, other.status_code) == (400, 400)
