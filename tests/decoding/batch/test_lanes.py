"""Lanes: an answer is what it is alone, whoever its neighbours are, whenever it began and whatever they ask for."""

import dataclasses
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.generation import decode_lanes, generate_tokens
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Answer, Prompt, Request, Restrictions
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.errors import InputError
from tests.support import tiny

SETTINGS = DecodeConfig(budget=3, max_new_tokens=20, temperature=1.0)
PROMPTS = [Prompt(number, [1 + (7 * number + i) % 90 for i in range(30 - 4 * number)]) for number in range(7)]
RARE = (95,)
STOPS = tuple(range(80, 96))  # a sixth of the vocabulary: answers of many lengths


def in_lanes(model: Any, request: Request, lanes: int) -> list[list[int]]:
    """The answers, of which no more than `lanes` may be under way at a time."""
    answers: dict[int, list[int]] = {}
    ended: set[int] = set()
    for pieces in decode_lanes(model, dataclasses.replace(request, stop_ids=STOPS), lanes=lanes):
        assert len(pieces) <= lanes
        assert not ended & {piece.answer for piece in pieces}
        for piece in pieces:
            answers.setdefault(piece.answer, []).extend(piece.tokens)
        ended |= {piece.answer for piece in pieces if piece.is_last}
    assert ended == set(range(len(request.prompts) * request.samples))
    return [answers[number] for number in sorted(answers)]


def alone(model: Any, request: Request) -> list[list[int]]:
    """The answers to each prompt when nothing else is asked."""
    apart = (dataclasses.replace(request, prompts=[prompt], stop_ids=STOPS) for prompt in request.prompts)
    return [answer for one in apart for answer in generate_tokens(model, one)]


@pytest.mark.slow
@pytest.mark.parametrize(("start", "lanes"), [("released", 2), ("anchored", 3)])
def test_answers_are_those_of_each_prompt_alone(start: str, lanes: int) -> None:
    """They end at many places, so that lanes are filled again in the middle of the others' answers."""
    model, request = tiny.model(start=start), Request(PROMPTS, SETTINGS, seed=3)
    wanted = alone(model, request)
    assert len({len(answer) for answer in wanted}) > 3
    assert in_lanes(model, request, lanes) == wanted


@pytest.mark.slow
def test_samples_and_a_common_prefix() -> None:
    model, same = tiny.model(), [9, 8, 7]
    prompts = [prompt._replace(ids=[*same, *prompt.ids]) for prompt in PROMPTS[:4]]
    request = Request(prompts, SETTINGS, seed=1, samples=3, prefix=3)
    assert in_lanes(model, request, 5) == alone(model, dataclasses.replace(request, prefix=0))


@pytest.mark.slow
def test_long_prompts_are_read_in_pieces() -> None:
    """Between the chunks of the others; also behind a common prefix, with several answers to each."""
    model, lengths = tiny.model(), (700, 20, 600, 750, 30)
    prompts = [Prompt(n, [1 + (7 * n + i * i) % 90 for i in range(size)]) for n, size in enumerate(lengths)]
    request = Request(prompts, SETTINGS, seed=2)
    assert in_lanes(model, request, 2) == alone(model, request)
    same = [prompt._replace(ids=[9, 8, 7, *prompt.ids]) for prompt in prompts]
    several = Request(same, SETTINGS, seed=2, samples=2, prefix=3)
    assert in_lanes(model, several, 3) == alone(model, dataclasses.replace(several, prefix=0))


