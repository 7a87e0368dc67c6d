"""Searches for several prompts at once: what they find, and what they cost, is what each finds and costs alone."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt, Request
from l2d_jax.decoding.search import search_lanes as module
from l2d_jax.decoding.search.beam_search import draw_answer, search, search_prompts
from l2d_jax.decoding.search.beams import SearchConfig
from l2d_jax.decoding.search.search_lanes import Beam
from l2d_jax.errors import InputError
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from tests.support import tiny
from tests.support.marks import slow
from tests.support.requests import generate

VOCABULARY = 12
REFINED = DecodeConfig(budget=3, velocity_temperature=1.0, parallel="off")
CONFIG = SearchConfig(beams=3, candidates=3, length_power=0.5, repetition_penalty=0.5, max_new_tokens=20)


def make(seed, *, classes=0):
    """A model of few tokens, two of which end an answer, so that searches end at different times."""
    architecture = Architecture.from_hf({**tiny.CONFIGS["llama"], "vocab_size": VOCABULARY})
    llm = tiny.randomise(LLM.declare(architecture, dtype=jnp.float32), seed=seed)
    llm = dataclasses.replace(llm, head=3 * llm.head)
    path = tiny.randomise(DiffusionPath.declare(tiny.path_config(classes=classes), architecture), seed=seed + 1)
    return LoadedModel(Model.build(llm, path), None, (4, 7), REFINED)


def prompts(*lengths, seed=0, **options):
    rng = np.random.default_rng(seed)
    return [
        Prompt(number, rng.integers(VOCABULARY, size=size).tolist(), **options) for number, size in enumerate(lengths)
    ]


def together(loaded, asked, *, lanes=None, settings=REFINED, config=CONFIG, seed=0, **options):
    request = Request(asked, settings, seed, stop_ids=loaded.stop_ids, **options)
    found = {}
    for ended in search_prompts(loaded.decoder, request, config, lanes=lanes):
        assert not found.keys() & ended.keys()
        found |= ended
    return found


def same(found, alone):
    """The same beams, token by token, and the same cost; scores up to rounding, which depends on the rows."""
    assert found.answer == alone.answer
    assert (found.tokens, found.evaluations) == (alone.tokens, alone.evaluations)
    assert [(beam.ids, *beam[3:]) for beam in found.beams] == [(beam.ids, *beam[3:]) for beam in alone.beams]
    np.testing.assert_allclose([b[1:3] for b in found.beams], [b[1:3] for b in alone.beams], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lanes", [*slow(1), 3, *slow(7)])
def test_lanes_find_what_each_search_finds_alone(lanes):
    loaded, asked = make(0), prompts(3, 9, 2, 14, 7, 30, 5)
    alone = {one.number: search(loaded, one, settings=REFINED, config=CONFIG, seed=2) for one in asked}
    assert len({result.tokens for result in alone.values()}) > 2, "searches should end at different times"
    found = together(loaded, asked, lanes=lanes, seed=2)
    assert found.keys() == alone.keys()
    for number, [result] in found.items():
        same(result, alone[number])
        assert result.passes == alone[number].passes
    for result in alone.values():
        longest = max(len(beam.ids) + beam.is_ended for beam in result.beams)
        assert result.evaluations <= REFINED.budget * (1 + CONFIG.beams * (longest - 1))
        assert result.evaluations >= REFINED.budget * longest
        assert result.passes == result.evaluations // REFINED.budget * (1 + REFINED.budget)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "changes", "temperature"),
    [(1, {"budget": 1}, 1.0), (2, {"parallel": "on", "budget": 7}, 0.0), (3, {"draws": 3, "gate": 0.5}, 1.0)],
    ids=["plain", "parallel", "draws"],
)
def test_random_models(seed, changes, temperature):
    """Also with prompts of two buckets, so that lanes shrink and grow, and with a group of several prompts."""
    loaded, settings = make(10 * seed), dataclasses.replace(REFINED, **changes)
    lengths = np.random.default_rng(seed).integers(1, 48, size=20).tolist()
    asked, config = prompts(*lengths, seed=seed), dataclasses.replace(CONFIG, temperature=temperature)
    alone = {one.number: search(loaded, one, settings=settings, config=config) for one in asked}
    for lanes in (2, 17):
        found = together(loaded, asked, lanes=lanes, settings=settings, config=config)
        assert found.keys() == alone.keys()
        for number, [result] in found.items():
            same(result, alone[number])


@pytest.mark.slow
def test_a_shared_prefix_changes_nothing():
    loaded, start = make(0), [1, 2, 3, 5, 8, 1, 2, 9]
    asked = [one._replace(ids=start + one.ids) for one in prompts(3, 9, 2, 14, 7)]
    plain, read_once = (together(loaded, asked, lanes=2, prefix=prefix) for prefix in (0, len(start)))
    assert plain.keys() == read_once.keys() == set(range(5))
    for number, [result] in read_once.items():
        same(result, plain[number][0])


@pytest.mark.slow
def test_each_prompt_has_its_class():
    loaded = make(0, classes=3)
    settings = dataclasses.replace(REFINED, guidance=2.0)
    asked = [one._replace(label=one.number % 3) for one in prompts(3, 9, 2, 14, 7)]
    found = together(loaded, asked, lanes=2, settings=settings)
    for one in asked:
        same(found[one.number][0], search(loaded, one, settings=settings, config=CONFIG))
    other = together(loaded, [one._replace(label=0) for one in asked], lanes=2, settings=settings)
    assert [result.beams for [result] in other.values()] != [result.beams for [result] in found.values()]


@pytest.mark.slow
def test_samples_are_searches_with_the_noise_of_ordinary_samples():
    loaded, asked = make(0), prompts(3, 9)
    one = SearchConfig(beams=1, candidates=1, temperature=0.0, max_new_tokens=12)
    found = together(loaded, asked, lanes=4, config=one, samples=3)
    settings = dataclasses.replace(REFINED, max_new_tokens=12)
    answers = generate(loaded, [prompt.ids for prompt in asked], settings=settings, samples=3)
    assert [result.answer for number in (0, 1) for result in found[number]] == answers
    assert len({tuple(answer) for answer in answers[:3]}) > 1
    for number, [first] in together(loaded, asked, lanes=4, config=one).items():
        same(found[number][0], first)


def test_the_final_choice_differs_by_prompt_and_sample():
    """A search for the only answer to the first prompt has the choice of former versions."""
    beams = [Beam([place], 0.0, 0.0, 0, is_ended=True) for place in range(50)]

    def drawn(**changes):
        return draw_answer(beams, **{"seed": 0, "number": 0, "copy": 0, "temperature": 1.0} | changes).ids

    changed = [{}, {"number": 1}, {"number": 2}, {"copy": 1}, {"number": 1, "copy": 1}, {"seed": 1}]
    assert len({tuple(drawn(**changes)) for changes in changed}) > 4
    assert drawn() == drawn()
    assert drawn(temperature=0.0) == [0]


@pytest.mark.slow
def test_a_broken_prompt_stops_no_other():
    loaded = make(0)
    asked = [Prompt(5, [1, 2, 3]), Prompt(6, [11, 2]), Prompt(7, [2, 2, 2, 2])]
    llm = loaded.model.llm
    llm = dataclasses.replace(llm, embed=llm.embed.at[11].set(np.nan))
    broken = dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, llm=llm))
    settings, found = dataclasses.replace(REFINED, budget=1), {}
    ban = Request(asked, settings, stop_ids=loaded.stop_ids)
    ban = dataclasses.replace(ban, restrictions=ban.restrictions._replace(banned=[11]))
    ended = search_prompts(broken.decoder, ban, CONFIG, lanes=1)
    with pytest.raises(InputError, match=r"logits of sequences \[6\] were not numbers"):
        found.update((number, results) for part in ended for number, results in part.items())
    assert found.keys() == {5, 7}


def test_all_rows_count_towards_the_memory(monkeypatch):
    """Of eight searches with three beams; nothing is read before."""
    loaded, asked = make(0), prompts(*[5] * 8)
    monkeypatch.setattr(module.SearchLanes, "__init__", None)
    needs = []

    def note(found, remedy):
        needs.append((found["KV cache"], remedy))
        raise InputError("too much")

    monkeypatch.setattr("l2d_jax.decoding.memory.require_memory", note)
    for lanes in (1, 2, 8):
        with pytest.raises(InputError, match="too much"):
            together(loaded, asked, lanes=lanes)
    (one, remedy), (two, _), (all_of_them, several) = needs
    assert (two, all_of_them) == (one // 2 * 3, one // 2 * 8)  # with the prompt that is read for a lane that is free
    assert remedy == "--beams, --candidates or --max_new_tokens"
    assert several.startswith("--batch_size, ")


def test_settings_of_single_prompts_are_refused():
    asked = prompts(3, 4, settings=REFINED)
    with pytest.raises(InputError, match="the prompts of a search share their settings"):
        together(make(0), asked)
    assert together(make(0), []) == {}
