"""Token search: equal to trying every answer, to greedy decoding with one beam, and to its score by hand."""

import dataclasses
import itertools
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax import generate as program
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data import tokenizer
from l2d_jax.decoding import stop_strings
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import SOLVERS, find_solver, split_budget
from l2d_jax.decoding.requests import UNRESTRICTED, Prompt, Restrictions
from l2d_jax.decoding.search import beam_search as search_module
from l2d_jax.decoding.search import search_lanes
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.search.search_lanes import Beam
from l2d_jax.errors import InputError
from l2d_jax.loading import load
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.context import Context
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.weights import base_model
from tests.support import tiny
from tests.support.programs import call, write_base
from tests.support.requests import generate

VOCABULARY = 6


def search(loaded, ids, *, label=None, **options):
    return search_module.search(loaded, Prompt(0, ids, label), **options)


PROMPT = [5, 1, 2]
PLAIN = DecodeConfig(budget=1)
CORRECTED = DecodeConfig(budget=3, velocity_temperature=1.0)
NARROW = SearchConfig(candidates=3, max_new_tokens=10)


@pytest.fixture(scope="module")
def few():
    """Six tokens, of which one ends an answer; a path whose noise changes what is likely."""
    architecture = Architecture.from_hf({**tiny.CONFIGS["llama"], "vocab_size": VOCABULARY})
    llm = tiny.randomise(LLM.declare(architecture, dtype=jnp.float32))
    llm = dataclasses.replace(llm, head=4 * llm.head)
    path = tiny.randomise(DiffusionPath.declare(tiny.path_config(), architecture), seed=1)
    return LoadedModel(Model.build(llm, path), None, (4,), PLAIN)


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(), None, (95,), PLAIN)


@pytest.fixture
def chances(few):
    """Log-probabilities of the next token after a text, given its number: a pass without a cache, in NumPy."""

    @cache
    def find(text, number, settings, seed):
        at = jnp.arange(16)
        ids = jnp.array([[*text, *[0] * (16 - len(text))]], jnp.int32)
        positions = jnp.where(at < len(text), at, -1)[None].astype(jnp.int32)
        hidden, kept = whole(few.model.llm, ids, positions)
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), 0), number)
        keys = jax.random.split(key, 3)
        noise = jax.random.normal(keys[0], (1, 1, 16))
        context = Context(hidden[:, len(text) - 1][:, None], kept, jnp.array([[len(text) - 1]], jnp.int32))
        refined = run(few.model, context, noise, settings=Refinement.from_config(settings), keys=keys[1][None, None])
        logits = np.asarray(few.model.llm.logits(refined[0, 0]), np.float64)
        return logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()

    return find


whole = jax.jit(lambda llm, ids, positions: llm(ids, positions))
run = jax.jit(lambda *read, **options: refine(*read, **options)[0])


def repeats_of(ids, ngram):
    """Tokens of an answer that end an n-gram which ended before."""
    grams = [tuple(ids[i : i + ngram]) for i in range(len(ids) - ngram + 1)]
    return sum(gram in grams[:i] for i, gram in enumerate(grams))


def every_beam(chances, config, settings, *, seed=0, end=4):
    """All answers of at most the longest length with their scores, the best first."""
    found = []
    for length in range(1, config.max_new_tokens + 1):
        for answer in itertools.product(range(VOCABULARY), repeat=length):
            if end in answer[:-1] or (answer[-1] != end and length < config.max_new_tokens):
                continue
            likelihood = sum(
                chances((*PROMPT, *answer[:i]), i, settings, seed)[token] for i, token in enumerate(answer)
            )
            repeats = repeats_of(answer, config.repetition_ngram)
            score = (likelihood - config.repetition_penalty * repeats) / length**config.length_power
            ids = list(answer[:-1] if answer[-1] == end else answer)
            found.append(Beam(ids, score, likelihood, repeats, answer[-1] == end))
    return sorted(found, key=lambda beam: -beam.score)


