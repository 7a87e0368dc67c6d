"""The final draw: frequencies against the plain definition of top-k and top-p, and masks."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.sampler import Penalized, Penalties, SamplingOptions, allow, cut, sample_tokens
from l2d_jax.errors import InputError

LOGITS = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.06, 0.04]))
run = jax.jit(sample_tokens)


def frequencies(*, allowed: Any = None, **options: Any) -> np.ndarray:
    """The frequencies of many samples."""
    sampling = SamplingOptions.from_config(DecodeConfig(**{"temperature": 1.0, **options}))
    mask = None if allowed is None else jnp.array([allowed])
    sampling = dataclasses.replace(sampling, allowed=mask)
    keys = jax.random.split(jax.random.key(0), 4000)
    tokens = run(keys, jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (4000, 6)), sampling)
    return np.bincount(tokens, minlength=6) / 4000


def probabilities(kept: list[int], temperature: float = 1.0) -> np.ndarray:
    weights = np.where(np.isin(np.arange(6), kept), np.exp(LOGITS / temperature), 0)
    return weights / weights.sum()


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"temperature": 0.0}, [0]),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.1}, [0]),
        ({"top_k": 1}, [0]),
        ({"top_k": 3}, [0, 1, 2]),
        ({"top_k": 60}, [0, 1, 2, 3, 4, 5]),
        ({"top_p": 0.3}, [0]),
        ({"top_p": 0.64}, [0, 1]),
        ({"top_p": 0.66}, [0, 1, 2]),
        ({"top_k": 3, "top_p": 0.6}, [0, 1]),  # of .5, .3125, .1875
        ({"temperature": 2.0, "top_p": 0.45}, [0, 1]),  # of flatter probabilities
        ({"allowed": [False, True, False, True, True, False]}, [1, 3, 4]),
        ({"allowed": [False, True, False, True, True, False], "top_k": 2}, [1, 3]),
        ({"allowed": [False, False, False, True, True, False], "temperature": 0.0}, [3]),
    ],
)
def test_frequencies(options: dict[str, Any], kept: list[int]) -> None:
    temperature = options.get("temperature", 1.0) or 1.0
    np.testing.assert_allclose(frequencies(**options), probabilities(kept, temperature), atol=0.03)


def test_each_sequence_may_have_its_own() -> None:
    sampling = SamplingOptions(
        temperature=jnp.float32([0.0, 5.0, 5.0]),
        top_k=jnp.int32([0, 2, 0]),
        top_p=jnp.float32([1.0, 1.0, 1.0]),
        gate=jnp.float32([0.0]),
    )
    logits = jnp.broadcast_to(jnp.asarray(LOGITS, jnp.float32), (3, 6))
    drawn = np.stack([run(jax.random.split(jax.random.key(i), 3), logits, sampling) for i in range(60)], axis=1)
    assert [len(set(row)) for row in drawn.tolist()] == [1, 2, 6]


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_is_that_of_sorted_tokens(seed: int) -> None:
    rng = np.random.default_rng(seed)
    temperature, top_k, top_p = [1.0, 0.5, 2.0, 1.0], [0, 40, 9, 0], [0.9, 1.0, 0.7, 1.0]
    logits = np.float32(rng.normal(size=(4, 500)) * rng.choice([0.1, 3, 30], size=(4, 1)))
    logits[:, rng.integers(500, size=50)] = -np.inf
    kept = np.isfinite(cut(*map(jnp.array, (logits, temperature, top_k, top_p))))
    for row, t, k, p, found in zip(logits, temperature, top_k, top_p, kept, strict=True):
        order = np.argsort(-row)[: k or None]
        probs = np.exp(np.float64(row[order] - row.max()) / t)
        probs /= probs.sum()
        order = order[(np.cumsum(probs) - probs < (p if p < 1 else 2)) & (row[order] > -np.inf)]
        np.testing.assert_array_equal(np.sort(order), np.flatnonzero(found))


def test_ties_are_all_kept() -> None:
    logits = jnp.zeros((1, 4))
    sampling = SamplingOptions.from_config(DecodeConfig(temperature=1.0, top_k=2))
    assert len({int(run(jax.random.split(jax.random.key(i), 1), logits, sampling)[0]) for i in range(80)}) == 4


def test_masks() -> None:
    assert allow(5) is None
    assert allow(5, allowed=[1, 3]).tolist() == [False, True, False, True, False]
    assert allow(5, banned=[1]).tolist() == [True, False, True, True, True]
    assert allow(5, allowed=[1, 3], banned=[3]).tolist() == [False, True, False, False, False]
    with pytest.raises(InputError, match="token 5 is not one of the 5 of the model"):
        allow(5, banned=[1, 5])
    with pytest.raises(InputError, match="every token is banned: allow at least one"):
        allow(3, allowed=[2], banned=[2])
    with pytest.raises(InputError, match="every token is banned"):
        allow(3, allowed=[])


def penalized(logits: np.ndarray, said: list[int], frequency: float, presence: float, bias: dict[int, float]) -> Any:
    """OpenAI's definition, token by token."""
    changed = [float(value) for value in logits]
    for token in range(len(changed)):
        count = sum(other == token for other in said)
        changed[token] += bias.get(token, 0.0) - count * frequency - (count > 0) * presence
    return changed


@pytest.mark.parametrize("seed", range(5))
def test_penalties_are_those_of_the_definition(seed: int) -> None:
    """Also while tokens are added; a row without any keeps its bits."""
    rng = np.random.default_rng(seed)
    logits = np.float32(rng.normal(size=(4, 30)))
    rows: list[Any] = [
        (rng.uniform(-2, 2), rng.uniform(-2, 2), {3: -100.0, 7: 2.5}, [3, 3, 9, 29]),
        (0.0, 0.0, {}, []),
        (0.5, 0.0, {}, [1] * 8),
        (0.0, 1.5, {int(token): float(token) for token in range(30)}, [0]),
    ]
    sampling = SamplingOptions.from_config(DecodeConfig())
    sampling = dataclasses.replace(sampling, penalties=Penalties.stack([Penalized(*row) for row in rows], length=8))
    counts = sampling.start_counts(30)
    for token in (5, 5, 9):
        found = sampling.penalties.apply(jnp.asarray(logits), counts)
        for row, before, after in zip(rows, logits, found, strict=True):
            np.testing.assert_allclose(after, penalized(before, row[3], *row[:3]), atol=1e-5)
        np.testing.assert_array_equal(found[1], logits[1])
        drawn = sample_tokens(jax.random.split(jax.random.key(0), 4), jnp.asarray(logits), sampling, counts=counts)
        np.testing.assert_array_equal(drawn, np.argmax(found, axis=1))
        counts = sampling.count(counts, jnp.full(4, token, jnp.int32))
        rows = [(*row[:3], [*row[3], token]) for row in rows]
