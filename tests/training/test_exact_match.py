"""Free-running accuracy: which problems are asked, and how answers are counted."""

import json

import numpy as np
import pytest

from l2d_jax.config.schema import DataConfig, DecodeConfig, ValidationConfig
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.data.word_problems import problem
from l2d_jax.decoding.batching import Completion
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model
from l2d_jax.training.held_out import exact_match
from l2d_jax.training.held_out.exact_match import MarkedProblems
from tests.support import tiny


def read(source, tokenizer, count):
    config = DataConfig(source=str(source), validation_split="validation", max_length=900, validation_examples=1)
    return MarkedProblems.read(config, tokenizer, count=count)


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_the_problems_are_the_first_held_out_ones(tokenizer):
    found = read("problems", tokenizer, 5)
    made = [problem(index, split="validation") for index in range(5)]
    assert found.wanted == [str(one.answer) for one in made]
    for prompt, one in zip(found.prompts, made, strict=True):
        text = tokenizer.decode(prompt.ids)
        assert one.question in text
        assert one.solution not in text
    assert found.most_tokens >= 1.25 * max(len(one.solution) for one in made) - 1


def test_rows_without_a_marked_number_are_refused(tokenizer, tmp_path):
    (tmp_path / "validation.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": "It is 4."}) + "\n")
    with pytest.raises(
        InputError, match=r"exact_examples needs answers that are one word, or end in '#### ' .* row 0 .* set it to 0"
    ):
        read(tmp_path, tokenizer, 5)


@pytest.mark.parametrize("word", ["4", "K"])
def test_an_answer_may_be_one_word(tokenizer, tmp_path, word):
    (tmp_path / "validation.jsonl").write_text(json.dumps({"question": "2 + 2?", "answer": word}) + "\n")
    assert read(tmp_path, tokenizer, 5).wanted == [word]


def test_how_answers_are_counted(tokenizer, monkeypatch):
    """Of four problems the LM answers one, and a budget of 3 that one and two more; half of the samples are right."""
    problems = read("problems", tokenizer, 4)
    asked = []

    def complete(loaded, prompts, *, settings, batch_size, samples, prefix):
        asked.append((settings.budget, settings.temperature, batch_size, samples))
        assert all(prompt.ids[:prefix] == prompts[0].ids[:prefix] for prompt in prompts)
        right = {1: {0}, 3: {0, 1, 3}}[settings.budget]
        for prompt in prompts:
            texts = [f"It is so.\n#### {problems.wanted[prompt.number]}", "#### -1", "none"]
            good, bad = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts[:2])
            answer = good if prompt.number in right else bad
            yield {prompt.number: [Completion(text) for text in ([answer] if samples == 1 else [good, bad])]}

    monkeypatch.setattr(exact_match, "complete", complete)
    loaded = LoadedModel(tiny.model(), tokenizer, (), DecodeConfig())
    config = ValidationConfig(exact_samples=2, exact_batch_size=3)
    report = exact_match.exact_match(loaded, problems, config, budgets=(1, 3))
    assert asked == [(1, 0.0, 3, 1), (3, 0.0, 3, 1), (1, 1.0, 2, 2), (3, 1.0, 2, 2)]
    assert (report["validation/exact@1"], report["validation/exact@3"]) == (0.25, 0.75)
    np.testing.assert_allclose(report["validation/exact@3_interval"], [0.3006, 0.9544], atol=1e-3)  # Wilson's
    mean, low, high = report["validation/exact@3_gain"]
    assert mean == 0.5
    assert low <= mean <= high
    assert report["validation/sampled@1"] == report["validation/sampled@3"] == 0.5
    alone = LoadedModel(Model.build(loaded.model.llm, None), tokenizer, (), DecodeConfig())
    report = exact_match.exact_match(alone, problems, ValidationConfig(), budgets=(1, 3))
    assert asked[-1] == (1, 0.0, 4, 1)  # no more rows than problems
    assert [name for name in report if name.count("@")] == [
        f"validation/exact@1{end}" for end in ("", "_interval", "_gain")
    ]