def same(found, expected):
    assert [beam.ids for beam in found] == [beam.ids for beam in expected]
    assert [beam[3:] for beam in found] == [beam[3:] for beam in expected]
    np.testing.assert_allclose([b[1:3] for b in found], [b[1:3] for b in expected], rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, CORRECTED], ids=["plain", "corrected"])
@pytest.mark.parametrize("penalty", [0.0, 1.5])
@pytest.mark.parametrize("power", [0.0, 0.7, 2.0])
def test_a_wide_search_tries_every_answer(few, chances, settings, penalty, power):
    """All beams fit: 1 + 5 + 5 * 5 * 6 answers; and every one has the score that it has by hand."""
    config = SearchConfig(
        beams=156,
        candidates=VOCABULARY,
        length_power=power,
        repetition_penalty=penalty,
        repetition_ngram=1,
        max_new_tokens=3,
    )
    found = search(few, PROMPT, settings=settings, config=config)
    expected = every_beam(chances, config, settings)
    assert len(expected) == 156
    same(found.beams, expected)
    assert found.answer == expected[0].ids


def plain_search(chances, config, settings, *, seed=0, end=4):
    """Beam search at temperature 0 in plain Python: lists of (score, answer, log-likelihood, repeats)."""
    beams = [(0.0, (), 0.0, 0)]
    for number in range(config.max_new_tokens):
        pool = []
        for beam in beams:
            _, answer, likelihood, _ = beam
            if answer and answer[-1] == end:
                pool.append(beam)
                continue
            following = chances((*PROMPT, *answer), number, settings, seed)
            for token in np.argsort(-following)[: config.candidates]:
                longer, summed = (*answer, int(token)), likelihood + following[token]
                repeats = repeats_of(longer, config.repetition_ngram)
                score = (summed - config.repetition_penalty * repeats) / len(longer) ** config.length_power
                pool.append((score, longer, summed, repeats))
        beams = sorted(pool, key=lambda beam: -beam[0])[: config.beams]
    ended = [answer[-1] == end for _, answer, _, _ in beams]
    return [
        Beam(list(answer[:-1] if is_ended else answer), score, likelihood, repeats, is_ended)
        for (score, answer, likelihood, repeats), is_ended in zip(beams, ended, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, CORRECTED], ids=["plain", "corrected"])
@pytest.mark.parametrize(
    ("power", "penalty", "ngram"), [(0.0, 0.0, 3), (1.0, 0.0, 3), (1.0, 0.7, 2), (0.5, 2.0, 3), (1.5, 0.7, 1)]
)
def test_a_narrow_search_equals_a_plain_one(few, chances, settings, power, penalty, ngram):
    """Over two chunks: ended beams keep their scores, and the others compete with them."""
    config = SearchConfig(
        beams=4,
        candidates=3,
        length_power=power,
        repetition_penalty=penalty,
        repetition_ngram=ngram,
        temperature=0.0,
        max_new_tokens=10,
    )
    found = search(few, PROMPT, settings=settings, config=config, seed=3)
    same(found.beams, plain_search(chances, config, settings, seed=3))


@pytest.mark.slow
def test_the_plain_search_meets_every_case(few, chances):
    """What the comparison with it has seen: answers that ended and that did not, and repeats of every kind."""
    seen = set()
    for power, penalty, ngram in [(0.0, 0.0, 3), (1.0, 0.0, 3), (1.0, 0.0, 2), (1.5, 0.7, 1)]:
        config = SearchConfig(
            candidates=3, length_power=power, repetition_penalty=penalty, repetition_ngram=ngram, max_new_tokens=10
        )
        for beam in plain_search(chances, config, PLAIN):
            seen |= {("ended", beam.is_ended), (ngram, beam.repeats > 0)}
    assert seen >= {("ended", True), ("ended", False), (1, True), (2, True), (3, True)}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [PLAIN, CORRECTED], ids=["plain", "corrected"])
