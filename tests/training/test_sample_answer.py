"""A held-out example is answered in words as training goes on."""

from pathlib import Path

import pytest

from l2d_jax import train
from l2d_jax.training.held_out.sample_answer import _differing
from tests.support.programs import call, options


def test_the_question_is_what_prompts_do_not_share() -> None:
    assert _differing([[1, 2, 3, 4, 9], [1, 2, 5, 9], [1, 2, 6, 7, 8, 9]]) == [3, 4, 9]
    assert _differing([[1, 2, 3]]) == [1, 2, 3]
    assert _differing([[1, 2], [1, 2]]) == [1, 2]


@pytest.mark.slow
def test_training_prints_the_question_and_answers_it_again_and_again(tmp_path: Path) -> None:
    arguments = options(train__steps=4, validation__budgets=(1,), validation__answer_every=2)
    outcome = call(train.main, *arguments, "--workdir", tmp_path / "run")
    assert outcome.status == 0, outcome.err
    places = [outcome.out.index(text) for text in ("a held-out question: ", "the right answer: ", "before training: ")]
    places += [outcome.out.index(f"after {step} steps: ") for step in (2, 4)]
    assert places == sorted(places)
    assert outcome.out.count("the model's, ") == 3
