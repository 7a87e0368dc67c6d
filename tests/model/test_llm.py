"""The backbone: logits equal transformers' for every kind of model, and the cache and padding change nothing."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from l2d_jax.config.schema import ModelConfig
from l2d_jax.model.kv_cache import KVCache
from l2d_jax.model.llm import LLM
from tests.support import tiny
from tests.support.bugs import BUGS
from tests.support.programs import open_base

LENGTH = 512  # tokens
TOLERANCE = 1e-4  # absolute, float32: right code differs by 1e-6 to 1e-5, each wrong one below by more


class Reference(NamedTuple):
    """A model of transformers, in a folder that it wrote, and what it computes."""

    llm: LLM  # read from that folder
    tokens: np.ndarray
    logits: np.ndarray


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory, mesh: Mesh) -> Callable[[str], Reference]:
    torch = pytest.importorskip("torch", reason="transformers computes its logits with torch")
    import transformers

    made: dict[str, Reference] = {}

    def make(kind: str) -> Reference:
        if kind in made:
            return made[kind]
        raw = dict(tiny.CONFIGS[kind])
        name = raw.pop("architectures")[0]
        kind_of_model = getattr(transformers, name)
        theirs = kind_of_model(kind_of_model.config_class(**raw, attn_implementation="eager")).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, parameter in theirs.named_parameters():
                mean, deviation = tiny.scale(key)
                parameter.normal_(mean, deviation, generator=generator)
            tokens = torch.randint(raw["vocab_size"], (1, LENGTH), generator=generator)
            logits = theirs(tokens).logits.numpy()
        folder = tmp_path_factory.mktemp(kind)
        theirs.save_pretrained(folder)
        ours = open_base(ModelConfig(name=str(folder), dtype="float32"), mesh).llm
        made[kind] = Reference(ours, tokens.numpy(), logits)
        return made[kind]

    return make


def difference(llm: LLM, reference: Reference) -> float:
    """The largest difference of a logit."""

    def logits(llm: LLM, tokens: jax.Array) -> jax.Array:
        return llm.logits(llm(tokens, tiny.positions(tokens))[0])

    ours = jax.jit(logits)(llm, jnp.asarray(reference.tokens, jnp.int32))
    return float(np.max(np.abs(np.asarray(ours) - reference.logits)))


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("kind", tiny.CONFIGS)
def test_logits_equal_those_of_transformers(kind: str, reference: Callable[[str], Reference]) -> None:
    wanted = reference(kind)
    assert wanted.llm.architecture == tiny.architecture(kind)
    assert np.std(wanted.logits) > 0.3
    found = difference(wanted.llm, wanted)
    print(f"\n{kind}: {found:.1e} of {np.abs(wanted.logits).max():.1f}")  # shown by -s, for docs/exactness.md
    assert found <= TOLERANCE


# --- the same comparison finds the bugs that such programs have ---


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize(("bug", "kind"), BUGS, ids=lambda value: getattr(value, "__name__", value))
def test_the_comparison_finds(
    bug: Callable[[LLM, pytest.MonkeyPatch], LLM],
    kind: str,
    reference: Callable[[str], Reference],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right = reference(kind)
    found = difference(bug(right.llm, monkeypatch), right)
    print(f"\n{kind}, {bug.__name__}: {found:.1e}")
    assert found > TOLERANCE


# --- cache and padding ---


@jax.jit
def run(llm: LLM, tokens: jax.Array, positions: jax.Array) -> jax.Array:
    return llm.logits(llm(tokens, positions)[0])


@jax.jit
def extend(llm: LLM, tokens: jax.Array, positions: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
    hidden, new = llm(tokens, positions, cache)
    return llm.logits(hidden), cache.extend(new)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama-scaled", "qwen", "mistral", "smollm3-yarn", "gemma3"])
def test_decoding_from_a_cache_equals_the_full_pass(kind: str) -> None:
    """Three prefills and then single tokens, in a cache with room to spare."""
    llm, tokens = tiny.llm(kind), tiny.tokens(2, 12)
    positions = tiny.positions(tokens)
    cache = KVCache.empty(llm.architecture, 2, 20, dtype=jnp.float32)
    pieces = []
    for start, stop in [(0, 3), (3, 6), (6, 9), (9, 10), (10, 11), (11, 12)]:
        logits, cache = extend(llm, tokens[:, start:stop], positions[:, start:stop], cache)
        pieces.append(logits)
    assert int(cache.used) == 12
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), run(llm, tokens, positions), atol=1e-5)


def layout(name: str, count: int, slots: int) -> np.ndarray:
    """The slots of `count` tokens among `slots`."""
    if name == "left":
        return np.arange(slots - count, slots)
    if name == "right":
        return np.arange(count)
    return np.sort(np.random.default_rng(count).choice(slots, count, replace=False))


@pytest.mark.parametrize("name", ["right", "left", "gaps"])
def test_padding_and_batch_mates_change_nothing(name: str) -> None:
    """Ragged sequences in one batch, with the same program for each layout, against each alone and without padding."""
    llm, counts, slots = tiny.llm("qwen"), [7, 3, 7], 12
    tokens, positions = np.array(tiny.tokens(3, slots, seed=1)), np.full((3, slots), -1, np.int32)
    texts = [np.array(tiny.tokens(1, count, seed=row)) for row, count in enumerate(counts)]
    places = [layout(name, count, slots) for count in counts]
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        tokens[row, place], positions[row, place] = text[0], np.arange(len(place))
    together = np.asarray(run(llm, tokens, positions))
    assert np.isfinite(together).all()
    for row, (text, place) in enumerate(zip(texts, places, strict=True)):
        alone = np.asarray(run(llm, text, np.arange(text.shape[1], dtype=np.int32)[None]))
        np.testing.assert_allclose(together[row, place], alone[0], atol=1e-5)


def test_decoding_after_padding_equals_the_full_pass() -> None:
    """One sequence padded on the right, the other on the left: the next token lies in the same slot for both."""
    llm, text = tiny.llm(), np.array(tiny.tokens(2, 6))
    prompts, pad = [4, 3], -1
    positions = np.array([[0, 1, 2, 3, pad], [pad, pad, 0, 1, 2]], np.int32)
    tokens = np.array([[*text[0, :4], 0], [0, 0, *text[1, :3]]], np.int32)
    cache = KVCache.empty(llm.architecture, 2, 7, dtype=jnp.float32)
    _, cache = extend(llm, tokens, positions, cache)
    whole = np.asarray(run(llm, text, np.array(tiny.positions(text))))
    for step in range(2):
        at = np.array([[prompt + step] for prompt in prompts], np.int32)
        logits, cache = extend(llm, np.take_along_axis(text, at, axis=1), at, cache)
        np.testing.assert_allclose(np.asarray(logits)[:, 0], whole[np.arange(2), at[:, 0]], atol=1e-5)


@pytest.mark.parametrize(("platform", "states"), [("tpu", jnp.bfloat16), ("cpu", jnp.float32)])
def test_bfloat16_weights_give_float32_logits(monkeypatch: pytest.MonkeyPatch, platform: str, states: Any) -> None:
    """States between products are in bfloat16, too, but on CPUs."""
    monkeypatch.setattr("l2d_jax.model.llm.platform", lambda: platform)
    llm, tokens = tiny.llm(dtype=jnp.bfloat16), tiny.tokens(1, 5)
    hidden, cache = jax.eval_shape(llm, tokens, tiny.positions(tokens))
    assert {hidden.dtype, cache.k.dtype, cache.v.dtype} == {jnp.dtype(states)}
    assert jax.eval_shape(llm.logits, hidden).dtype == jnp.float32


def test_nothing_that_is_declared_goes_unread() -> None:
    """Each parameter changes the logits."""
    llm, tokens = tiny.llm("qwen"), tiny.tokens(1, 6)
    gradient = jax.jit(jax.grad(lambda llm: jnp.sum(jnp.sin(run(llm, tokens, tiny.positions(tokens))))))(llm)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.asarray(leaf).any(), jax.tree_util.keystr(path)