def test_one_beam_is_greedy_decoding(loaded, settings):
    one = SearchConfig(beams=1, candidates=1, temperature=0.0, max_new_tokens=12)
    for seed in (0, 5):
        found = search(loaded, [5, 17, 3], settings=settings, config=one, seed=seed)
        greedy = dataclasses.replace(settings, max_new_tokens=12)
        [answer] = generate(loaded, [[5, 17, 3]], settings=greedy, seed=seed)
        assert found.answer == answer
        assert [beam.ids for beam in found.beams] == [answer]


@pytest.mark.slow
def test_one_beam_stops_where_greedy_decoding_does(loaded):
    one = SearchConfig(beams=1, candidates=1, temperature=0.0, max_new_tokens=12)
    free = search(loaded, [5, 17, 3], config=one).answer
    stop = next(i for i in range(1, 12) if free[i] not in free[:i])
    [beam] = search(dataclasses.replace(loaded, stop_ids=(94, free[stop])), [5, 17, 3], config=one).beams
    assert (beam.ids, beam.is_ended) == (free[:stop], True)
    assert search(dataclasses.replace(loaded, stop_ids=()), [5, 17, 3], config=one).answer == free


@pytest.mark.slow
def test_several_draws_and_a_gate_are_those_of_decoding(loaded):
    one = SearchConfig(beams=1, candidates=1, temperature=0.0, max_new_tokens=12)
    answers = set()
    for changes in ({"draws": 3}, {"gate": 100.0}, {}):
        settings = dataclasses.replace(CORRECTED, max_new_tokens=12, **changes)
        [answer] = generate(loaded, [[5, 17, 3]], settings=settings)
        assert search(loaded, [5, 17, 3], settings=settings, config=one).answer == answer
        answers.add(tuple(answer))
    assert len(answers) == 3


@pytest.mark.slow
def test_classes_and_masks_are_those_of_decoding():
    guided = LoadedModel(tiny.model(classes=3), None, (95,), PLAIN)
    one = SearchConfig(beams=1, candidates=1, temperature=0.0, max_new_tokens=12)
    settings = dataclasses.replace(CORRECTED, guidance=2.0, max_new_tokens=12)
    free = search(guided, [5, 17, 3], settings=dataclasses.replace(settings, guidance=1.0), config=one).answer
    with pytest.raises(InputError, match="no label is given"):
        search(guided, [5, 17, 3], settings=settings, config=one)
    banned = Restrictions(banned=free[:2])
    answers = {tuple(free)}
    for label, restrictions in ((0, UNRESTRICTED), (2, UNRESTRICTED), (2, banned)):
        options = {"settings": settings, "restrictions": restrictions}
        [answer] = generate(guided, [[5, 17, 3]], labels=[label], **options)
        assert search(guided, [5, 17, 3], config=one, label=label, **options).answer == answer
        answers.add(tuple(answer))
    assert len(answers) == 4


@pytest.mark.slow
def test_likelihoods_are_those_among_the_allowed_tokens(few):
    config = SearchConfig(beams=8, candidates=VOCABULARY, max_new_tokens=3)
    found = search(few, PROMPT, config=config, restrictions=Restrictions(allowed=[1, 3]))
    assert {token for beam in found.beams for token in beam.ids} == {1, 3}
    assert len(found.beams) == 8  # of two tokens, three times; the other completions of each beam are no answers
    np.testing.assert_allclose(sum(np.exp(beam.log_likelihood) for beam in found.beams), 1.0, rtol=1e-5)


@pytest.mark.slow
def test_a_wider_beam_is_not_less_likely(few):
    """Here, at a power of 0; in general, a beam may lose the answer that a narrower one would have kept."""
    options = {"candidates": 3, "temperature": 0.0, "length_power": 0.0, "max_new_tokens": 10}
    best = [search(few, PROMPT, config=SearchConfig(beams=n, **options)).beams[0] for n in (1, 4)]
    assert best[0].score < best[1].score


@pytest.mark.slow
def test_a_large_penalty_leaves_no_repeat(few):
    config = SearchConfig(candidates=3, temperature=0.0, max_new_tokens=14, repetition_ngram=2)
    never = dataclasses.replace(few, stop_ids=())
    loops = search(never, PROMPT, config=config).beams[0]
    free = search(never, PROMPT, config=dataclasses.replace(config, repetition_penalty=1e3)).beams[0]
    assert loops.repeats == repeats_of(loops.ids, 2) > 0
    assert free.repeats == repeats_of(free.ids, 2) == 0
    assert len(loops.ids) == len(free.ids) == 14


