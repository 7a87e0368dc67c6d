"""Prompts that a reply repeats: their log-probabilities are those of `model.score`."""

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from l2d_jax.decoding.loaded_model import LoadedModel
from tests.support.served import serving, talking_model

pytestmark = pytest.mark.slow
PROMPT = "2 + 2 = 4, é"


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return talking_model()


@pytest.fixture(scope="module")
def url(loaded: LoadedModel) -> Iterator[str]:
    with serving(loaded, draws=64) as url:
        yield url


def complete(url: str, **fields: Any) -> Any:
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 0, "seed": 7, **fields}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=300).raise_for_status().json()


@pytest.mark.parametrize(
    "options", [{"budget": 1}, {"budget": 3}, {"budget": 7, "draws": 16}, {"budget": 4, "solver": "euler"}]
)
def test_log_probabilities_are_those_of_score(url, loaded, options):
    reply = complete(url, **options)
    [choice], ids = reply["choices"], list(PROMPT.encode())
    wanted = loaded.score([ids[:1]], [ids[1:]], seed=7, **({"draws": 8} | options))[0]
    found = choice["logprobs"]
    assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
    np.testing.assert_allclose(found["token_logprobs"][1:], wanted.tokens, atol=1e-5)
    for own, top, likeliest, token in zip(
        found["token_logprobs"][1:], found["top_logprobs"][1:], wanted.likeliest, ids[1:], strict=True
    ):
        assert len(top) in (1, 2)
        assert (own == max(top.values())) == (likeliest == token)
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "length")
    assert found["text_offset"] == [*range(11), 11, 11]
    draws = 1 if options["budget"] == 1 else options.get("draws", 8)
    assert reply["usage"]["evaluations"] == (len(ids) - 1) * draws * options["budget"]
    assert reply["usage"]["completion_tokens"] == 0


def test_several_prompts_have_noise_of_their_own(url, loaded):
    prompts = [list(b"abcdef"), list(b"uvw"), [65]]
    found = [one["logprobs"]["token_logprobs"][1:] for one in complete(url, prompt=prompts, budget=3)["choices"]]
    wanted = loaded.score([one[:1] for one in prompts[:2]], [one[1:] for one in prompts[:2]], seed=7, budget=3)
    for one, other in zip(found, wanted, strict=False):
        np.testing.assert_allclose(one, other.tokens, atol=1e-5)
    assert found[2] == []


def test_long_prompts_are_scored_in_pieces(url, loaded):
    ids = [40 + n % 60 for n in range(200)]
    found = complete(url, prompt=ids, budget=15)["choices"][0]["logprobs"]["token_logprobs"][1:]
    np.testing.assert_allclose(found, loaded.score([ids[:1]], [ids[1:]], seed=7, budget=15)[0].tokens, atol=1e-5)


def test_answers_follow_their_prompts(url, loaded):
    """Greedily: as many entries as the prompt and the answer have tokens; lm-evaluation-harness leaves out the last."""
    plain = complete(url, echo=False, max_tokens=3, budget=3, logprobs=2)["choices"][0]
    choices = complete(url, max_tokens=3, budget=3, logprobs=2, n=2)["choices"]
    assert choices[0]["text"] == PROMPT + plain["text"]
    for name in ("tokens", "token_logprobs", "top_logprobs"):
        assert choices[0]["logprobs"][name][-3:] == plain["logprobs"][name]
        assert choices[0]["logprobs"][name][:-3] == choices[1]["logprobs"][name][:-3]
        assert len(choices[1]["logprobs"][name]) == len(PROMPT.encode()) + 3


def test_a_stop_token_counts_as_a_token_of_an_echoed_answer(loaded):
    """Or a client that asks for one token would take the prompt's last one for it."""
    first = loaded.generate(list(PROMPT.encode()), max_new_tokens=1, budget=3)[0]
    stopped = LoadedModel(loaded.model, loaded.tokenizer, (first,), loaded.defaults)
    with serving(stopped) as url:
        choice = complete(url, max_tokens=1, budget=3)["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (PROMPT, "stop")
    assert choice["logprobs"]["tokens"][-1] == chr(first)
    assert len(choice["logprobs"]["token_logprobs"]) == len(PROMPT.encode()) + 1


def test_a_stream_begins_with_the_prompt(url):
    whole = complete(url, max_tokens=2, budget=3)["choices"][0]
    body = {"prompt": PROMPT, "echo": True, "logprobs": 1, "max_tokens": 2, "budget": 3, "seed": 7, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=300) as reply:
        chunks = [json.loads(line[6:]) for line in reply.iter_lines() if line.startswith("data: {")]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["text"] == PROMPT
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [value for choice in choices for value in choice["logprobs"][name]] == whole["logprobs"][name]


def test_an_echo_without_log_probabilities_costs_nothing(url):
    reply = complete(url, logprobs=None)
    assert reply["choices"][0]["text"] == PROMPT
    assert reply["usage"]["evaluations"] == 0


def test_a_model_that_is_broken_says_so(loaded):
    head = loaded.model.llm.head.at[5].set(float("nan"))
    model = dataclasses.replace(loaded.model, llm=dataclasses.replace(loaded.model.llm, head=head))
    with serving(dataclasses.replace(loaded, model=model)) as url:
        reply = httpx.post(f"{url}/v1/completions", json={"prompt": "ab", "echo": True, "logprobs": 1, "max_tokens": 0})
    assert reply.status_code == 400
    assert "were not numbers" in reply.json()["error"]["message"]