@pytest.mark.slow
def test_a_larger_bucket_in_the_middle_changes_no_answer() -> None:
    """Requests that come one by one; the ring grows when a longer answer is asked for, also after it went round."""
    model, lengths = tiny.model(), (70, 30, 150, 20)
    chosen = [dataclasses.replace(SETTINGS, max_new_tokens=length) for length in lengths]
    prompts = [Prompt(0, [1 + n, 2, 3] * (1 + 30 * (n == 2)), settings=one) for n, one in enumerate(chosen)]
    wanted = [generate_tokens(model, Request([prompt], SETTINGS, seed=n))[0] for n, prompt in enumerate(prompts)]
    lanes, told = Lanes(model, lanes=2, stop_ids=()), [list[int]() for _ in prompts]
    answers = [Answer(n, one, chosen[n], StopSearch((), None), seed=n) for n, one in enumerate(prompts)]
    waiting = iter(answers[1:])
    lanes.admit(answers[:1])
    while not lanes.is_idle:
        for piece in lanes.step():
            told[piece.answer] += piece.tokens
        if lanes.free and len(told[0]) > 60:
            lanes.admit([answer for answer in [next(waiting, None)] if answer is not None])
    assert told == wanted


OWN: list[dict[str, Any]] = [
    {"budget": 1},
    {"budget": 15, "gate": 2.0},
    {"budget": 7, "velocity_temperature": 1.0, "anneal": True},
    {"temperature": 0.0, "max_new_tokens": 5},
    {"top_k": 3, "budget": 5},
    {"guidance": 1.7, "max_new_tokens": 12, "end": 0.6},
    {"top_p": 0.5, "budget": 9, "velocity_temperature": 0.7},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("common", "lanes"), [({}, 3), ({"velocity": "expectation", "velocity_temperature": 0.5}, 7), ({"draws": 3}, 3)]
)
def test_each_prompt_has_settings_of_its_own(common: dict[str, Any], lanes: int) -> None:
    """Budget, temperatures, gate, class and length; lanes with less to do wait for the others of a token."""
    model = tiny.model(classes=2)
    prompts = [
        prompt._replace(settings=dataclasses.replace(SETTINGS, **{**common, **own}), label=i % 2)
        for i, (prompt, own) in enumerate(zip(PROMPTS, OWN, strict=True))
    ]
    request = Request(prompts, dataclasses.replace(SETTINGS, **common))
    wanted = alone(model, request)
    assert in_lanes(model, request, lanes) == wanted
    plain = Request(PROMPTS, SETTINGS)
    assert sum(own != other for own, other in zip(wanted, alone(model, plain), strict=True)) > 4


@pytest.mark.slow
def test_adaptive_solvers_have_their_own_steps_and_tolerances() -> None:
    model, own = tiny.model(), [(12, 1e-2), (1, 1e-2), (30, 1e-3), (9, 1e-1), (60, 1e-2)]
    settings = dataclasses.replace(SETTINGS, solver="fehlberg2", max_new_tokens=8)
    prompts = [
        prompt._replace(settings=dataclasses.replace(settings, budget=budget, tolerance=tolerance))
        for prompt, (budget, tolerance) in zip(PROMPTS, own, strict=False)
    ]
    request = Request(prompts, settings)
    assert in_lanes(model, request, 2) == alone(model, request)


@pytest.mark.slow
def test_further_prompts_take_no_further_program() -> None:
    model = tiny.model()
    in_lanes(model, Request(PROMPTS, SETTINGS), 2)
    with test_util.count_jit_and_pmap_lowerings() as count:
        in_lanes(model, Request(PROMPTS * 3, SETTINGS, seed=1), 2)
    assert count() == 0


FEW = [Prompt(0, ids) for ids in ([3, 4, 5], [6, 7], [8, 9, 10, 11])]


@pytest.fixture(scope="module")
def few_alone() -> list[list[int]]:
    """Answers to these prompts one by one, which are those of all orders."""
    model, settings = tiny.model(start="anchored"), dataclasses.replace(SETTINGS, parallel="off")
    return [
        generate_tokens(model, Request([prompt], settings, seed=n, stop_ids=RARE))[0] for n, prompt in enumerate(FEW)
    ]


