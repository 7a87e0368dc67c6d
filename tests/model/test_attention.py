"""Every kernel of attention against loops: splash attention as its interpreter runs it, plain attention by mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model import attention as module
from l2d_jax.model.attention import attention, splash

RNG = np.random.default_rng(0)


def normal(*shape: int) -> jax.Array:
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def test_attention_by_loops() -> None:
    """Grouped heads, a gap and an empty slot, and keys in any order of slots."""
    q, k, v = normal(2, 3, 4, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)
    q_positions = jnp.array([[0, 3, 7], [2, 2, 1]], jnp.int32)
    kv_positions = jnp.array([[0, -1, 3, 8, 6], [2, 0, 1, -1, -1]], jnp.int32)
    wanted = np.zeros((2, 3, 4, 8))
    for b in range(2):
        for i in range(3):
            seen = [s for s in range(5) if 0 <= kv_positions[b, s] <= q_positions[b, i]]
            for n in range(4):
                scores = np.array([np.dot(q[b, i, n], k[b, n // 2, s]) / np.sqrt(8) for s in seen])
                shares = np.exp(scores) / np.exp(scores).sum()
                wanted[b, i, n] = sum(share * v[b, n // 2, s] for share, s in zip(shares, seen, strict=True))
    out = attention(q, k, v, q_positions=q_positions, kv_positions=kv_positions)
    np.testing.assert_allclose(out, wanted, atol=1e-5)


def test_one_query_sees_what_it_sees_among_others() -> None:
    rows = 20
    q, k, v = normal(rows, 2, 6, 32), normal(rows, 2, 256, 32), normal(rows, 2, 256, 32)
    kv_positions = jnp.asarray(RNG.permuted(np.tile(np.arange(-6, 250), (rows, 1)), axis=1).clip(-1), jnp.int32)
    q_positions = jnp.asarray(RNG.integers(0, 250, size=(rows, 2)), jnp.int32)
    both = attention(q, k, v, q_positions=q_positions, kv_positions=kv_positions)
    one = attention(q[:, :1], k, v, q_positions=q_positions[:, :1], kv_positions=kv_positions)
    np.testing.assert_allclose(one, both[:, :1], atol=1e-5)


def test_attention_stays_within_a_segment() -> None:
    """Two sequences in a row, against each in a row of its own."""
    q, k, v = normal(1, 5, 4, 8), normal(1, 2, 5, 8), normal(1, 2, 5, 8)
    positions, segments = jnp.array([[0, 1, 0, 1, 2]], jnp.int32), jnp.array([[1, 1, 2, 2, 2]], jnp.int32)
    places = {"q_positions": positions, "kv_positions": positions}
    out = attention(q, k, v, **places, q_segments=segments, kv_segments=segments)
    for part in (slice(0, 2), slice(2, 5)):
        own = {name: values[:, part] for name, values in places.items()}
        alone = attention(q[:, part], k[:, :, part], v[:, :, part], **own)
        np.testing.assert_allclose(out[:, part], alone, atol=1e-6)


def test_attention_of_an_empty_slot_is_finite() -> None:
    empty = jnp.full((1, 2), -1, jnp.int32)
    out = attention(normal(1, 2, 2, 4), normal(1, 1, 2, 4), normal(1, 1, 2, 4), q_positions=empty, kv_positions=empty)
    assert np.isfinite(out).all()


def test_a_few_queries_at_a_time_are_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values and gradients, with ten queries: two halves of five, which cannot be halved again."""
    q, k, v, direction = normal(2, 10, 4, 8), normal(2, 2, 7, 8), normal(2, 2, 7, 8), normal(2, 10, 4, 8)
    places = {"q_positions": jnp.tile(jnp.arange(10), (2, 1)), "kv_positions": jnp.tile(jnp.arange(7), (2, 1))}

    def run(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return jnp.sum(direction * attention(q, k, v, **places))

    whole, gradients = jax.value_and_grad(run, argnums=(0, 1, 2))(q, k, v)
    monkeypatch.setattr(module, "SCORES", 100)
    assert "scan" in str(jax.make_jaxpr(run)(q, k, v))
    some, others = jax.value_and_grad(run, argnums=(0, 1, 2))(q, k, v)
    np.testing.assert_allclose(some, whole, rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), others, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("limit", [2**25, 100])
def test_keys_of_the_prefix_are_those_of_every_row(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """Against the same keys repeated before those of each row; a few queries at a time, too."""
    q, k, v = normal(3, 4, 4, 8), normal(3, 2, 5, 8), normal(3, 2, 5, 8)
    prefix = normal(2, 6, 8), normal(2, 6, 8)
    q_positions = jnp.array([[6, 7, 8, 9], [6, 6, 7, -1], [9, 10, 11, 12]], jnp.int32)
    kv_positions = jnp.array([[6, 7, 8, 9, -1], [6, 7, -1, -1, -1], [-1, 9, 10, 8, 12]], jnp.int32)
    monkeypatch.setattr(module, "SCORES", limit)
    out = attention(q, k, v, q_positions=q_positions, kv_positions=kv_positions, others=[(*prefix, None)])
    both = [jnp.concatenate([jnp.stack([own] * 3), each], axis=2) for own, each in zip(prefix, (k, v), strict=True)]
    places = jnp.concatenate([jnp.tile(jnp.arange(6), (3, 1)), kv_positions], axis=1)
    wanted = attention(q, *both, q_positions=q_positions, kv_positions=places)
    real = q_positions >= 0  # before them, no key is seen, or all those of the prefix are
    np.testing.assert_allclose(out[real], wanted[real], atol=1e-6)
    assert np.isfinite(out).all()


@pytest.fixture
def rows() -> dict[str, jax.Array]:
    """Four rows of 256 tokens: full, padded on the right, padded on the left, and three sequences in one."""
    positions = np.tile(np.arange(256), (4, 1))
    positions[1, 150:] = -1
    positions[2] = np.maximum(np.arange(256) - 100, -1)
    segments = np.zeros((4, 256), int)
    for number, (start, stop) in enumerate([(0, 90), (90, 200), (200, 256)]):
        segments[3, start:stop], positions[3, start:stop] = number, np.arange(stop - start)
    return {"kv_positions": jnp.asarray(positions, jnp.int32), "kv_segments": jnp.asarray(segments, jnp.int32)}


@pytest.mark.slow
@pytest.mark.parametrize("copies", [1, 3])
def test_splash_attention_equals_plain_attention(rows: dict[str, jax.Array], copies: int) -> None:
    """Values and the gradient of the queries, which is all that training asks for."""
    q, direction = normal(4, 256 * copies, 4, 16), normal(4, 256 * copies, 4, 16)
    k, v = normal(4, 2, 256, 16), normal(4, 2, 256, 16)
    is_real = jnp.repeat(rows["kv_positions"] >= 0, copies, axis=1)[..., None, None]

    def value(q: jax.Array, kernel: str) -> tuple[jax.Array, jax.Array]:
        ids = jnp.where(rows["kv_positions"] < 0, -1, rows["kv_segments"])
        out = attention(q, k, v, **rows) if kernel == "plain" else splash(q, k, v, ids, interpret=True)
        return jnp.sum(jnp.where(is_real, out * direction, 0)), jnp.where(is_real, out, 0)

    run = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=1)
    (_, plain), wanted = run(q, "plain")
    (_, out), gradient = run(q, "splash")
    np.testing.assert_allclose(out, plain, atol=2e-6)
    np.testing.assert_allclose(gradient, wanted, atol=2e-6)


@pytest.mark.parametrize("copies", [1, 2])
def test_queries_in_the_slots_of_the_keys_need_no_positions(rows: dict[str, jax.Array], copies: int) -> None:
    q, k, v = normal(4, 256 * copies, 4, 16), normal(4, 2, 256, 16), normal(4, 2, 256, 16)
    places, segments = (jnp.repeat(rows[name], copies, axis=1) for name in ("kv_positions", "kv_segments"))
    given = attention(q, k, v, q_positions=places, q_segments=segments, **rows)
    np.testing.assert_array_equal(attention(q, k, v, **rows), given)


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((2048, 512, 64, 9.0), None),
        ((2048, 512, 256, 9.0), None),
        ((2048, 512, 256, 8.6), "heads of width 256 are not a multiple of 8 up to 128"),
        ((2048, 512, 20, 9.0), "heads of width 20 are not a multiple of 8 up to 256"),
        ((2048, 512, 64, 7.5), "it needs an NVIDIA GPU of compute capability 8.0 or later, and this one has 7.5"),
        ((2048, 511, 64, 9.0), "of 2048 queries and 511 keys, both have to be even: choose an even data.max_length"),
    ],
)
def test_what_the_kernel_of_cudnn_takes(sizes: tuple[int, int, int, float], wanted: str | None) -> None:
    assert module.cudnn_problem(*sizes) == wanted


def test_where_cudnn_has_no_kernel_xla_computes_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (a.astype(jnp.bfloat16) for a in (normal(2, 3, 4, 8), normal(2, 2, 5, 8), normal(2, 2, 5, 8)))
    places = {"q_positions": jnp.full((2, 3), 9), "kv_positions": jnp.tile(jnp.arange(5), (2, 1))}
    wanted = attention(q, k, v, **places)
    monkeypatch.setattr(module.sharding, "platform", lambda: "gpu")
    monkeypatch.setattr(module, "_compute_capability", lambda: 9.0)
    with pytest.warns(UserWarning, match=r"by XLA, more slowly than by cuDNN's kernel: of 3 queries and 5 keys"):
        found = attention(q, k, v, **places)
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize(("length", "wanted"), [(128, True), (2048, True), (200, False), (1, False)])
def test_lengths_that_splash_attention_takes(length: int, wanted: bool) -> None:
    assert module.is_tiled(length) == wanted
