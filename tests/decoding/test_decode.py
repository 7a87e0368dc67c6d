"""Decoding: greedy at a budget of one, equal to its uncached version, reproducible, and one program for all budgets."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.config.config_file import read_config
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import buckets, token_step
from l2d_jax.decoding.batch.prefill import prefill, read_prefix
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.refinement.refine import refine
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions, answer_keys
from l2d_jax.decoding.state import State, fan_out
from l2d_jax.decoding.token_step import next_logits
from l2d_jax.model import diffusion
from l2d_jax.model.context import Context
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.weights import base_model
from tests.support import tiny

NO_ENDS = (-1, -1)
PROMPTS = [[5, 17, 80, 3], [44, 2], [9, 9, 61, 70, 33, 12]]

logits_of_next = jax.jit(lambda *arguments, **options: next_logits(*arguments, **options)[0])


def start(model: Model, prompts: list[list[int]], *, seeds: list[int] | None = None, capacity: int = 12) -> State:
    """Prompts padded on the right to eight tokens; each sequence has a seed of its own."""
    ids = np.zeros((len(prompts), 8), np.int32)
    for row, prompt in zip(ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    keys = jax.vmap(jax.random.key)(jnp.array(seeds or range(len(prompts))))
    return prefill(model.llm, jnp.array(ids), jnp.array([len(p) for p in prompts], jnp.int32), keys, capacity=capacity)


def generate(model: Model, state: State, budget: int, *, ends: tuple[int, int] = NO_ENDS, **options: Any) -> np.ndarray:
    """Six tokens, in two calls of three, so that these tests compile one program."""
    config, pieces = DecodeConfig(**options), []
    settings = Refinement.from_config(config, budget=budget)
    sampling, stops = SamplingOptions.from_config(config), jnp.array(ends, jnp.int32)
    for _ in range(2):
        state, new = token_decoder()(
            model, state, settings=settings, sampling=sampling, stop_ids=stops, steps=3, noise_samples=config.draws
        )
        pieces.append(np.asarray(new.ids))
    return np.concatenate(pieces, axis=1)


@jax.jit
def whole_pass(model: Model, tokens: jax.Array, length: jax.Array) -> tuple[jax.Array, Any]:
    positions = jnp.where(jnp.arange(tokens.shape[1]) < length, jnp.arange(tokens.shape[1]), -1)[None].astype(jnp.int32)
    hidden, cache = model.llm(tokens, positions)
    return hidden[:, length - 1], cache


SAMPLED = {"temperature": 1.0, "velocity_temperature": 1.0}


@pytest.mark.slow
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
    noise, keys = jnp.ones((3, 1, 16)), state.keys[:, None]
    settings = Refinement.from_config(DecodeConfig(), budget=1)
    corrected = logits_of_next(model, state, noise, settings=settings, keys=keys)
    np.testing.assert_array_equal(corrected, jax.jit(lambda m, h: m.llm.logits(h))(model, state.hidden))
    more = Refinement.from_config(DecodeConfig(), budget=3)
    assert not np.allclose(logits_of_next(model, state, noise, settings=more, keys=keys), corrected, atol=0.1)


@pytest.mark.slow
def test_decoding_equals_a_loop_without_a_cache() -> None:
    """Each token is sampled with its sequence's key and its own number."""
    model = tiny.model()
    found = generate(model, start(model, PROMPTS), 5, **SAMPLED)
    settings = Refinement.from_config(DecodeConfig(**SAMPLED), budget=5)
    run = jax.jit(lambda *read, **options: refine(*read, **options)[0])
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
            token = diffusion.sample_token(keys[2], model.llm.logits(refined[0, 0]), jnp.float32(1.0))
            text.append(int(token))
        assert text[len(prompt) :] == answer.tolist()


def test_one_program_serves_all_budgets_and_temperatures() -> None:
    model, outputs = tiny.model(), set()
    generate(model, start(model, PROMPTS), 1)
    compiled = token_decoder().count
    for budget, options in [
        (3, {}),
        (7, SAMPLED),
        (15, {"velocity_temperature": 0.5, "anneal": True}),
        (31, {}),
        (3, {"temperature": 2.0, "top_k": 5, "top_p": 0.9}),
        (3, {"gate": 1.0}),
    ]:
        outputs.add(generate(model, start(model, PROMPTS), budget, **options).tobytes())
    assert len(outputs) >= 5
    assert token_decoder().count == compiled


def test_the_options_of_a_kind_of_device_reach_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(buckets.COMPILER_OPTIONS, kind, {"xla_no_such_option": "1"})
    monkeypatch.setattr(buckets, "_compiled", buckets._compiled.__wrapped__)  # not one compiled before
    model = tiny.model()
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_option"):
        generate(model, start(model, PROMPTS), 1)


