"""Decoding: greedy at a budget of one, equal to its uncached version, reproducible, and one program for all budgets."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tiny

from l2d_jax import diffusion
from l2d_jax.config import DecodeConfig
from l2d_jax.decode import State, decode, next_logits, prefill
from l2d_jax.objective import Context
from l2d_jax.refine import Model, Refinement, refine

NO_ENDS = (-1, -1)
PROMPTS = [[5, 17, 80, 3], [44, 2], [9, 9, 61, 70, 33, 12]]

logits_of_next = jax.jit(next_logits)


def start(model: Model, prompts: list[list[int]], *, seeds: list[int] | None = None, room: int = 12) -> State:
    """Prompts padded on the right to eight tokens; each sequence has a seed of its own."""
    ids = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    keys = jax.vmap(jax.random.key)(jnp.array(seeds or range(len(prompts))))
    return prefill(model.llm, jnp.array(ids), jnp.array([len(p) for p in prompts], jnp.int32), keys, room=room)


def generate(model: Model, state: State, budget: int, *, ends: tuple[int, int] = NO_ENDS, **options: Any) -> np.ndarray:
    """Six tokens, in two calls of three, so that these tests compile one program."""
    config, pieces = DecodeConfig(**options), []
    settings = Refinement.from_config(config, budget=budget)
    temperature, stops = jnp.float32(config.temperature), jnp.array(ends, jnp.int32)
    for _ in range(2):
        state, new = decode(model, state, settings=settings, temperature=temperature, ends=stops, steps=3)
        pieces.append(np.asarray(new))
    return np.concatenate(pieces, axis=1)


@jax.jit
def whole_pass(model: Model, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, Any]:
    positions = jnp.where(jnp.arange(tokens.shape[1]) < length, jnp.arange(tokens.shape[1]), -1)[None].astype(jnp.int32)
    hidden, cache = model.llm(tokens, positions)
    return hidden[:, length - 1], cache


SAMPLED = {"temperature": 1.0, "velocity_temperature": 1.0}


def test_a_budget_of_one_generates_what_the_language_model_does() -> None:
    """Arg max tokens of a full pass per token, and logits that are the same bits."""
    model = tiny.model()
    found = generate(model, start(model, PROMPTS), 1)
    for prompt, answer in zip(PROMPTS, found, strict=True):
        text = list(prompt)
        for token in answer:
            hidden, _ = whole_pass(model, jnp.array([text + [0] * (12 - len(text))], jnp.int32), jnp.int32(len(text)))
            assert token == int(jnp.argmax(model.llm.logits(hidden)))
            text.append(int(token))
    state = start(model, PROMPTS)
    noise, keys = jnp.ones((3, 16)), state.keys
    settings = Refinement.from_config(DecodeConfig(), budget=1)
    corrected = logits_of_next(model, state, noise, settings=settings, keys=keys)
    np.testing.assert_array_equal(corrected, jax.jit(lambda m, h: m.llm.logits(h))(model, state.hidden))
    more = Refinement.from_config(DecodeConfig(), budget=3)
    assert not np.allclose(logits_of_next(model, state, noise, settings=more, keys=keys), corrected, atol=0.1)


def test_decoding_equals_a_loop_without_a_cache() -> None:
    """Each token draws from its sequence's key and its own number."""
    model = tiny.model()
    found = generate(model, start(model, PROMPTS), 5, **SAMPLED)
    settings = Refinement.from_config(DecodeConfig(**SAMPLED), budget=5)
    run = jax.jit(refine)
    for seed, (prompt, answer) in enumerate(zip(PROMPTS, found, strict=True)):
        text = list(prompt)
        for number in range(6):
            hidden, cache = whole_pass(
                model, jnp.array([text + [0] * (12 - len(text))], jnp.int32), jnp.int32(len(text))
            )
            at = Context(hidden[:, None], cache, jnp.array([[len(text) - 1]], jnp.int32))
            keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 3)
            noise = jax.random.normal(keys[0], (16,))[None, None]
            refined = run(model, at, noise, settings=settings, keys=keys[1][None, None])
            token = diffusion.sample(keys[2], model.llm.logits(refined[0, 0]), jnp.float32(1.0))
            text.append(int(token))
        assert text[len(prompt) :] == answer.tolist()