def test_a_longer_answer_wins_with_a_larger_power(few):
    config = dataclasses.replace(NARROW, temperature=0.0)
    lengths = [
        len(search(few, PROMPT, config=dataclasses.replace(config, length_power=power)).answer) for power in (0.0, 3.0)
    ]
    assert lengths[0] < lengths[1]


@pytest.mark.slow
def test_a_search_stops_when_all_beams_have_ended(few, monkeypatch):
    calls, real = [], search_lanes.extend
    monkeypatch.setattr(search_lanes, "extend", lambda *a, **k: calls.append(1) or real(*a, **k))
    options = {"candidates": 3, "temperature": 0.0, "length_power": 0.0}
    short = search(few, PROMPT, config=SearchConfig(**options, max_new_tokens=24))
    assert len(calls) < 3
    assert all(beam.is_ended for beam in short.beams)
    calls.clear()
    long = search(dataclasses.replace(few, stop_ids=()), PROMPT, config=SearchConfig(**options, max_new_tokens=24))
    assert len(calls) == 3
    assert [len(beam.ids) for beam in long.beams] == [24] * 4


# --- draws ---


@pytest.mark.slow
def test_seeds(loaded):
    config = SearchConfig(beams=3, candidates=3, max_new_tokens=12)
    for settings in (PLAIN, CORRECTED):
        one, again, other = (
            search(loaded, [5, 17, 3], settings=settings, config=config, seed=seed) for seed in (0, 0, 1)
        )
        assert one == again
        assert one.beams != other.beams
    sure = dataclasses.replace(config, temperature=0.0)
    assert search(loaded, [5, 17, 3], config=sure, seed=0) == search(loaded, [5, 17, 3], config=sure, seed=1)


@pytest.mark.slow
def test_completions_are_sampled_without_replacement(few, chances):
    """Both tokens of a first step: p_a p_b / (1 - p_a) for a and then b, of p at the temperature."""
    config = SearchConfig(beams=2, candidates=2, temperature=2.0, max_new_tokens=1)
    shares = np.exp(chances(tuple(PROMPT), 0, PLAIN, 0) / 2)
    shares /= shares.sum()
    never = dataclasses.replace(few, stop_ids=())
    counts = np.zeros((VOCABULARY, VOCABULARY))
    for seed in range(400):
        first, second = sorted(beam.ids[0] for beam in search(never, PROMPT, config=config, seed=seed).beams)
        counts[first, second] += 1
    ordered = shares[:, None] * shares / (1 - shares[:, None])
    wanted = np.triu(ordered + ordered.T, 1)
    np.testing.assert_allclose(wanted.sum(), 1)
    assert np.all(np.abs(counts / 400 - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 400) + 1e-9)


@pytest.mark.slow
def test_the_answer_is_drawn_from_the_beam(few):
    """With probability in proportion to exp(score / temperature)."""
    config = SearchConfig(beams=3, candidates=3, temperature=0.0, max_new_tokens=3, final_temperature=0.5)
    counts = np.zeros(3)
    for seed in range(300):
        found = search(few, PROMPT, config=config, seed=seed)
        counts[[beam.ids for beam in found.beams].index(found.answer)] += 1
    wanted = np.exp([beam.score / 0.5 for beam in found.beams])
    wanted /= wanted.sum()
    assert counts.min() > 0
    assert np.all(np.abs(counts / 300 - wanted) < 4 * np.sqrt(wanted * (1 - wanted) / 300))
    best = search(few, PROMPT, config=dataclasses.replace(config, final_temperature=0.0))
    assert best.answer == best.beams[0].ids


# --- one program, budgets, bad input ---


