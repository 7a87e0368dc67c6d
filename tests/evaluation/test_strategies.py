"""Ways to spend compute on an answer: which are tried, how they answer, and what they cost."""

import numpy as np
import pytest
from jax import monitoring

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.decoding.batching import Completion
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Prompt
from l2d_jax.decoding.search.beam_search import SearchResult
from l2d_jax.decoding.search.search_lanes import Beam
from l2d_jax.evaluation import strategies as module
from l2d_jax.evaluation.strategies import Strategy, answer_problems, majority, strategies
from l2d_jax.performance.costs import decoding_flops
from l2d_jax.performance.timing import run_seconds
from l2d_jax.training.held_out.exact_match import MarkedProblems
from tests.support import tiny

PROBLEMS = MarkedProblems([Prompt(0, [1] * 10), Prompt(1, [1] * 20)], ["12", "5"], most_tokens=10)


def test_what_is_tried():
    tried = list(strategies([1, 3, 15], [4], [2], has_path=True))
    greedy = [Strategy("greedy", budget) for budget in (1, 3, 15)]
    assert tried == [*greedy, Strategy("majority", 3, 4), Strategy("beams", 3, 2)]
    plain = [Strategy("greedy", 1), Strategy("majority", 1, 4), Strategy("beams", 1, 2)]
    assert list(strategies([1, 3, 15], [4], [2], has_path=False)) == plain


def test_a_majority():
    assert majority(["7", None, "12", "12"]) == "12"
    assert majority(["7", "12"]) == "7"
    assert majority([None, None]) is None


@pytest.fixture
def loaded():
    return LoadedModel(tiny.model(), byte_tokenizer(), (), DecodeConfig())


def ids(text, tokenizer):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_samples_are_counted_and_priced(loaded, monkeypatch):
    asked = []

    def complete(loaded, prompts, *, settings, batch_size, samples):
        asked.append((settings.budget, settings.temperature, settings.max_new_tokens, batch_size, samples))
        for prompt, numbers in zip(prompts, (("12", "3", "12"), ("6", "5", "6")), strict=True):
            texts = [ids(f"#### {number}", loaded.tokenizer) for number in numbers]
            yield {prompt.number: [Completion(text, len(text) + 1) for text in texts]}

    monkeypatch.setattr(module, "complete", complete)
    outcome = answer_problems(loaded, PROBLEMS, Strategy("majority", 3, 3), batch_size=10)
    assert asked == [(3, module.TEMPERATURE, 10, 9, 3)]
    assert outcome.right == [True, False]
    counts = [len(ids(f"#### {number}", loaded.tokenizer)) + 1 for number in ("12", "3", "12", "6", "5", "6")]
    assert outcome.tokens == sum(counts) / 2
    read, decode = decoding_flops(loaded.model.llm, loaded.model.path, budget=3)
    assert outcome.flops == pytest.approx((30 * read + sum(counts) * decode) / 2)


def test_a_search_pays_for_every_beam(loaded, monkeypatch):
    def search_prompts(model, request, config, *, lanes):
        assert (config.beams, config.temperature, config.max_new_tokens, request.settings.budget) == (4, 0.0, 10, 1)
        assert lanes == 2  # eight of the ten sequences of a batch
        for prompt in request.prompts:
            answer = ids(f"#### {PROBLEMS.wanted[prompt.number]}", loaded.tokenizer)
            beams = [Beam(answer, 0.0, 0.0, 0, is_ended=True)]
            yield {prompt.number: [SearchResult(answer, beams, tokens=len(answer) + 1)]}

    monkeypatch.setattr(module, "search_prompts", search_prompts)
    outcome = answer_problems(loaded, PROBLEMS, Strategy("beams", 1, 4), batch_size=10)
    assert outcome.right == [True, True]
    assert outcome.tokens == 4 * np.mean([len(ids(f"#### {n}", loaded.tokenizer)) + 1 for n in PROBLEMS.wanted])


def test_compilation_is_no_part_of_the_seconds():
    """Programs are traced within programs: time is taken off once."""
    with run_seconds() as found:
        for start, end in ((20, 50), (0, 100), (90, 110), (200, 201)):
            monitoring.record_event_time_span("/jax/core/compile/anything", 1e6 + start, 1e6 + end)
        monitoring.record_event_time_span("/jax/another", 1e6, 2e6)
    assert found[0] == pytest.approx(-111, abs=1)


@pytest.mark.slow
def test_a_model_answers(loaded):
    greedy = answer_problems(loaded, PROBLEMS, Strategy("greedy", 3), batch_size=2)
    assert greedy.tokens == 10  # it knows no end
    assert answer_problems(loaded, PROBLEMS, Strategy("beams", 3, 2), batch_size=2).tokens == 20
