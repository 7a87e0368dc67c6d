"""Compares the attention of the device, values and gradients, with attention written out in NumPy, in float64.

The bounds are of the root mean square of the difference, as a fraction of the exact value's. In float32 with products
in full it is 1e-5. In bfloat16 a kernel rounds probabilities and outputs, by at most 2^-8 each; the bound is the sum. A
mask that is wrong in one of 256 rows changes some 5 %.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.model.attention import attention
from tests.device.numerics import on, spread
from tests.device.options import Options
from tests.device.table import Rows

NAMES = ("values", "gradient")
BOUNDS = {"float32": 1e-5, "bfloat16": 2.0**-7}


class Case(NamedTuple):
    """Shapes and masks of an attention."""

    name: str
    rows: int = 2
    slots: int = 256
    copies: int = 1  # queries of each slot; 0: one query, at the end
    heads: tuple[int, int] = (8, 2)  # of queries, and of keys
    width: int = 64
    is_padded: bool = False
    segments: int = 1  # sequences in each row
    window: int | None = None
    prefix: int = 0  # keys of a common prefix
    has_gradient: bool = True  # whether the gradient is compared, too


CASES = (
    Case("causal"),
    Case("causal, 2048 tokens", rows=1, slots=2048, heads=(4, 1)),
    Case("causal, heads of 128", width=128),
    Case("a length that no tile divides", slots=202),
    Case("an odd length, values only", slots=203, has_gradient=False),  # cuDNN has no gradient there with a mask
    Case("padding on both sides", is_padded=True),
    Case("three sequences in a row", segments=3),
    Case("two queries for each slot, padding", copies=2, is_padded=True),
    Case("a window of 37", window=37),
    Case("one query", copies=0, rows=20),
    Case("one query, window, common prefix", copies=0, window=300, prefix=50),
)


def inputs(case: Case) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The arrays of a case (q, k, v, and a direction for the gradient), and its positions and segments."""
    rng = np.random.default_rng(0)
    n, k = case.heads
    positions = np.tile(np.arange(case.slots), (case.rows, 1))
    if case.is_padded:
        positions[0, case.slots // 2 :] = -1
        positions[1] = np.maximum(np.arange(case.slots) - case.slots // 3, -1)
    numbers = np.tile(np.arange(case.slots) * case.segments // case.slots, (case.rows, 1))
    for number in range(case.segments):
        positions = np.where((numbers == number) & (number > 0), positions - np.argmax(numbers[0] == number), positions)
    positions = np.where(positions < 0, -1, positions + case.prefix)
    places = {"kv_positions": positions, "q_positions": np.repeat(positions, max(case.copies, 1), axis=1)}
    if case.copies == 0:
        places["q_positions"] = positions[:, -1:]
    if case.segments > 1:
        places |= {"kv_segments": numbers, "q_segments": np.repeat(numbers, case.copies, axis=1)}
    queries, keys = (case.rows, places["q_positions"].shape[1]), (case.rows, k, case.slots)
    shapes: dict[str, tuple[int, ...]] = {
        "q": (*queries, n, case.width),
        "k": (*keys, case.width),
        "v": (*keys, case.width),
    }
    shapes |= {"direction": (*queries, n, case.width)}
    if case.prefix:
        shapes |= dict.fromkeys(("prefix_k", "prefix_v"), (k, case.prefix, case.width))
    arrays = {name: np.asarray(jnp.asarray(rng.normal(size=shape), jnp.bfloat16)) for name, shape in shapes.items()}
    return arrays, {name: place.astype(np.int32) for name, place in places.items()}


def exact(case: Case, arrays: dict[str, np.ndarray], places: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """The output, and the gradient of its product with the direction with respect to the queries, in float64."""
    wide = {name: array.astype(np.float64) for name, array in arrays.items()}
    group = case.heads[0] // case.heads[1]
    k, v = (np.repeat(wide[name], group, axis=1) for name in ("k", "v"))
    behind = places["q_positions"][:, :, None] - places["kv_positions"][:, None]
    mask = (behind >= 0) & (places["kv_positions"][:, None] >= 0) & (behind < (case.window or np.inf))
    if "q_segments" in places:
        mask &= places["q_segments"][:, :, None] == places["kv_segments"][:, None]
    if case.prefix:  # every query sees all of it
        k, v = (_behind(wide[f"prefix_{name}"], array, group) for name, array in (("k", k), ("v", v)))
        mask = np.concatenate([np.ones((*mask.shape[:2], case.prefix), bool), mask], axis=2)
    scores = np.einsum("btnh,bnsh->bnts", wide["q"], k) * case.width**-0.5
    scores = np.where(mask[:, None], scores, -1e30)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs = weights / weights.sum(axis=-1, keepdims=True)
    out = np.einsum("bnts,bnsh->btnh", probs, v)
    pulled = np.einsum("btnh,bnsh->bnts", wide["direction"], v)
    pulled = probs * (pulled - (probs * pulled).sum(axis=-1, keepdims=True))
    return out, np.einsum("bnts,bnsh->btnh", pulled, k) * case.width**-0.5


def _behind(prefix: np.ndarray, own: np.ndarray, group: int) -> np.ndarray:
    """The keys of a prefix, for all rows and heads, and those of each row behind them."""
    wide = np.repeat(prefix, group, axis=0)
    return np.concatenate([np.broadcast_to(wide, (len(own), *wide.shape)), own], axis=2)


def ours(case: Case, arrays: dict[str, np.ndarray], places: dict[str, Any], dtype: str) -> tuple[np.ndarray, ...]:
    """The same by `attention`, on the current device."""
    given = {name: jnp.asarray(array, dtype) for name, array in arrays.items()}
    known = {name: jnp.asarray(place) for name, place in places.items()}
    if case.copies > 0:  # queries in the slots of the keys
        known = {name: place for name, place in known.items() if name.startswith("kv")}
    others = [(given["prefix_k"], given["prefix_v"], None)] if case.prefix else []
    window = None if case.window is None else jnp.int32(case.window)
    real = jnp.asarray(places["q_positions"] >= 0)[..., None, None]  # the others see no key

    def value(q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = attention(q, k, v, others=others, window=window, **known)
        out = jnp.where(real, out, 0)
        return jnp.sum(out.astype(jnp.float32) * given["direction"].astype(jnp.float32)), out

    read = given["q"], given["k"], given["v"]
    if not case.has_gradient:
        return (np.asarray(jax.jit(value)(*read)[1], np.float64),)
    (_, out), gradient = jax.jit(jax.value_and_grad(value, has_aux=True))(*read)
    return np.asarray(out, np.float64), np.asarray(gradient, np.float64)


def run(rows: Rows, options: Options) -> None:
    """A row for each case and dtype."""
    device = jax.devices()[0]
    for case in CASES:
        if options.rehearse and case.slots > 1000:
            case = case._replace(slots=300)
        arrays, places = inputs(case)
        real = places["q_positions"] >= 0
        wanted = exact(case, arrays, places)
        for dtype, bound in BOUNDS.items():
            if device.platform == "cpu" and dtype == "bfloat16" and not case.copies:
                continue  # CPUs decode in float32: their scores of one query would be rounded
            with rows.guard(f"{case.name}, {dtype}"), on(device, "highest" if dtype == "float32" else None):
                found = ours(case, arrays, places, dtype)
                errors = [spread(a[real], b[real]) for a, b in zip(found, wanted, strict=False)]
                parts = ", ".join(f"{name} {error:.2g}" for name, error in zip(NAMES, errors, strict=False))
                beside = f"/ r.m.s. of float64 in NumPy: {parts}"
                rows.judge(f"{case.name}, {dtype}", max(errors), bound, beside=beside)
