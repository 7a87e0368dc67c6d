"""The server: OpenAI's client talks to it, and an answer is what it is alone."""

import concurrent.futures
import gc
import json
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import jax
import pytest

from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.serving.access import Access
from tests.support.served import serving, talking_model

openai = pytest.importorskip("openai", reason="openai is in the extra dev")
pytestmark = pytest.mark.slow
QUESTION = [{"role": "user", "content": "What is 12 * 4?"}]


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return talking_model()


@pytest.fixture(scope="module")
def url(loaded: LoadedModel) -> Iterator[str]:
    with serving(loaded) as url:
        yield url


@pytest.fixture(scope="module")
def client(url: str) -> Any:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0)


def chat(client: Any, **options: Any) -> Any:
    """A chat completion; options that OpenAI does not know go beside the others."""
    own = {name: options.pop(name) for name in ("budget", "solver", "gate", "draws", "trace") if name in options}
    return client.chat.completions.create(
        **{"model": "tiny", "messages": QUESTION, "seed": 0, **options}, extra_body=own
    )


def test_an_answer_is_that_of_the_python_interface(client, loaded):
    """With every option of decoding, and usage counts tokens and evaluations."""
    for options in ({"budget": 1}, {"budget": 7, "temperature": 1.0, "seed": 5}, {"budget": 4, "solver": "euler"}):
        reply = chat(client, max_tokens=20, **options)
        assert reply.choices[0].message.content == loaded.generate(QUESTION, max_new_tokens=20, **options)
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage.completion_tokens == 20
        assert reply.usage.evaluations == 20 * options["budget"]
        assert reply.usage.total_tokens == reply.usage.prompt_tokens + 20


def test_a_stream_says_the_same(client, loaded):
    options = {"max_tokens": 20, "temperature": 1.0, "seed": 1}
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
    assert "".join(chunk.choices[0].delta.content for chunk in chunks[:-1]) == loaded.generate(
        QUESTION, temperature=1.0, seed=1, max_new_tokens=20
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "length"]
    assert (chunks[-1].choices, chunks[-1].usage.evaluations) == ([], 60)


def test_several_choices_stop_strings_and_plain_completions(client, loaded):
    """Token ids and texts are prompts, too; each choice has noise of its own."""
    wanted = loaded.generate([list(b"abc"), list(b"Hello")], samples=2, temperature=1.0, seed=3)
    reply = client.completions.create(
        model="tiny", prompt=["abc", "Hello"], n=2, seed=3, temperature=1.0, max_tokens=16
    )
    texts = [loaded.tokenizer.decode(ids, skip_special_tokens=True) for answers in wanted for ids in answers]
    assert [choice.text for choice in reply.choices] == texts
    stop = next(texts[0][i : i + 1] for i in range(3, 16) if texts[0][i].isascii())
    options = {"model": "tiny", "prompt": [list(b"abc")], "seed": 3, "temperature": 1.0}
    cut = client.completions.create(**options, max_tokens=16, stop=stop).choices[0]
    assert (cut.text, cut.finish_reason) == (texts[0][: texts[0].index(stop)], "stop")


def test_log_probabilities_are_those_of_the_tokens(client):
    """The likeliest is the one that greedy decoding takes, and all of them add up to at most 1."""
    scored = chat(client, logprobs=True, top_logprobs=20, budget=3).choices[0].logprobs.content
    assert len(scored) == 16
    for token in scored:
        assert token.top_logprobs[0].logprob == pytest.approx(token.logprob)
        assert token.top_logprobs[0].token == token.token
        assert sum(2.718281828**top.logprob for top in token.top_logprobs) <= 1.0001
    reply = client.completions.create(model="tiny", prompt="abc", logprobs=2, max_tokens=4)
    assert len(reply.choices[0].logprobs.token_logprobs) == 4