def test_one_program_serves_all_numbers(few):
    corrected = dataclasses.replace(CORRECTED, parallel="off")
    search(few, PROMPT, settings=corrected, config=NARROW)
    compiled = search_lanes.extend._cache_size()
    changed = [
        {"length_power": 0.3},
        {"repetition_penalty": 2.0},
        {"repetition_ngram": 1, "repetition_penalty": 2.0},
        {"temperature": 0.0},
        {"max_new_tokens": 9},
    ]
    seen = [search(few, PROMPT, settings=corrected, config=dataclasses.replace(NARROW, **new)) for new in changed]
    seen.append(search(few, [2, 2], settings=dataclasses.replace(corrected, velocity_temperature=0.5), config=NARROW))
    assert len({str(found) for found in seen}) == 6
    assert search_lanes.extend._cache_size() == compiled


def test_a_total_is_split_between_the_beams():
    for solver, total, beams, budget in [
        ("midpoint", 15, 1, 15),
        ("midpoint", 16, 1, 15),
        ("midpoint", 60, 4, 15),
        ("midpoint", 63, 4, 15),
        ("midpoint", 15, 4, 3),
        ("midpoint", 15, 8, 1),
        ("euler", 15, 4, 3),
        ("euler", 8, 4, 2),
        ("rk4", 60, 4, 13),
        ("heun3", 60, 4, 13),
        ("fehlberg2", 60, 4, 15),
        ("fehlberg2", 12, 4, 1),
        ("adaptive_heun", 12, 4, 3),
    ]:
        assert split_budget(solver, total, beams=beams) == budget
    for solver in SOLVERS:
        for total in range(1, 40):
            budget = split_budget(solver, total, beams=1)
            find_solver(solver).steps(budget)  # can be spent, and no larger one that fits can
            for larger in range(budget + 1, total + 1):
                with pytest.raises(InputError):
                    find_solver(solver).steps(larger)


@pytest.mark.parametrize(
    ("solver", "total", "beams", "message"),
    [
        (
            "midpoint",
            3,
            4,
            "3 evaluations per token is less than one for each of 4 beams: try .*at least 4, or 3 beams",
        ),
        ("midpoint", 0, 4, "less than one for each of 4 beams: try a total of at least 4$"),
        ("euler", 3, 0, "between at least 1 beam, got 0"),
        ("newton", 3, 1, "unknown solver 'newton'"),
    ],
)
def test_totals_that_cannot_be_split(solver, total, beams, message):
    with pytest.raises(InputError, match=message):
        split_budget(solver, total, beams=beams)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beams": 0}, r"search.beams must be in \[1, 65536\], got 0"),
        ({"candidates": 0}, r"search.candidates must be in \[1, 1000000000\], got 0"),
        ({"beams": 4, "candidates": 1}, "one candidate a step never makes 4 beams"),
        ({"length_power": -0.1}, r"search.length_power must be in \[0, 1000\], got -0.1"),
        ({"length_power": float("nan")}, r"search.length_power must be in \[0, 1000\], got nan"),
        ({"repetition_penalty": -1.0}, r"search.repetition_penalty must be in \[0, 1000\], got -1"),
        ({"repetition_ngram": 0}, r"search.repetition_ngram must be in \[1, 1000000000\], got 0"),
        ({"temperature": -1.0}, r"search.temperature must be in \[0, 1000\], got -1"),
        ({"final_temperature": float("inf")}, r"search.final_temperature must be in \[0, 1000\], got inf"),
        ({"max_new_tokens": 0}, r"search.max_new_tokens must be in \[1, 10000000\], got 0"),
        ({"candidates": 7}, "search.candidates 7 exceed the 6 tokens of the model: take at most 6"),
        ({"max_new_tokens": 1022}, "a prompt of 3 tokens and 1022 new ones exceed the 1024 positions"),
    ],
)
def test_searches_that_cannot_be(few, changes, message):
    with pytest.raises(InputError, match=message):
        search(few, PROMPT, config=SearchConfig(**changes))


