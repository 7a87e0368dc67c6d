"""Compares what a small model computes on the device with the same model on this machine's CPU, in one process.

The exact value is the CPU's in float32, with products in full. The bounds:

* In float32 with products in full, the device may differ by 1e-4 of the largest entry. Other orders of sums and other
  exponentials change some 1e-6; a mistake in the mathematics changes 1e-3 or more. No decoded token may differ.
* In bfloat16, the CPU rounds only the factors of products, and a GPU also what it adds and keeps between them. Its
  error may be `ROUNDINGS` times the CPU's, both as the root mean square of the difference from the exact value. It was
  1.9 to 2.3 times on a CPU that was made to round everything.
* In float32 as products are by default, a GPU may take factors as TF32. It has 3 bits more than bfloat16. If bits are
  cut off instead of rounded, that costs one. So the error may be `ROUNDINGS` / 4 times the CPU's in bfloat16.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax.config.schema import DecodeConfig, MeshConfig
from l2d_jax.data.batch import Batch
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.model.architecture import Architecture
from l2d_jax.model.context import read_context
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.parity.recording import logits_at
from l2d_jax.training.objective import diffusion_loss
from tests.device.options import Options
from tests.device.table import FAILED, OK, Rows
from tests.support import tiny

Arrays = dict[str, np.ndarray]
BASE = {**tiny.CONFIGS["llama"], "hidden_size": 128, "intermediate_size": 192, "head_dim": 32, "vocab_size": 512}
FULL = 1e-4  # of the largest entry, in float32
ROUNDINGS = 4.0  # errors in bfloat16: on a device, and on a CPU that rounds fewer values
FINER = 4.0  # how much finer TF32 is than bfloat16
ROWS, LENGTH = 3, 64
T = 0.5  # time of the path's logits
BUDGETS, NEW = (1, 3, 15), 16  # of decoded tokens


def small_model(dtype: str, **path: Any) -> Model:
    """A fixed model with all of its parameters random; its language model is rounded to bfloat16 in either dtype."""
    architecture = Architecture.from_hf(BASE)
    llm = _random(LLM.declare(architecture, dtype="bfloat16"), dtype, seed=0)
    return Model.build(llm, _random(DiffusionPath.declare(tiny.path_config(**path), architecture), "float32", seed=1))


def _random(declared: Any, dtype: str, *, seed: int) -> Any:
    """Random values, rounded as declared: layers are four times as wide as those of `tiny`, so these are halved."""
    rng = np.random.default_rng(seed)

    def values(path: Any, leaf: Any) -> jax.Array:
        mean, deviation = tiny.scale(jax.tree_util.keystr(path))
        made = rng.normal(mean, deviation if mean else deviation / 2, leaf.shape)
        return jnp.asarray(made.astype(leaf.dtype).astype(dtype))  # in NumPy, which compiles nothing

    return jax.tree_util.tree_map_with_path(values, declared)


@contextmanager
def on(device: jax.Device, precision: str | None) -> Iterator[None]:
    """Compute on one device, with products at a precision (None: JAX's default); it is also whom programs are for."""
    with ExitStack() as stack:
        stack.enter_context(jax.default_device(device))
        stack.enter_context(jax.set_mesh(make_mesh(MeshConfig(), [device])))
        if precision is not None:
            stack.enter_context(jax.default_matmul_precision(precision))
        yield


def compute(dtype: str) -> Arrays:
    """Logits of the language model and of the path, the loss of a training step, and its gradients as one vector."""
    model, rng = small_model(dtype), np.random.default_rng(0)
    assert model.path is not None
    tokens = rng.integers(BASE["vocab_size"], size=(ROWS, LENGTH + 1)).astype(np.int32)
    weights = (np.arange(LENGTH) < np.array([[64], [50], [20]])).astype(np.float32)
    places = jnp.asarray(tokens[:, :-1]), None, jnp.asarray(tokens[:, 1:])
    batch = Batch(*places, jnp.asarray(weights), jnp.zeros(ROWS, jnp.int32))
    x = 32 * rng.normal(size=(ROWS, LENGTH, model.path.config.width)).astype(np.float32)
    plain, refined, loss, gradients = jax.jit(_all_arrays)(model, batch, x, jax.random.key(5))
    found = {"logits of the language model": plain, f"logits of the path, t = {T}": refined}
    found["loss of a training step"] = loss
    leaves = [np.asarray(leaf).ravel() for leaf in jax.tree.leaves(gradients)]
    found["gradients of a training step"] = np.concatenate(leaves)
    return {name: np.asarray(array, np.float64) for name, array in found.items()}


def _all_arrays(model: Model, batch: Batch, x: jax.Array, key: jax.Array) -> tuple[Any, ...]:
    """One program, for one compilation."""
    context = read_context(model.llm, batch)
    loss, gradients = jax.value_and_grad(lambda path: diffusion_loss(path, model.llm, batch, key)[0])(model.path)
    return model.llm.logits(context.hidden), logits_at(model, context, x, T), loss, gradients


def decode() -> dict[int, list[list[int]]]:
    """Greedy answers in float32 at each budget, one evaluation after the other."""
    model, rng = small_model("float32", start="anchored"), np.random.default_rng(1)
    prompts = number_prompts(rng.integers(BASE["vocab_size"], size=(4, 12)).tolist())
    settings = [DecodeConfig(budget=budget, max_new_tokens=NEW, parallel="off") for budget in BUDGETS]
    return {one.budget: generate_tokens(model, Request(prompts, one)) for one in settings}


def largest(found: np.ndarray, exact: np.ndarray) -> float:
    """The largest difference, as a fraction of the largest entry."""
    return float(np.max(np.abs(found - exact)) / np.max(np.abs(exact)))


def spread(found: np.ndarray, exact: np.ndarray) -> float:
    """The root mean square of the difference, as a fraction of that of the exact value."""
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def run(rows: Rows, options: Options) -> None:
    """Compute on both, and judge."""
    cpu, device = jax.devices("cpu")[0], jax.devices()[-1 if options.rehearse else 0]
    with on(cpu, "highest"):
        exact = compute("float32")
    with rows.guard("float32"), on(device, "highest"):
        judge_full(rows, compute("float32"), exact)
    with rows.guard("float32, decoded tokens"):
        with on(cpu, "highest"):
            wanted = decode()
        with on(device, "highest"):
            judge_tokens(rows, decode(), wanted)
    with rows.guard("bfloat16"):
        with on(cpu, None):
            near = compute("bfloat16")
        with on(device, None):
            judge_rounded(rows, compute("bfloat16"), exact, near, name="bfloat16")
            coarse = compute("float32")
        judge_rounded(rows, coarse, exact, near, name="TF32 allowed", finer=FINER)


def judge_full(rows: Rows, found: Arrays, exact: Arrays) -> None:
    """A row for each array in float32."""
    beside = "largest difference from the CPU / its largest entry"
    for name, array in exact.items():
        rows.judge(f"float32: {name}", largest(found[name], array), FULL, beside=beside)


def judge_tokens(rows: Rows, found: dict[int, list[list[int]]], wanted: dict[int, list[list[int]]]) -> None:
    """A row for each budget: no token may differ."""
    for budget, answers in wanted.items():
        pairs = list(zip(np.ravel(found[budget]), np.ravel(answers), strict=True))
        differ = sum(a != b for a, b in pairs)
        name, beside = f"float32, decoded tokens at budget {budget}", "the CPU's tokens"
        status = FAILED if differ else OK
        rows.add(name, f"{differ} of {len(pairs)} differ", beside, status=status, differ=int(differ))


def judge_rounded(rows: Rows, found: Arrays, exact: Arrays, near: Arrays, *, name: str, finer: float = 1.0) -> None:
    """A row for each array: its error beside that of the CPU in bfloat16."""
    for what, array in exact.items():
        if array.ndim:  # one number, the loss, may be right by chance
            error, allowed = spread(found[what], array), spread(near[what], array)
            beside = f"r.m.s. error / exact value; {allowed:.3g} on the CPU in bfloat16"
            rows.judge(f"{name}: {what}", error, ROUNDINGS / finer * allowed, beside=beside)