def test_sampling_is_reproducible_and_different_for_each_seed() -> None:
    model = tiny.model()
    first, again, other = (
        generate(model, start(model, PROMPTS, seeds=seeds), 3, **SAMPLED) for seeds in ([0, 1, 2], [0, 1, 2], [7, 8, 9])
    )
    np.testing.assert_array_equal(first, again)
    assert (first != other).any(axis=1).all()
    same_prompt = generate(model, start(model, PROMPTS[:1] * 3), 3, **SAMPLED)
    assert len({row.tobytes() for row in same_prompt}) == 3


@pytest.mark.slow
def test_a_sequence_does_not_depend_on_its_batch_mates() -> None:
    model = tiny.model()
    together = generate(model, start(model, PROMPTS), 3, **SAMPLED)
    state = start(model, PROMPTS)
    settings = Refinement.from_config(DecodeConfig(), budget=3)
    noise = jax.random.normal(jax.random.key(0), (3, 1, 16))
    logits = logits_of_next(model, state, noise, settings=settings, keys=state.keys[:, None])
    for i in range(3):
        alone = start(model, PROMPTS[i : i + 1], seeds=[i])
        of_next = logits_of_next(model, alone, noise[i : i + 1], settings=settings, keys=alone.keys[:, None])
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


@pytest.mark.slow
def test_the_state_says_how_far_each_sequence_is() -> None:
    model = tiny.model()
    settings = Refinement.from_config(DecodeConfig(), budget=1)
    options = {"settings": settings, "sampling": SamplingOptions.from_config(DecodeConfig()), "steps": 3}
    state, (tokens, *_) = token_decoder()(
        model, start(model, PROMPTS), stop_ids=jnp.array(NO_ENDS, jnp.int32), **options
    )
    assert (state.count.tolist(), int(state.cache.used)) == ([3] * 3, 3)
    np.testing.assert_array_equal(state.positions, [4 - 1 + 3, 2 - 1 + 3, 6 - 1 + 3])
    np.testing.assert_array_equal(state.cache.positions[1], [2, 3, 4, *[-1] * 9, 0, 1, *[-1] * 6])
    ends = jnp.array([-1, int(tokens[0, 2])], jnp.int32)
    state, _ = token_decoder()(model, start(model, PROMPTS), stop_ids=ends, **options)
    np.testing.assert_array_equal(state.done, (tokens == ends[1]).any(axis=1))


@pytest.mark.slow
def test_classes_guide_each_sequence() -> None:
    model = tiny.model(classes=3)
    settings = Refinement.from_config(DecodeConfig(guidance=1.5), budget=5)
    state = start(model, PROMPTS[:1] * 3, seeds=[0, 0, 0])
    run = partial(logits_of_next, model, state, jnp.ones((3, 1, 16)), settings=settings, keys=state.keys[:, None])
    logits = run(labels=jnp.array([0, 1, 0], jnp.int32))
    np.testing.assert_array_equal(logits[0], logits[2])
    assert not np.allclose(logits[0], logits[1], atol=1e-2)


# --- several noise samples, copies, gates, and logits that are not numbers ---


@pytest.mark.slow
def test_the_mean_of_several_noise_samples_is_of_probabilities() -> None:
    model, state = tiny.model(), start(tiny.model(), PROMPTS)
    settings = Refinement.from_config(DecodeConfig(), budget=5)
    noise, keys = jax.random.normal(jax.random.key(0), (3, 4, 16)), jax.random.split(jax.random.key(1), (3, 4))
    found = logits_of_next(model, state, noise, settings=settings, keys=keys)
    each = [
        logits_of_next(model, state, noise[:, i : i + 1], settings=settings, keys=keys[:, i : i + 1]) for i in range(4)
    ]
    wanted = np.mean([jax.nn.softmax(logits) for logits in each], axis=0)
    np.testing.assert_allclose(np.exp(found), wanted, atol=1e-4)
    assert np.abs(jax.nn.softmax(each[0]) - wanted).max() > 1e-3


def test_reading_prompts_does_not_depend_on_the_slots_of_their_answers() -> None:
    """With a common prefix, too: empty slots would be constants of the program, which XLA folds for seconds."""
    llm, tokens = tiny.llm("llama"), jnp.array([[5, 17], [80, 3]], jnp.int32)
    keys, prefix = jax.random.split(jax.random.key(0), 2), read_prefix(llm, jnp.arange(8))
    options = {"lengths": jnp.int32([2, 1]), "keys": keys, "prefix": prefix}
    costs = [prefill.lower(llm, tokens, **options, capacity=slots).cost_analysis()["flops"] for slots in (8, 512)]
    assert costs[0] == costs[1]