@pytest.mark.parametrize("parallel", ["off", "on"])
def test_where_requests_come_one_by_one_a_first_token_comes_alone(parallel: Any, few_alone: list[list[int]]) -> None:
    """The client need not wait for a whole chunk. Both numbers of tokens come from the same program.

    The last answer gets the lane of the first, which has ended, beside the second.
    """
    model, settings = tiny.model(start="anchored"), dataclasses.replace(SETTINGS, parallel=parallel)
    lanes = Lanes(model, lanes=2, stop_ids=RARE)
    answers = [Answer(n, prompt, settings, StopSearch((), None), seed=n) for n, prompt in enumerate(FEW)]
    told, sizes = [list[int]() for _ in FEW], list[dict[int, int]]()
    lanes.admit(answers[:1])
    waiting = answers[1:]
    while not lanes.is_idle:
        found = {piece.answer: piece.tokens for piece in lanes.step()}
        sizes.append({number: len(tokens) for number, tokens in found.items() if tokens})
        for number, tokens in found.items():
            told[number] += tokens
        if len(sizes) >= 4 and lanes.free and waiting:
            lanes.admit([waiting.pop(0)])
    assert told == few_alone
    firsts = [next(size for size in sizes if number in size) for number in range(3)]
    assert all(set(size.values()) == {1} for size in firsts)
    assert max(max(size.values(), default=0) for size in sizes) > 1


@pytest.mark.slow
def test_an_answer_that_breaks_harms_no_other() -> None:
    """It is named at the end, when all others have been given."""
    model = tiny.model()
    nan = model.llm.embed.at[95].set(np.nan)
    broken = dataclasses.replace(model, llm=dataclasses.replace(model.llm, embed=nan))
    request = Request([*PROMPTS[:2], Prompt(2, [95, 1]), *PROMPTS[3:]], SETTINGS, stop_ids=STOPS)
    answers: dict[int, list[int]] = {number: [] for number in range(7)}

    def read_all() -> None:
        for pieces in decode_lanes(broken, request, lanes=2):
            for piece in pieces:
                answers[piece.answer] += piece.tokens

    with pytest.raises(InputError, match=r"logits of sequences \[2\] were not numbers"):
        read_all()
    whole = alone(model, Request(PROMPTS, SETTINGS))
    assert [answers[number] for number in (0, 1, 3, 4, 5, 6)] == [whole[number] for number in (0, 1, 3, 4, 5, 6)]


def slow_answer(model: Any, prompt: Prompt, frequency: float, presence: float, bias: dict[int, float]) -> list[int]:
    """The greedy answer of the language model alone, read anew for each token, by the definition of penalties."""
    said: list[int] = []
    while len(said) < SETTINGS.max_new_tokens and not set(said) & set(RARE):
        ids = jnp.asarray([[*prompt.ids, *said]])
        hidden, _ = model.llm(ids, tiny.positions(ids))
        logits = np.array(model.llm.logits(hidden[0, -1]))
        for token in range(len(logits)):
            count = said.count(token)
            logits[token] += bias.get(token, 0) - count * frequency - (count > 0) * presence
        said.append(int(np.argmax(logits)))
    return [token for token in said if token not in RARE]