def test_a_trace_says_how_tokens_were_settled(client):
    traced = chat(client, trace=True, budget=7).choices[0].model_extra["trace"]
    assert len(traced) == 16
    assert {token["evaluations"] for token in traced} == {7}
    assert all(0 <= token["settled"] <= 1 for token in traced)
    plain = chat(client, trace=True, budget=1).choices[0].model_extra["trace"]
    assert {token["settled"] for token in plain} == {None}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"temprature": 1}, "unknown field 'temprature': did you mean 'temperature'?"),
    ({"budget": 4}, "a budget of 4 evaluations is unreachable for midpoint"),
    ({"budget": "many"}, "config.decode.budget must be of type int"),
    ({"temperature": -1}, "config.decode.temperature must be in [0, 1000]"),
    ({"messages": [{"role": "user", "content": "x" * 2000}]}, "exceed the 1024"),
    ({"messages": []}, "messages must be a list"),
    ({"messages": [{"role": "user"}]}, "content"),
    ({"label": 3}, "class"),
    ({"guidance": 2.0}, "guidance 2.0 is the strength of a class"),
    ({"anneal": True}, "it is 0 already"),
    ({"budget": 1, "draws": 2}, "draws changes nothing at a budget of 1"),
    ({"n": 2, "trace": True}, "a trace is of one answer"),
    ({"stop": ["a"] * 5}, "stop must be a text or up to four"),
    ({"stop": "a<|im_end|>"}, "cannot occur in an answer"),
    ({"tools": [{}]}, "tools[0].type must be 'function', got None"),
    ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "the chat template of this model leaves out tools"),
    ({"model": "gpt-4"}, "there is no model 'gpt-4' here"),
    ({"response_format": {"type": "jsn"}}, "response_format"),
    ({"response_format": {"type": "choice", "choices": []}}, "response_format"),
]


@pytest.mark.parametrize(("fields", "problem"), REFUSED)
def test_what_cannot_be_answered_is_refused_in_openais_shape(url, fields, problem):
    reply = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 4, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert problem in error["message"]
    assert "\n" not in error["message"]
    assert (error["type"], set(error)) == ("invalid_request_error", {"message", "type", "param", "code"})