@pytest.mark.slow
@pytest.mark.parametrize(("samples", "draws"), [(4, [1, 3, 4]), (48, [1, 17, 40])])
def test_each_sequence_has_a_number_of_noise_samples(samples: int, draws: list[int]) -> None:
    """The mean over the first ones, some at a time; a sample more changes it."""
    model, state = tiny.model(), start(tiny.model(), PROMPTS)
    settings = Refinement.from_config(DecodeConfig(), budget=3)
    noise = jax.random.normal(jax.random.key(0), (3, samples, 16))
    keys, run = jax.random.split(jax.random.key(1), (3, samples)), jax.jit(next_logits)
    found, taken = run(model, state, noise, settings=settings, keys=keys, draws=jnp.array(draws))
    each = []
    for i in range(max(draws)):
        logits, _ = run(model, state, noise[:, i : i + 1], settings=settings, keys=keys[:, i : i + 1])
        each.append(jax.nn.softmax(logits))
    probs = np.stack(each)
    for row, count in enumerate(draws):
        np.testing.assert_allclose(np.exp(found[row]), probs[:count, row].mean(axis=0), atol=1e-6)
        if count < len(each):
            assert np.abs(np.exp(found[row]) - probs[: count + 1, row].mean(axis=0)).max() > 1e-5
    assert taken.evaluations.tolist() == [3 * count for count in draws]
    assert taken.passes.tolist() == [3 * -(-count // 16) for count in draws]  # groups of samples


@pytest.mark.slow
def test_copies_share_the_prefill_and_differ_in_their_samples() -> None:
    model = tiny.model()
    alone = generate(model, start(model, PROMPTS), 3, **SAMPLED)
    state = start(model, PROMPTS)
    copied = (answer_keys(jnp.full(3, i, jnp.uint32), jnp.zeros(3, jnp.int32), jnp.arange(3)) for i in range(3))
    keys = jnp.concatenate([keys.at[0].set(state.keys[i]) for i, keys in enumerate(copied)])
    copies = generate(model, fan_out(state, jnp.repeat(jnp.arange(3), 3), keys), 3, **SAMPLED).reshape(3, 3, 6)
    np.testing.assert_array_equal(copies[:, 0], alone)
    assert all(len({row.tobytes() for row in rows}) == 3 for rows in copies)


def test_a_gate_goes_from_full_refinement_to_the_language_model() -> None:
    model = tiny.model()
    answers = {g: generate(model, start(model, PROMPTS), 7, gate=g).tolist() for g in (0.0, 1e-6, 2.0, 100.0)}
    assert answers[0.0] == answers[1e-6]
    assert answers[100.0] == generate(model, start(model, PROMPTS), 1).tolist()
    assert answers[0.0] != answers[100.0]


@pytest.mark.slow
def test_a_token_that_all_skip_costs_no_evaluation(monkeypatch: Any) -> None:
    model, calls = tiny.model(), []
    real = token_step.refine

    def counted(*arguments: Any, **options: Any) -> Any:
        jax.debug.callback(lambda: calls.append(1))
        return real(*arguments, **options)

    monkeypatch.setattr(token_step, "refine", counted)
    run = jax.jit(token_step.refined_logits)
    settings = Refinement.from_config(DecodeConfig(), budget=3)
    state = start(model, PROMPTS)
    for gate, number in [(0.0, 1), (1e-6, 1), (100.0, 0)]:
        calls.clear()
        jax.block_until_ready(run(model, state, gate=jnp.float32([gate]), settings=settings))
        jax.effects_barrier()
        assert len(calls) == number


def test_logits_that_are_not_numbers_stop_one_sequence() -> None:
    model = tiny.model()
    free = generate(model, start(model, PROMPTS), 3)
    state = start(model, PROMPTS)
    state = dataclasses.replace(state, hidden=state.hidden.at[1].set(jnp.nan))
    padding = next(token for token in range(96) if token not in free)
    options = {
        "settings": Refinement.from_config(DecodeConfig(), budget=3),
        "stop_ids": jnp.array([padding, -1]),
        "steps": 3,
    }
    state, (tokens, *_) = token_decoder()(model, state, sampling=SamplingOptions.from_config(DecodeConfig()), **options)
    np.testing.assert_array_equal(tokens[1], [padding] * 3)
    np.testing.assert_array_equal(state.broken, [False, True, False])
    np.testing.assert_array_equal(tokens[::2], free[::2, :3])


def test_a_prefix_costs_no_constant_folding(capfd):
    # Where a prefix is read through a cache with empty slots, XLA folds the scores of these slots, which takes seconds.
    model = dataclasses.replace(base_model.read_architecture(read_config("smollm2_135m").model), num_hidden_layers=1)
    llm = LLM.declare(model, dtype=jnp.float32)
    abstract = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), llm)
    rows, tokens = 200, jax.ShapeDtypeStruct((200, 64), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), rows))
    lengths, before = jax.ShapeDtypeStruct((rows,), jnp.int32), jax.ShapeDtypeStruct((32,), jnp.int32)
    prefix = jax.eval_shape(read_prefix, abstract, before)
    prefill.lower(abstract, tokens, lengths, keys, capacity=256, prefix=prefix).compile()
    assert "Constant folding" not in capfd.readouterr().err
