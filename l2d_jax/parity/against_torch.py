"""Compares a path in JAX with the same path in PyTorch, with the class of published folders (`weights/pytorch`).

Both compute in float32, on rows of random tokens and a row of text, with the same noise. The comparisons are: logits of
one evaluation at several t; whole trajectories with every fixed-step solver, with the mean over tokens, and with
guidance if there are classes; and greedy answers, for which each side makes the noise from the same seed. Answers may
differ where two tokens are practically tied. The PyTorch class is the one in this package; code in a folder is never
run. Only one of the two models is in memory at a time, with all logits.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from l2d_jax import loading
from l2d_jax.config.choices import VERIFIED_PATH_TOKENS
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.batch import Batch
from l2d_jax.decoding.generation import generate_tokens
from l2d_jax.decoding.refinement import integrate
from l2d_jax.decoding.refinement.estimates import corrected_hidden, make_target
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import find_solver
from l2d_jax.decoding.requests import Request, number_prompts
from l2d_jax.errors import InputError
from l2d_jax.files import read_json
from l2d_jax.model.context import Context, read_context
from l2d_jax.model.l2d import Model
from l2d_jax.parity.against_transformers import SEED, choose_rows, in_float64, open_theirs, plain_base, require_torch
from l2d_jax.parity.recording import LOGITS, ROUNDINGS, Check, logits_at
from l2d_jax.storage.partial import scratch_folder
from l2d_jax.weights import publish

ANSWER = 16  # largest length of an answer, in tokens
TIMES = (0.1, 0.5, 0.9, 1.0)
SOLVED: Any = {"euler": 5, "midpoint": 7, "heun": 7, "heun3": 7, "rk4": 9, "restart": 5}  # budgets of trajectories
BUDGETS = (1, 3, 15)  # budgets of answers
MEAN: Any = {"velocity": "expectation", "velocity_temperature": 1.5}  # rounding has little effect on it
GUIDANCE = 1.7  # strength, if there are classes


def compare_paths(name: str, *, length: int | None = None) -> Iterator[Check]:
    """All comparisons for the model `name`, on rows of `length` tokens; raises `InputError` if it has no path."""
    require_torch()
    from l2d_jax.weights.pytorch.modeling_l2d import L2DForCausalLM

    about = loading.find(name, dtype="float32")
    if about.path_config is None:
        raise InputError(f"{name} has no diffusion path: compare its language model by --against transformers")
    base = plain_base(name, about)
    loaded = loading.load(name, dtype="float32")
    model, path, architecture = loaded.model, loaded.model.path, loaded.model.llm.architecture
    assert path is not None
    length = min(VERIFIED_PATH_TOKENS, architecture.max_position_embeddings) if length is None else length
    rows = np.stack(list(choose_rows(architecture, loaded.tokenizer, length=length).values()))
    with scratch_folder() as scratch:
        folder = about.path
        if not publish.is_published(folder):
            folder, raw = scratch, read_json(base / "config.json")
            names: dict[str, Any] = {"base": str(base), "base_revision": None, "base_config": raw, "tokenizer": None}
            publish.write_torch_folder(folder, path, architecture, **names)
        ours = dict(our_arrays(model, rows))
        del loaded, model, path
        theirs, doubtful = open_theirs(L2DForCausalLM, folder), dict[str, Check]()
        for check in path_checks(ours, theirs, rows):
            if check.passed() or not check.tolerance:
                yield check
            else:
                doubtful[check.name] = check
        yield from judge_by_rounding(doubtful, theirs, rows)


def path_checks(ours: dict[str, np.ndarray], theirs: Any, rows: Int[np.ndarray, "B T"]) -> Iterator[Check]:
    """Compare the arrays of `our_arrays` with those of a model in PyTorch.

    The bound is 1e-4 of the largest logit or of 1, also for states, which are integrated from logits. No token may
    differ.
    """
    bound = LOGITS
    for name, array in their_arrays(theirs, rows):
        if array.dtype.kind == "i":
            yield Check(f"{name}, tokens that differ", np.sum(ours[name] != array), 0, tolerance=0)
        else:
            if name.startswith("logits"):  # states are also computed from logits
                bound = LOGITS * max(1.0, float(np.abs(array).max()))
            yield Check(name, ours[name], array, tolerance=bound)


def judge_by_rounding(doubtful: dict[str, Check], theirs: Any, rows: Int[np.ndarray, "B T"]) -> list[Check]:
    """The same checks with a bound of at least ten times PyTorch's difference from its float64; casts `theirs`."""
    judged: list[Check] = []
    with in_float64():
        for name, exact in their_arrays(theirs.double(), rows) if doubtful else ():
            if name in doubtful:
                rounding = float(np.abs(doubtful[name].theirs - exact).max())
                judged.append(doubtful[name]._replace(tolerance=max(doubtful[name].tolerance, ROUNDINGS * rounding)))
            if len(judged) == len(doubtful):
                break
    return judged


