"""The plan keeps to its rows, and packed rows train exactly as their examples do one by one."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DataConfig
from l2d_jax.data import tokenizer
from l2d_jax.data.batch import Batch, stack
from l2d_jax.data.examples import Examples
from l2d_jax.data.packing import pack
from l2d_jax.model import lm_head
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.context import read_context
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.llm import LLM
from l2d_jax.training import objective
from l2d_jax.training.objective import Corruption
from tests.support import tiny
from tests.support.programs import config

EXAMPLES = 4  # of real text


def sizes(count: int, *, length: int = 500, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and answer positions of random examples: most short, a few as long as a row."""
    rng = np.random.default_rng(seed)
    lengths = np.clip(rng.lognormal(4.5, 0.8, count), 10, length).astype(np.int64)
    return lengths, np.maximum(1, (lengths * rng.uniform(0.1, 0.9, count)).astype(np.int64))


@pytest.mark.parametrize(("answer_length", "spare"), [(500, 1.01), (250, 1.10), (125, 1.10)])
def test_a_plan_fills_its_rows_and_never_overfills_one(answer_length: int, spare: float) -> None:
    lengths, answers = sizes(3000)
    fits = answers <= answer_length
    lengths, answers = lengths[fits], answers[fits]
    plan = pack(lengths, answers, length=500, answer_length=answer_length)
    for seed in range(2):
        rows = plan.deal(seed)
        assert len(rows) == len(plan)
        np.testing.assert_array_equal(np.sort(np.concatenate(rows)), np.arange(len(lengths)))
        assert max(lengths[row].sum() for row in rows) <= 500
        assert max(answers[row].sum() for row in rows) <= answer_length
    needed = max(lengths.sum() / 500, answers.sum() / answer_length)
    assert len(plan) <= spare * needed


def test_another_seed_exchanges_examples_of_one_size() -> None:
    lengths, answers = sizes(2000, length=60)
    plan = pack(lengths, answers, length=60, answer_length=60)
    one, other = np.concatenate(plan.deal(0, 1)), np.concatenate(plan.deal(0, 2))
    np.testing.assert_array_equal(lengths[one], lengths[other])
    np.testing.assert_array_equal(answers[one], answers[other])
    assert np.mean(one != other) > 0.5
    np.testing.assert_array_equal(np.concatenate(plan.deal(0, 1)), one)


@pytest.mark.parametrize(
    ("lengths", "answers", "wanted"),
    [
        ([8], [8], [[0]]),
        ([8, 8], [1, 1], [[0], [1]]),
        ([4, 4], [4, 5], [[1], [0]]),  # the answers do not fit together
        ([3, 5], [4, 4], [[1, 0]]),
        ([2, 2, 2, 2], [2, 2, 2, 2], [[0, 1, 2, 3]]),
    ],
)
def test_the_smallest_plans(lengths: list[int], answers: list[int], wanted: list[list[int]]) -> None:
    rows = pack(np.array(lengths), np.array(answers), length=8, answer_length=8).deal(0)
    assert sorted(sorted(row.tolist()) for row in rows) == sorted(sorted(row) for row in wanted)


# --- the same training ---


@pytest.fixture(scope="module")
def model() -> tuple[LLM, DiffusionPath]:
    """Of the built-in problems' bytes."""
    architecture = Architecture.from_hf(config().model.architecture or {})
    llm = tiny.randomise(LLM.declare(architecture, dtype=jnp.float32))
    return llm, tiny.randomise(DiffusionPath.declare(tiny.path_config(classes=3), architecture), seed=1)


def real(**options: Any) -> tuple[Batch, Batch, list[list[int]]]:
    """Examples of the built-in problems, one a row and packed, and who is in the packed rows."""
    data = DataConfig(source="problems", max_length=600, train_examples=EXAMPLES, packing=True, **options)
    examples = Examples.load(data, tokenizer.byte_tokenizer(), split="train")
    found = [examples.turns[int(number)] | {"class": number % 3} for number in examples.kept]
    together = [row.tolist() for row in examples.plans[0].deal(0)]
    assert 1 < len(together) < EXAMPLES
    put = partial(stack, padding=examples.padding)
    packed = put([[found[number] for number in row] for row in together], data)
    alone = put([[example] for example in found], replace(data, packing=False))
    return *jax.tree.map(jnp.asarray, (alone, packed)), together


def places(batch: Batch, together: list[list[int]]) -> list[tuple[int, np.ndarray]]:
    """Of each example, its row and the positions of its answer."""
    found = {}
    for row, numbers in enumerate(together):
        for segment, number in enumerate(numbers, 1):
            own = np.asarray(batch.weights[row] == 1)
            if batch.query_segments is not None:
                own = own & np.asarray(batch.query_segments[row] == segment)
            found[number] = row, np.flatnonzero(own)
    return [found[number] for number in range(len(found))]


@jax.jit
def losses(path: DiffusionPath, llm: LLM, batch: Batch, draws: Corruption) -> jax.Array:
    hidden = objective.correct(path, llm, read_context(llm, batch), batch, draws)
    return lm_head.map_logits(llm, hidden, lm_head.negative_log_likelihood, batch.targets)


@pytest.mark.slow
@pytest.mark.parametrize("answer_length", [None, 300])
def test_packed_rows_have_the_losses_of_their_examples(model: Any, answer_length: int | None) -> None:
    """With the same draws: those of each token, and their means, on real rows."""
    llm, path = model
    alone, packed, together = real(answer_length=answer_length)
    drawn = objective.sample_corruption(jax.random.key(0), alone, path)
    pairs = list(zip(places(alone, [[i] for i in range(EXAMPLES)]), places(packed, together), strict=True))
    other = jax.tree.map(np.array, objective.sample_corruption(jax.random.key(1), packed, path))
    for (row, here), (packed_row, there) in pairs:
        assert len(here) == len(there) > 50
        for ours, theirs in zip(other, drawn, strict=True):
            ours[packed_row, there] = np.array(theirs)[row, here]
    one, found = losses(path, llm, alone, drawn), losses(path, llm, packed, other)
    for (row, here), (packed_row, there) in pairs:
        np.testing.assert_array_equal(packed.targets[packed_row, there], alone.targets[row, here])
        np.testing.assert_allclose(found[packed_row, there], one[row, here], rtol=1e-5, atol=1e-5)
    for reduction in ("example", "token"):
        mean = jnp.sum(found * objective.loss_weights(packed.weights, reduction, segments=packed.query_segments))
        wanted = jnp.sum(one * objective.loss_weights(alone.weights, reduction))
        np.testing.assert_allclose(mean, wanted, rtol=1e-5)
        assert mean != jnp.sum(found * objective.loss_weights(packed.weights, "example"))  # of rows, not of examples


def test_each_example_of_a_row_begins_at_position_zero_and_keeps_its_class(model: Any) -> None:
    llm, path = model
    _, packed, together = real(answer_length=300)
    context = read_context(llm, packed)
    assert packed.segments is not None
    for row, numbers in enumerate(together):
        segments, positions = np.array(packed.segments[row]), np.array(context.cache.positions[row])
        lengths = [int((segments == segment).sum()) for segment in (*range(1, len(numbers) + 1), 0)]
        np.testing.assert_array_equal(positions, np.concatenate([np.arange(length) for length in lengths]))
    labels = objective.sample_corruption(jax.random.key(0), packed, path).labels
    for number, (row, answer) in enumerate(places(packed, together)):
        assert set(np.unique(labels[row, answer])) == {number % 3, 3}