@pytest.mark.slow
def test_penalties_are_those_of_each_answer() -> None:
    """Beside answers without any, which are what they are alone; one more program serves all of them."""
    model, ids = tiny.model(), [5, 17, 3]
    greedy = dataclasses.replace(SETTINGS, budget=1, temperature=0.0)
    plain = slow_answer(model, Prompt(0, ids), 0, 0, {})
    asked: list[tuple[float, float, dict[int, float]]] = [
        (0.0, 0.0, {}),
        (2.0, 0.0, {}),
        (0.0, 1.5, {plain[0]: -100.0, 3: 1.0}),
        (-1.0, -2.0, {}),
        (0.0, 0.0, {plain[1]: -100.0}),
    ]
    lanes, told = Lanes(model, lanes=3, stop_ids=RARE), [list[int]() for _ in asked]
    answers = [
        Answer(n, Prompt(0, ids), greedy, StopSearch((), None), restrictions=Restrictions((), None, (), None, *one))
        for n, one in enumerate(asked)
    ]
    programs = token_decoder().count
    while answers or not lanes.is_idle:
        if lanes.free and answers:
            lanes.admit([answers.pop(0)])
        for piece in lanes.step():
            told[piece.answer] += piece.tokens
    assert told == [slow_answer(model, Prompt(0, ids), *one) for one in asked]
    assert len({tuple(tokens) for tokens in told}) >= 4
    assert token_decoder().count - programs <= 2
    loaded = LoadedModel(model, None, RARE, greedy)
    assert loaded.generate([ids], frequency_penalty=2.0) == [told[1]]
    assert loaded.generate([ids], presence_penalty=1.5, logit_bias={plain[0]: -100, 3: 1}) == [told[2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency_penalty": 3.0}, r"frequency_penalty must be in \[-2, 2\], got 3.0"),
        ({"presence_penalty": float("nan")}, r"presence_penalty must be in \[-2, 2\], got nan"),
        ({"presence_penalty": "a"}, "presence_penalty must be of type float, got 'a'"),
        ({"logit_bias": {96: 1.0}}, "token 96 is not one of the 96 of the model"),
        ({"logit_bias": {-1: 1.0}}, "token -1 is not one of the 96"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias must map token ids to numbers, got {'5': 1.0}"),
        ({"logit_bias": {5: 101}}, r"logit_bias of token 5 must be in \[-100, 100\], got 101"),
        ({"logit_bias": [5]}, r"logit_bias must map token ids to numbers, got \[5\]"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has at most 1024 tokens, got 1025"),
        ({"frequency_penalti": 1.0}, "did you mean 'frequency_penalty'"),
    ],
)
def test_penalties_that_are_refused(options: dict[str, Any], message: str) -> None:
    loaded = LoadedModel(tiny.model(), None, STOPS, SETTINGS)
    with pytest.raises(InputError, match=message):
        loaded.generate([[1, 2]], **options)


@pytest.mark.slow
def test_lists_of_options_in_the_python_interface() -> None:
    loaded = LoadedModel(tiny.model(), None, STOPS, SETTINGS)
    prompts, budgets = [list(prompt.ids) for prompt in PROMPTS[:3]], [1, 3, 15]
    wanted = [loaded.generate(prompts, budget=budget, temperature=0.0)[i] for i, budget in enumerate(budgets)]
    assert loaded.generate(prompts, budget=budgets, temperature=0.0) == wanted
    assert any(a != b for a, b in pairwise(loaded.generate([prompts[0]] * 3, budget=budgets, temperature=0.0)))


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"budget": [1, 3]}, "budget has 2 values for 3 prompts: give as many"),
        ({"budget": [1, 3, 4]}, "a budget of 4 evaluations is unreachable for midpoint"),
        ({"solver": ["midpoint", "euler", "euler"]}, "share solver, velocity, draws and parallel"),
        ({"parallel": ["on", "off", "off"]}, "share solver, velocity, draws and parallel"),
        ({"max_new_tokens": [5, 5, 2000]}, "and 2000 new ones exceed the 1024 positions"),
        ({"buget": [1, 1, 1]}, "unknown option 'buget': did you mean 'budget'"),
    ],
)
def test_bad_lists(own: dict[str, Any], message: str) -> None:
    loaded = LoadedModel(tiny.model(), None, STOPS, SETTINGS)
    with pytest.raises(InputError, match=message):
        loaded.generate([list(prompt.ids) for prompt in PROMPTS[:3]], **own)


def test_a_path_that_reads_the_prompt_cannot_share_it_with_a_budget_of_one() -> None:
    loaded = LoadedModel(tiny.model(start="anchored", reader="path"), None, STOPS, SETTINGS)
    with pytest.raises(InputError, match="at a budget of 1 the language model reads the prompt"):
        loaded.generate([[1, 2], [3]], budget=[1, 3])