def test_bodies_that_are_no_json_or_too_large(url):
    for body, status in ((b"{", 400), (b"[]", 400), (b"[" * 10_000, 400), (b"\xff", 400), (b" " * 70_000, 413)):
        reply = httpx.post(f"{url}/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
        assert (reply.status_code, list(reply.json())) == (status, ["error"])
    assert httpx.get(f"{url}/v1/nothing").status_code == 404
    assert httpx.get(f"{url}/v1/chat/completions").status_code == 405


def test_a_request_for_more_answers_than_fit_the_queue(url):
    reply = httpx.post(f"{url}/v1/completions", json={"prompt": ["a"] * 5, "n": 100, "max_tokens": 1})
    assert (reply.status_code, reply.json()["error"]["type"]) == (400, "invalid_request_error")
    assert "at most 256 answers" in reply.json()["error"]["message"]


def figure(url: str, name: str) -> float:
    """One of the figures for Prometheus; 0 before there is any."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def test_models_health_and_figures(client, url):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "l2d_jax"
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    names = ("l2d_evaluations_total", 'l2d_requests_total{status="200"}')
    before = [figure(url, name) for name in names]
    chat(client, budget=3, max_tokens=8)
    assert [figure(url, name) - value for name, value in zip(names, before, strict=True)] == [24, 1]


STRUCTURED: list[dict[str, Any]] = [
    {"type": "choice", "choices": ["yes", "no", "maybe"]},
    {"type": "regex", "regex": "[0-9]{1,3}(,[0-9]{1,3}){0,2}"},
    {
        "type": "json_schema",
        "json_schema": {
            "name": "point",
            "schema": {
                "type": "object",
                "properties": {"x": {"enum": [1, 22, 333]}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            },
        },
    },
]


def test_every_answer_follows_its_grammar(client):
    """200 seeded requests at budgets 1 and 15, side by side with free ones; all end by themselves."""
    pytest.importorskip("llguidance")

    def ask(seed: int) -> tuple[int, str]:
        options: dict[str, Any] = {"temperature": 1.5, "seed": seed, "max_tokens": 48, "budget": (1, 15)[seed // 3 % 2]}
        if seed % 10 == 9:
            return -1, chat(client, **options).choices[0].message.content
        reply = chat(client, response_format=STRUCTURED[seed % 3], **options).choices[0]
        assert reply.finish_reason == "stop"
        return seed % 3, reply.message.content

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(222)))
    said: list[set[str]] = [{text for kind, text in answers if kind == each} for each in range(3)]
    assert said[0] <= {"yes", "no", "maybe"}
    assert all(part.isdigit() for text in said[1] for part in text.split(","))
    points = [json.loads(text) for text in said[2]]
    assert all(point["x"] in (1, 22, 333) and isinstance(point["y"], bool) for point in points)
    assert all(len(texts) > 2 for texts in said)


def held_memory() -> int:
    """Bytes of all arrays of this process, of which a forgotten request would keep some."""
    gc.collect()
    return sum(array.nbytes for array in jax.live_arrays())


def test_many_at_once_say_what_each_says_alone(client, loaded):
    """200 requests of mixed budgets, solvers and lengths, 32 at a time: none is lost, and the memory does not grow."""
    rng = random.Random(0)

    def options(number: int) -> dict[str, Any]:
        chosen = {"budget": rng.choice([1, 3, 7, 15]), "max_tokens": rng.choice([4, 9, 24, 40]), "seed": number}
        chosen |= {"temperature": rng.choice([0.0, 1.0]), "gate": rng.choice([0.0, 2.0])}
        return chosen | ({"gate": 0.0} if chosen["budget"] == 1 else {})  # where a gate changes nothing, it is refused

    asked = [options(number % 40) | {"seed": number % 40} for number in range(200)]
    contents = ["x" * (3 * (number % 40) + 1) for number in range(200)]

    def ask(number: int) -> str:
        messages = [{"role": "user", "content": contents[number]}]
        return chat(client, messages=messages, **asked[number]).choices[0].message.content

    with concurrent.futures.ThreadPoolExecutor(32) as pool:
        answers = list(pool.map(ask, range(120)))  # with all shapes that there are
        before = held_memory()
        answers += pool.map(ask, range(120, 200))
    assert held_memory() - before < 2**10  # a program that is compiled late keeps some numbers
    for number in range(0, 200, 8):
        own = dict(asked[number])
        own["max_new_tokens"] = own.pop("max_tokens")
        assert answers[number] == loaded.generate(contents[number], **own)


def test_a_client_that_leaves_frees_its_lane(loaded):
    """Long before its answer would have ended, by what the server has spent on it."""
    with serving(loaded, lanes=1) as url:
        body = {"messages": QUESTION, "max_tokens": 900, "budget": 31, "seed": 0}
        for stream in (True, False):
            before = figure(url, "l2d_evaluations_total")
            options = {"json": body | {"stream": stream}, "timeout": 60 if stream else 1}
            try:
                with httpx.stream("POST", f"{url}/v1/chat/completions", **options) as reply:
                    next(reply.iter_lines())
            except httpx.TimeoutException:
                assert not stream
            end = time.monotonic() + 60
            while figure(url, "l2d_answers_decoding") > 0:
                assert time.monotonic() < end
                time.sleep(0.05)
            assert figure(url, "l2d_evaluations_total") - before < 0.9 * 900 * 31


def test_a_full_queue_a_key_and_a_limit_of_time(loaded):
    """429 says when to ask again; 401 without the key; 504 for what takes too long, and others go on."""
    with serving(loaded, lanes=1, queue=1, access=Access(key="secret"), seconds=1.0) as url:
        post = f"{url}/v1/chat/completions"
        headers = {"Authorization": "Bearer secret"}
        assert httpx.post(post, json={"messages": QUESTION}).status_code == 401
        assert httpx.get(f"{url}/v1/models", headers={"Authorization": "Bearer secrets"}).status_code == 401
        body = {"messages": QUESTION, "max_tokens": 900, "budget": 31, "seed": 0}
        replies: list[httpx.Response] = []
        threads = [
            threading.Thread(target=lambda: replies.append(httpx.post(post, json=body, headers=headers, timeout=60)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        statuses = sorted(reply.status_code for reply in replies)
        assert statuses[-1] == 504
        assert statuses.count(429) >= 1
        full = next(reply for reply in replies if reply.status_code == 429)
        assert int(full.headers["retry-after"]) >= 1
        assert full.json()["error"]["type"] == "rate_limit_error"
        last = {**body, "max_tokens": 2}  # until its program is compiled, it may take too long as well
        end = time.monotonic() + 120
        while (status := httpx.post(post, json=last, headers=headers, timeout=60).status_code) == 504:
            assert time.monotonic() < end
        assert status == 200