@pytest.mark.parametrize(
    ("settings", "prompt", "message"),
    [
        (DecodeConfig(budget=4), PROMPT, "a budget of 4 evaluations is unreachable for midpoint"),
        (DecodeConfig(budget=1, top_k=3), PROMPT, "set top_k to 0 and top_p to 1, got 3 and 1.0"),
        (DecodeConfig(budget=1, top_p=0.9), PROMPT, "set top_k to 0 and top_p to 1, got 0 and 0.9"),
        (PLAIN, [], "a prompt is empty"),
    ],
)
def test_settings_that_a_search_cannot_use(few, settings, prompt, message):
    with pytest.raises(InputError, match=message):
        search(few, prompt, settings=settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"label": 0}, "class label 0 is unknown to this path: it knows none"),
        ({"restrictions": Restrictions(stops=["x"])}, "a search takes no stop strings"),
        ({"restrictions": Restrictions(banned=[6])}, "token 6 is not one of the 6"),
    ],
)
def test_conditions_that_a_search_cannot_meet(few, changes, message):
    with pytest.raises(InputError, match=message):
        search(few, PROMPT, **changes)


@pytest.mark.slow
def test_a_plain_model_has_a_budget_of_one(few):
    plain = dataclasses.replace(few, model=Model.build(few.model.llm, None))
    config = SearchConfig(max_new_tokens=7)
    with_path = search(few, PROMPT, config=config)
    assert search(plain, PROMPT, config=config) == with_path._replace(evaluations=0)  # without a path, none is counted
    with pytest.raises(InputError, match="a budget of 3 needs a diffusion path"):
        search(plain, PROMPT, settings=CORRECTED)


def test_logits_that_are_not_numbers(few):
    broken = dataclasses.replace(few.model.llm, head=few.model.llm.head.at[3].set(jnp.nan))
    with pytest.raises(InputError, match=r"logits of sequences \[0\] were not numbers"):
        search(dataclasses.replace(few, model=Model.build(broken, few.model.path)), PROMPT, config=NARROW)


# --- the command line ---


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A plain Hugging Face folder."""
    return write_base(tmp_path_factory.mktemp("base") / "base")


GENERATE = ["--prompt", "2 + 2?", "--max_new_tokens", 10]


@pytest.mark.slow
def test_generate_searches(folder):
    options = [
        "--beams",
        3,
        "--candidates",
        2,
        "--length_power",
        0.5,
        "--repetition_penalty",
        1.5,
        "--temperature",
        0.5,
    ]
    outcome = call(program.main, "--model", folder, *GENERATE, *options, "--seed", 4)
    assert (outcome.status, outcome.err) == (0, "")
    ready = load(folder)
    config = SearchConfig(
        beams=3, candidates=2, length_power=0.5, repetition_penalty=1.5, temperature=0.5, max_new_tokens=10
    )
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "2 + 2?"}], ready.tokenizer)
    found = search(ready, prompt, config=config, seed=4)
    assert outcome.out == stop_strings.to_text(found.answer, ready.tokenizer) + "\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidates", 2], "--candidates is an option of token search: give --beams too"),
        (["--length_power", 0], "--length_power is an option of token search"),
        (["--beams", 0], "must be in [1, 65536], got 0"),
        (["--beams", 2, "--candidates", 1], "one candidate a step never makes 2 beams"),
        (["--beams", 2, "--candidates", 1000], "search.candidates 1000 exceed the 320 tokens of the model"),
        (["--beams", 2, "--repetition_penalty", -1], "must be in [0, 1000], got -1.0"),
        (["--beams", 2, "--top_p", 0.5], "set top_k to 0 and top_p to 1, got 0 and 0.5"),
        (["--beams", 2, "--stop", "x"], "--stop does not go with --beams"),
        (["--beams", 2, "--trace", "new"], "--trace does not go with --beams"),
        (["--beams", 2, "--budget", 3], "a budget of 3 needs a diffusion path"),
    ],
)
def test_bad_requests_are_one_line_before_anything_is_loaded(folder, monkeypatch, arguments, message):
    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    assert message in call(program.main, "--model", folder, *GENERATE, *arguments).error


def test_a_chat_has_no_search(folder):
    assert "a chat does not go with --beams" in call(program.main, "--model", folder, "--beams", 2).error