def our_arrays(model: Model, rows: Int[np.ndarray, "B T"]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield names and arrays to compare, from a model with a path."""
    path, reading = model.path, model.reading(refines=True)
    assert path is not None
    noise, labels = _noise(rows, path.config.width), _labels(rows, path.config.classes)
    tokens = jnp.asarray(rows, jnp.int32)
    batch = Batch(tokens, None, tokens, jnp.ones(rows.shape), jnp.zeros(len(rows), jnp.int32))
    yield "logits of the language model", np.asarray(model.llm.logits(_read(model.llm, batch).hidden))
    context = _read(reading.llm, batch)
    for t in TIMES:
        x = ((1 - t) * path.config.sigma + t) * noise
        yield f"logits at t = {t}", np.asarray(logits_at(reading, context, x, t, labels))
    if labels is not None:
        context = context._replace(labels=jnp.broadcast_to(labels, rows.shape))
    for solver, budget in SOLVED.items():
        settings = Refinement.prepare(
            reading, DecodeConfig(solver=solver, budget=budget, **_guided(path.config.classes), **MEAN)
        )
        states, logits = _solve(reading, context, jnp.asarray(noise), settings, steps=int(settings.steps))
        yield f"logits by {solver}", np.asarray(logits)
        yield f"states by {solver}", np.asarray(states)
    prompts, count = _split(rows)
    numbered = number_prompts(prompts.tolist(), labels=None if labels is None else labels[:, 0].tolist())
    for budget in BUDGETS:
        greedy = DecodeConfig(budget=budget, max_new_tokens=count, **_guided(path.config.classes))
        yield f"answers at budget {budget}", np.array(generate_tokens(model, Request(numbered, greedy)))


def their_arrays(model: Any, rows: Int[np.ndarray, "B T"]) -> Iterator[tuple[str, np.ndarray]]:
    """`our_arrays` for a model in PyTorch."""
    import torch

    width, sigma, classes = (getattr(model.options, name) for name in ("width", "sigma", "classes"))
    tokens, noise, labels = torch.tensor(rows), torch.tensor(_noise(rows, width)), _labels(rows, classes)
    branch, guided = None if labels is None else torch.tensor(labels), _guided(classes)
    seen: list[Any] = []
    with torch.no_grad():
        yield "logits of the language model", model(tokens, budget=1).logits.numpy()
        reading, _ = model.read(input_ids=tokens)
        for t in TIMES:
            x = ((1 - t) * sigma + t) * noise
            yield f"logits at t = {t}", model.logits(model.corrected(x, t, branch, reading)).numpy()
        hook = model.path.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
        for solver, budget in SOLVED.items():
            seen.clear()
            options = {"solver": solver, "budget": budget, "class_labels": branch, **guided, **MEAN}
            yield f"logits by {solver}", model(tokens, noise=noise, **options).logits.numpy()
            stride = (len(seen) - 1) // find_solver(solver).steps(budget)  # evaluations per grid interval
            yield f"states by {solver}", torch.stack(seen[::stride]).numpy()
        hook.remove()
        prompts, count = _split(rows)
        ids, classes = torch.tensor(prompts), None if branch is None else branch[:, 0]
        options = {"sequence_ids": torch.arange(len(rows)), "answer_start": ids.shape[1], "class_labels": classes}
        options |= {"solver": "midpoint", "max_new_tokens": count, "do_sample": False, "eos_token_id": None, **guided}
        for budget in BUDGETS:
            found = model.generate(ids, attention_mask=torch.ones_like(ids), budget=budget, **options)
            yield f"answers at budget {budget}", found[:, ids.shape[1] :].numpy()


_read = jax.jit(read_context)


@partial(jax.jit, static_argnames="steps")
def _solve(model: Model, context: Context, noise: Any, settings: Refinement, *, steps: int) -> tuple[Any, Any]:
    """x at every point of the grid, and the answer's logits."""
    assert model.path is not None
    keys = jax.random.split(jax.random.key(0), noise.shape[:2])
    target = make_target(model, context, settings=settings, keys=keys)
    x = integrate.fixed_states(target, model.path.config.sigma * noise, solver=settings.solver, steps=steps)
    hidden, *_ = corrected_hidden(model, context, x[-1], jnp.ones((1, 1)), table=settings.table)
    return x, model.llm.logits(hidden)


def _noise(rows: np.ndarray, width: int) -> Float[np.ndarray, "B T C"]:
    return np.random.default_rng(SEED).normal(size=(*rows.shape, width)).astype(np.float32)


def _labels(rows: np.ndarray, classes: int) -> Int[np.ndarray, "B 1"] | None:
    return np.arange(len(rows))[:, None] % classes if classes else None


def _split(rows: np.ndarray) -> tuple[Int[np.ndarray, "B P"], int]:
    """The first half of each row as a prompt, and the number of tokens of its answer."""
    length = rows.shape[1]
    return rows[:, : length - length // 2], min(ANSWER, length // 2)


def _guided(classes: int) -> dict[str, Any]:
    return {"guidance": GUIDANCE} if classes else {}
