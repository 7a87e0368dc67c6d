"""What happens within one diffusion, against traces and the language model."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.decoding.trace import accuracy_by_time, mean_evaluations
from l2d_jax.errors import InputError
from tests.support import tiny
from tests.support.requests import trace

SETTINGS = DecodeConfig(budget=7)
PROMPTS = [[5, 17, 3], [60, 2, 41, 8]]
ANSWERS = [list(range(1, 71)), [9, 8, 7]]  # the first takes two pieces


@pytest.fixture(scope="module")
def loaded():
    return LoadedModel(tiny.model(), None, (95,), SETTINGS)


@pytest.mark.slow
def test_it_begins_with_the_language_model_and_ends_with_the_answer(loaded):
    found = accuracy_by_time(loaded, Request(number_prompts(PROMPTS), SETTINGS, seed=3), ANSWERS)
    assert found["t"] == [0, 1 / 3, 2 / 3, 1]
    llm, right = loaded.model.llm, []
    for prompt, answer in zip(PROMPTS, ANSWERS, strict=True):
        ids = jnp.array([[*prompt, *answer[:-1]]])
        hidden, _ = llm(ids, jnp.arange(ids.shape[1])[None])
        probs = jax.nn.softmax(llm.logits(hidden[0, len(prompt) - 1 :]))
        right += [float(row[token]) for row, token in zip(probs, answer, strict=True)]
    assert found["expected"][0] == pytest.approx(np.mean(right), rel=1e-4)
    traces = trace(loaded, PROMPTS, ANSWERS, settings=SETTINGS, seed=3)
    assert found["greedy"][-1] == pytest.approx(np.mean([t.likeliest == t.token for row in traces for t in row]))
    assert len(set(found["expected"])) == 4


@pytest.mark.slow
def test_evaluations_are_those_of_traces(loaded):
    adaptive = DecodeConfig(solver="fehlberg2", budget=64, tolerance=0.3)
    traces = trace(loaded, PROMPTS, ANSWERS, settings=adaptive)
    wanted = [np.mean([token.evaluations for token in row]) for row in traces]
    assert mean_evaluations(loaded, Request(number_prompts(PROMPTS), adaptive), ANSWERS) == pytest.approx(wanted)


def test_an_adaptive_solver_has_no_grid(loaded):
    with pytest.raises(InputError, match="needs a grid, bosh3 has none"):
        accuracy_by_time(loaded, Request(number_prompts(PROMPTS), DecodeConfig(solver="bosh3", budget=64)), ANSWERS)
