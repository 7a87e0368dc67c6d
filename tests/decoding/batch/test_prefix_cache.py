"""The prefix cache: what was read before is found again, and an answer is what it is without the cache."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import test_util

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding.batch import prefix_cache
from l2d_jax.decoding.batch.lanes import Lanes
from l2d_jax.decoding.batch.prefix_cache import BLOCK, TOGETHER, PrefixCache
from l2d_jax.decoding.batch.prompt_reader import PIECE, Service
from l2d_jax.decoding.requests import UNRESTRICTED, Answer, Prompt, Restrictions
from l2d_jax.decoding.stop_strings import StopSearch
from l2d_jax.errors import InputError
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.l2d import Model
from tests.support import tiny
from tests.support.marks import slow

SETTINGS = DecodeConfig(budget=3, max_new_tokens=12, temperature=1.0)
PLENTY = 2**24  # bytes
TEXT = [1 + (7 * i + i * i // 5) % 90 for i in range(4 * PIECE)]


def of_blocks(count: int) -> PrefixCache:
    """A cache of so many blocks."""
    llm = tiny.llm()
    return PrefixCache(llm, size=count * BLOCK * llm.token_bytes)


def row(ids: Sequence[int], *, before: int = 0) -> KVCache:
    """Keys and values that show their tokens, in slots that are not those of their positions."""
    values = np.zeros((2, 2, 2, before + len(ids), 8), np.float32)
    values[:, 1, :, before:] = np.array(ids)[:, None]
    positions = np.full((2, before + len(ids)), -1, np.int32)
    positions[1, before:] = np.arange(len(ids))
    return KVCache(jnp.array(values), jnp.array(-values), jnp.array(positions), used=jnp.int32(0))


def keep(cache: PrefixCache, ids: Sequence[int], **options: Any) -> None:
    cache.keep("lm", ids, row(ids, **options), row=1)


def test_blocks_come_back_as_they_were_kept() -> None:
    """More of them than one call of the program writes; the rest of a block is not kept, and so not found."""
    cache, ids = of_blocks(40), TEXT[: BLOCK * (TOGETHER + 3) + 5]
    keep(cache, ids, before=7)
    assert cache.used_bytes == (TOGETHER + 3) * BLOCK * cache.size // (40 * BLOCK)
    assert cache.find("path", ids) == []
    assert cache.find("lm", ids[1:]) == []
    places = cache.find("lm", [*ids[: 3 * BLOCK], 0, *ids[3 * BLOCK :]])
    assert len(places) == 3
    places = cache.find("lm", ids)
    assert len(places) == TOGETHER + 3
    tokens = len(places) * BLOCK - 10
    read = cache.load(places, tokens=tokens, slots=tokens + 60)
    np.testing.assert_array_equal(read.positions[0], [*range(tokens), *[-1] * 60])
    np.testing.assert_array_equal(read.k[1, 0, 0, :tokens, 3], ids[:tokens])
    np.testing.assert_array_equal(read.v[0, 0, 1, :tokens, 0], -np.array(ids[:tokens]))
    assert (int(read.used), read.ring) == (tokens, tokens + 60)


def test_the_block_that_was_not_used_for_the_longest_time_makes_room() -> None:
    """The end of a text goes before its beginning, without which it could not be found."""
    cache = of_blocks(4)
    first, second = TEXT[: 2 * BLOCK], TEXT[BLOCK : 3 * BLOCK]
    keep(cache, first)
    keep(cache, second)
    assert len(cache.find("lm", first)) == 2
    keep(cache, TEXT[5 : 5 + BLOCK])
    assert [len(cache.find("lm", ids)) for ids in (second, first)] == [1, 2]
    assert cache.counts.evicted == 1
    keep(cache, TEXT[: 9 * BLOCK])  # more than there is room for
    assert len(cache.find("lm", TEXT)) == 4
    assert cache.find("lm", second) == []
    read = cache.load(cache.find("lm", TEXT), tokens=4 * BLOCK, slots=4 * BLOCK)
    np.testing.assert_array_equal(read.k[1, 0, 0, :, 3], TEXT[: 4 * BLOCK])


def test_a_cache_without_room_for_a_block_is_refused() -> None:
    problem = "a prefix cache of 0.00195312 MiB does not hold 16 tokens, which take 0.00391 MiB here: make it larger"
    with pytest.raises(InputError, match=problem):
        PrefixCache(tiny.llm(), size=2**11)


def test_an_error_leaves_an_empty_cache(monkeypatch: Any) -> None:
    cache = of_blocks(4)
    keep(cache, TEXT[:BLOCK])
    with monkeypatch.context() as patch:
        patch.setattr(prefix_cache, "_store", lambda *_: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            keep(cache, TEXT[: 2 * BLOCK])
    assert (cache.find("lm", TEXT[: 2 * BLOCK]), cache.used_bytes) == ([], 0)
    keep(cache, TEXT[:BLOCK])
    assert len(cache.find("lm", TEXT[:BLOCK])) == 1


def in_lanes(
    model: Model,
    prompts: Sequence[Sequence[int]],
    cache: PrefixCache | None,
    *,
    settings: DecodeConfig = SETTINGS,
    lanes: int = 2,
    label: int | None = None,
    restrictions: Restrictions = UNRESTRICTED,
) -> tuple[list[list[int]], list[int]]:
    """The answers, as requests that come one by one get them, and how many tokens of each prompt were in the cache."""
    opened, told = (
        Lanes(model, lanes=lanes, stop_ids=(95,), service=Service(prefixes=cache, reader="lm")),
        [list[int]() for _ in prompts],
    )
    answers = [
        Answer(n, Prompt(0, ids, label), settings, StopSearch((), None), seed=n) for n, ids in enumerate(prompts)
    ]
    waiting = list(answers)
    for answer in answers:
        answer.restrictions = restrictions
    while waiting or not opened.is_idle:
        if opened.free and waiting:
            opened.admit([waiting.pop(0)])
        for piece in opened.step():
            assert piece.error is None
            told[piece.answer] += piece.tokens
    return told, [answer.cached for answer in answers]


@pytest.mark.parametrize("budget", [1, *slow(3)])
def test_the_next_turn_of_a_chat_reads_only_what_is_new(budget: int) -> None:
    """What was answered is found as well, and nothing is compiled for another length."""
    cache = PrefixCache(tiny.llm(), size=PLENTY)
    model = tiny.model() if budget > 1 else Model.build(tiny.llm(), None)
    settings = dataclasses.replace(SETTINGS, max_new_tokens=40, budget=budget)
    for length in (70, 80):
        first = TEXT[length:][:length]
        [answer], [cached] = in_lanes(model, [first], cache, settings=settings)
        assert cached == 0
        second = [*first, *answer, 5, 6, 7]
        alone = in_lanes(model, [second], None, settings=settings)[0]
        with test_util.count_jit_and_pmap_lowerings() as count:
            assert in_lanes(model, [second], cache, settings=settings) == (alone, [64])
        assert count() == 0 or length == 70
    assert cache.counts.found == 128


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "blocks"), [("auto", 2000), ("auto", 64), ("off", 8), ("on", 64)])
def test_answers_are_those_without_a_cache(parallel: Any, blocks: int) -> None:
    """Long prompts and short ones, some in pieces, next to each other; in each order of evaluations."""
    model, cache = tiny.model(start="anchored"), of_blocks(blocks)
    settings = dataclasses.replace(SETTINGS, parallel=parallel)
    prompts = [
        TEXT[:700],
        [*TEXT[:700], 3, 4, 5],
        TEXT[:300],
        [*TEXT[:120], *[7] * 50],
        TEXT[:65],
        TEXT[:64],
        TEXT[:900],
    ]
    wanted, _ = in_lanes(model, prompts, None, settings=settings)
    assert len({len(answer) for answer in wanted}) > 1
    for _ in range(2):
        answers, cached = in_lanes(model, prompts, cache, settings=settings)
        assert answers == wanted
        assert max(cached) > 0
    following = [[*prompt, *answer, 9, 8, 7] for prompt, answer in zip(prompts, answers, strict=True)]
    wanted, _ = in_lanes(model, following, None, settings=settings)
    assert in_lanes(model, following, cache, settings=settings)[0] == wanted
    assert (cache.counts.evicted > 0) == (blocks < 2000)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["smollm3-yarn", "gemma3", *slow("qwen3")])
def test_layers_with_windows_and_other_ropes(kind: str) -> None:
    model = tiny.model(kind)
    cache = PrefixCache(model.llm, size=PLENTY)
    prompts = [TEXT[:200], [*TEXT[:180], 4, 5, 6], TEXT[:130]]
    wanted, _ = in_lanes(model, prompts, None)
    assert in_lanes(model, prompts, cache) == (wanted, [0, 128, 128])


@pytest.mark.slow
def test_what_changes_the_answer_but_not_the_reading_shares_the_cache() -> None:
    model, cache = tiny.model(classes=3), PrefixCache(tiny.llm(), size=PLENTY)
    in_lanes(model, [TEXT[:200]], cache)
    options: list[dict[str, Any]] = [
        {"settings": dataclasses.replace(SETTINGS, budget=1)},
        {"settings": dataclasses.replace(SETTINGS, solver="euler", budget=5)},
        {"settings": dataclasses.replace(SETTINGS, draws=2)},
        {"label": 1},
        {"restrictions": Restrictions(frequency_penalty=1.5, logit_bias={5: 4.0})},
    ]
    for one in options:
        wanted, _ = in_lanes(model, [TEXT[:200]], None, **one)
        assert in_lanes(model, [TEXT[:200]], cache, **one) == (wanted, [192])


@pytest.mark.slow
def test_a_prompt_that_nobody_waits_for_is_not_kept() -> None:
    """It is dropped between two pieces, of which nothing is kept; what comes next is as ever."""
    model, cache = tiny.model(), PrefixCache(tiny.llm(), size=PLENTY)
    opened = Lanes(model, lanes=2, stop_ids=(), service=Service(prefixes=cache, reader="lm"))
    answer = Answer(0, Prompt(0, TEXT[: 3 * PIECE]), SETTINGS, StopSearch((), None))
    opened.admit([answer])
    assert opened.step() == []
    opened.drop(answer)
    assert opened.is_idle
    assert (opened.step(), cache.used_bytes) == ([], 0)
    wanted, _ = in_lanes(model, [TEXT[: 3 * PIECE]] * 2, None)
    assert in_lanes(model, [TEXT[: 3 * PIECE]] * 2, cache) == (wanted, [0, 3 * PIECE - 64])