def test_one_program_serves_all_budgets_and_temperatures() -> None:
    model, seen = tiny.model(), set()
    generate(model, start(model, PROMPTS), 1)
    compiled = decode._cache_size()
    for budget, options in [(3, {}), (7, SAMPLED), (15, {"velocity_temperature": 0.5, "anneal": True}), (31, {})]:
        seen.add(generate(model, start(model, PROMPTS), budget, **options).tobytes())
    assert len(seen) == 4
    assert decode._cache_size() == compiled


def test_sampling_is_reproducible_and_different_for_each_seed() -> None:
    model = tiny.model()
    first, again, other = (
        generate(model, start(model, PROMPTS, seeds=seeds), 3, **SAMPLED) for seeds in ([0, 1, 2], [0, 1, 2], [7, 8, 9])
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=1).all()
    same_prompt = generate(model, start(model, PROMPTS[:1] * 3), 3, **SAMPLED)
    assert len({row.tobytes() for row in same_prompt}) == 3


def test_a_sequence_does_not_depend_on_its_batch_mates() -> None:
    model = tiny.model()
    together = generate(model, start(model, PROMPTS), 3, **SAMPLED)
    state = start(model, PROMPTS)
    settings = Refinement.from_config(DecodeConfig(), budget=3)
    noise = jax.random.normal(jax.random.key(0), (3, 16))
    logits = logits_of_next(model, state, noise, settings=settings, keys=state.keys)
    for i in range(3):
        alone = start(model, PROMPTS[i : i + 1], seeds=[i])
        of_next = logits_of_next(model, alone, noise[i : i + 1], settings=settings, keys=alone.keys)
        np.testing.assert_allclose(of_next[0], logits[i], atol=1e-5 * float(jnp.abs(logits).max()))
        np.testing.assert_array_equal(generate(model, alone, 3, **SAMPLED)[0], together[i])


def test_end_tokens_stop_one_sequence_while_the_others_go_on() -> None:
    model = tiny.model()
    free = generate(model, start(model, PROMPTS), 3, **SAMPLED)
    stop, end = next((i, token) for i, token in enumerate(free[1, :5]) if token not in free[[0, 2]])
    assert end not in free[1, :stop]
    padding = next(token for token in range(96) if token not in free)
    stopped = generate(model, start(model, PROMPTS), 3, ends=(padding, int(end)), **SAMPLED)
    np.testing.assert_array_equal(stopped[[0, 2]], free[[0, 2]])
    np.testing.assert_array_equal(stopped[1], [*free[1, : stop + 1], *[padding] * (5 - stop)])


def test_the_state_says_how_far_each_sequence_is() -> None:
    model = tiny.model()
    settings = Refinement.from_config(DecodeConfig(), budget=1)
    options = {"settings": settings, "temperature": jnp.float32(0.0), "steps": 3}
    state, tokens = decode(model, start(model, PROMPTS), ends=jnp.array(NO_ENDS, jnp.int32), **options)
    assert (int(state.count), int(state.cache.used)) == (3, 11)
    np.testing.assert_array_equal(state.positions, [4 - 1 + 3, 2 - 1 + 3, 6 - 1 + 3])
    np.testing.assert_array_equal(state.cache.positions[1], [0, 1, *[-1] * 6, 2, 3, 4, *[-1] * 9])
    ends = jnp.array([-1, int(tokens[0, 2])], jnp.int32)
    state, _ = decode(model, start(model, PROMPTS), ends=ends, **options)
    np.testing.assert_array_equal(state.done, (tokens == ends[1]).any(axis=1))


def test_classes_guide_each_sequence() -> None:
    model = tiny.model(classes=3)
    settings = Refinement.from_config(DecodeConfig(), budget=5, guidance=1.5)
    state = start(model, PROMPTS[:1] * 3, seeds=[0, 0, 0])
    run = partial(logits_of_next, model, state, jnp.ones((3, 16)), settings=settings, keys=state.keys)
    logits = run(labels=jnp.array([0, 1, 0], jnp.int32))
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.allclose(logits[0], logits[1], atol=1e-2)
