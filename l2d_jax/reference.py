"""Recomputes what the authors' PyTorch release has recorded in a `reference.npz`, array by array.

Each function takes a group of recorded arrays and yields `Check`s: our value beside theirs, and the tolerance. Where a
solver is checked, its stages are integrated once more by a plain loop over its tableau, beside diffrax.
"""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from l2d_jax import decode, diffusion, objective, solvers, weights
from l2d_jax.config import DecodeConfig, OptimConfig
from l2d_jax.llm import LLM
from l2d_jax.objective import Batch, Context, Draws
from l2d_jax.optim import optimizer
from l2d_jax.refine import Model, Refinement, evaluate, make_target

LOGITS = 1e-4  # absolute, float32
ACTIVATIONS = 1e-5  # relative to the largest entry
GRADIENTS = 1e-3  # relative to the largest entry
METHODS = {"euler": "euler", "midpoint": "midpoint", "rk4": "rk4", "heun2": "heun", "heun3": "heun3"}

Arrays = Mapping[str, np.ndarray]


class Check(NamedTuple):
    """One comparison."""

    name: str
    ours: Any
    theirs: Any
    tolerance: float = LOGITS
    relative: bool = False  # whether the tolerance is a fraction of the largest entry of `theirs`
    judged: bool = True  # False: reported only, since the recorded run met a near tie

    def difference(self) -> float:
        """The largest absolute difference, as a fraction of the largest entry if `relative`."""
        ours, theirs = np.asarray(self.ours, np.float64), np.asarray(self.theirs, np.float64)
        if ours.shape != theirs.shape:
            return float("inf")
        largest = float(np.max(np.abs(ours - theirs), initial=0.0))
        return largest / max(float(np.max(np.abs(theirs), initial=0.0)), 1e-6) if self.relative else largest

    def passed(self) -> bool:
        """Whether the difference is within the tolerance (NaN is not)."""
        return self.difference() <= self.tolerance


def checks(model: Model, arrays: Arrays, meta: Mapping[str, Any]) -> Iterator[Check]:
    """All comparisons that the recorded arrays allow."""
    yield from _forward(model, arrays)
    if model.path is None:
        return
    yield from _intermediate(model, arrays)
    yield from _training(model, arrays)
    yield from _optimizer(model, arrays)
    for key in sorted({name.rsplit(".", 1)[0].removeprefix("ode.") for name in arrays if name.startswith("ode.")}):
        run = meta["odes"][key]
        if run.get("method") in METHODS:
            yield from _trajectory(model, arrays, key, run)
    yield from _generations(model, arrays, meta)


def _forward(model: Model, a: Arrays) -> Iterator[Check]:
    """Logits of the LM, and of one evaluation at given noise."""
    context = _read(model.llm, a["input_ids"])
    yield Check("base_logits", model.llm.logits(context.hidden), a["base_logits"])
    if model.path is None or model.table is None:
        return
    t = jnp.asarray(a["timesteps"])
    x = diffusion.interpolate(model.table[a["target_ids"]], model.path.config.sigma * jnp.asarray(a["noise"]), t)
    yield Check("vocab_table", model.table, a["vocab_table"])
    yield Check("flow_representation_embeds", x, a["flow_representation_embeds"])
    yield Check("l2d_logits", _logits(model, context, x, t), a["l2d_logits"])
    yield Check("l2d_logits_t0.7", _logits(model, context, x, jnp.full((1, 1), 0.7)), a["l2d_logits_t0.7"])
    if "l2d_logits_class" in a:
        labels = jnp.asarray(a["class_labels"], jnp.int32)[:, None]
        yield Check("l2d_logits_class", _logits(model, context, x, t, labels), a["l2d_logits_class"])
    mask = a["lp.attention_mask"][..., None] == 1
    padded = _read(model.llm, a["lp.input_ids"], a["lp.attention_mask"])
    yield Check("lp.base_logits", mask * model.llm.logits(padded.hidden), mask * a["lp.base_logits"])
    yield Check("lp.l2d_logits", mask * _logits(model, padded, x, t), mask * a["lp.l2d_logits"])


def _intermediate(model: Model, a: Arrays) -> Iterator[Check]:
    """Hidden states after each layer, from models cut off after it."""
    path, llm = model.path, model.llm
    assert path is not None
    t, x = jnp.asarray(a["timesteps"]), jnp.asarray(a["flow_representation_embeds"])
    first = path.translation(diffusion.scale_input(x, t, path.config.sigma))
    yield Check("mid.freq", diffusion.time_features(t, path.config.frequency_width), a["mid.freq"])
    yield Check("mid.t_emb", path.time(diffusion.time_features(t, path.config.frequency_width)), a["mid.t_emb"])
    yield Check("mid.flow_in", first, a["mid.flow_in"])
    yield Check("mid.w_d", path.merge_weight(t), a["mid.w_d"])
    for i in range(llm.architecture.num_hidden_layers):
        upto = partial(jax.tree.map, lambda leaf, i=i: leaf[: i + 1])
        cut = LLM(**{**vars_of(llm), "layers": upto(llm.layers)})
        cut_path = type(path)(**{**vars_of(path), "layers": upto(path.layers)})
        context = _read(cut, a["input_ids"])
        yield Check(f"mid.layer{i}.hidden", context.hidden, a[f"mid.layer{i}.hidden"], ACTIVATIONS, relative=True)
        flow = _features(cut_path, cut, x, t, context)
        yield Check(f"mid.layer{i}.flow", flow, a[f"mid.layer{i}.flow"], ACTIVATIONS, relative=True)


def _training(model: Model, a: Arrays) -> Iterator[Check]:
    """One training forward and the gradient of every parameter; the packed batch's loss."""
    path, llm = model.path, model.llm
    batch, draws = _recorded(model, a, "tr")
    value, gradient = _loss_and_gradient(path, llm, batch, draws)
    context = objective.read_context(llm, batch)
    yield Check("tr.loss", value, a["tr.loss"])
    yield Check("tr.logits", llm.logits(objective.correct(path, llm, context, batch, draws)), a["tr.logits"])
    yield Check("pack.loss", _loss(path, llm, *_recorded(model, a, "pack")), a["pack.loss"])
    for name, make in weights.tensors(gradient, weights.PATH_ROWS):
        yield Check(f"grad.{name}", make(), a[f"grad.{name}"], GRADIENTS, relative=True)


def _optimizer(model: Model, a: Arrays) -> Iterator[Check]:
    """Five AdamW steps on one batch, with fresh noise each."""
    path, llm = model.path, model.llm
    adam = optimizer(OptimConfig(), 1e-3)
    moments, losses, norms = adam.init(path), [], []
    for i in range(len(a["opt.losses"])):
        batch, draws = _recorded(model, a, "tr", noise="opt", at=i)
        value, gradient = _loss_and_gradient(path, llm, batch, draws)
        losses.append(value)
        norms.append(jnp.sqrt(sum(jnp.sum(jnp.square(leaf)) for leaf in jax.tree.leaves(gradient))))
        updates, moments = adam.update(gradient, moments, path)
        path = jax.tree.map(jnp.add, path, updates)
    yield Check("opt.losses", jnp.stack(losses), a["opt.losses"])
    yield Check("opt.grad_norms", jnp.stack(norms), a["opt.grad_norms"], GRADIENTS, relative=True)
    for name, make in weights.tensors(path, weights.PATH_ROWS):
        yield Check(f"opt.final.{name}", make(), a[f"opt.final.{name}"])


def _trajectory(model: Model, a: Arrays, key: str, run: Mapping[str, Any]) -> Iterator[Check]:
    """One recorded ODE: diffrax's states on the grid, the final logits, and each stage by the plain loop."""
    assert model.path is not None
    recorded = {name: a[f"ode.{key}.{name}"] for name in ("x0", "t_grid", "traj", "logits", "times", "argmax", "temps")}
    grid, end = recorded["t_grid"], float(run["final_timestep"])
    check = partial(Check, judged=run["robust"])
    annealed = "poly" in key
    settings = Refinement.from_config(
        DecodeConfig(
            solver=METHODS[run["method"]],
            velocity="expectation" if run["x1_estimation"] == "average" else "sample",
            velocity_temperature=1.0 if annealed else _number(run["temperature"]),
            anneal=annealed,
        ),
        budget=1 + solvers.SOLVERS[METHODS[run["method"]]][1] * (len(grid) - 1),
        guidance=1.0 if run["w_g"] is None else run["w_g"],
    )
    context = _context(model, a, key, run)
    samples, times = a.get(f"ode.{key}.samples"), jnp.asarray(recorded["times"], jnp.float32)
    drawn = None if samples is None else jnp.asarray(samples)
    run_arguments = (model, context, settings, drawn, times, jnp.float32(end))
    ours = _states(*run_arguments, jnp.asarray(recorded["x0"]), steps=len(grid) - 1)
    stages = _loop(run_arguments, ours, grid)
    final = _corrected(model, context, ours[-1], jnp.float32(end))
    yield check(f"ode.{key}.traj", ours, recorded["traj"])
    yield check(f"ode.{key}.logits", model.llm.logits(final), recorded["logits"])
    for name, value in stages.items():
        yield check(f"ode.{key}.{name}", value, recorded[name], 0.0 if name == "argmax" else 1e-6)


@partial(jax.jit, static_argnames="steps")
def _states(
    model: Model, context: Context, settings: Refinement, drawn: Any, times: Any, end: Any, x: Any, *, steps: int
) -> Any:
    """diffrax's states on the grid."""
    target = _target(model, context, settings, drawn, times, end)
    return solvers.trajectory(target, x, solver=settings.solver, steps=steps, end=end)


@jax.jit
def _stage(
    model: Model, context: Context, settings: Refinement, drawn: Any, times: Any, end: Any, t: Any, x: Any
) -> tuple[Any, Any]:
    """The velocity at one stage, and the arg max of each branch."""
    target = _target(model, context, settings, drawn, times, end)
    return (target(t, x) - x) / (1 - t), jnp.argmax(model.llm.logits(evaluate(model, context, x, t)), axis=-1)


def _target(model: Model, context: Context, settings: Refinement, drawn: Any, times: Any, end: Any) -> solvers.Target:
    keys = jax.random.split(jax.random.key(0), context.positions.shape)
    target = make_target(model, context, settings=settings, keys=keys, end=end)
    if drawn is None:
        return target

    def injected(t: Any, x: Any) -> Any:  # the drawn tokens are given; beyond them the temperature was zero
        index = jnp.argmin(jnp.abs(times - t))
        token = drawn[jnp.minimum(index, len(drawn) - 1)][:, None]
        assert model.table is not None
        return jnp.where(index < len(drawn), model.table[token], target(t, x))

    return injected


@jax.jit
def _corrected(model: Model, context: Context, x: Any, t: Any) -> Any:
    return evaluate(model, context, x, t)[0]


def _loop(arguments: tuple, states: Any, grid: Any) -> dict[str, Any]:
    """Times, temperatures and arg max of every evaluation, stage by stage from the states on the grid."""
    settings = arguments[2]
    tableau = getattr(solvers.SOLVERS[settings.solver][0], "tableau", None)
    lower = [] if tableau is None else [list(row) for row in tableau.a_lower]
    nodes = [0.0] if tableau is None else [0.0, *tableau.c]
    found: dict[str, list] = {"times": [], "temps": [], "argmax": []}
    step = jnp.float32(grid[-1] / (len(grid) - 1))
    for start, stop, x in zip(grid, grid[1:], states, strict=False):
        slopes: list[Any] = []
        for i, node in enumerate(nodes):
            t = jnp.float32(stop if node == 1 else start + node * (stop - start))
            y = (
                x + (stop - start) * sum((c * k for c, k in zip(lower[i - 1], slopes, strict=True)), 0.0 * x)
                if i
                else x
            )
            found["times"].append(t)
            if 1 - t <= diffusion.END:
                slopes.append(jnp.zeros_like(x))
                continue
            slope, argmax = _stage(*arguments, t, y)
            slopes.append(slope)
            found["temps"].extend([settings.temperature(t, step)] * len(argmax))
            found["argmax"].extend(argmax)
    return {name: np.stack(values) for name, values in found.items()}


def _generations(model: Model, a: Arrays, meta: Mapping[str, Any]) -> Iterator[Check]:
    """Whole autoregressive generations, token by token, with the recorded noise."""
    recorded = meta.get("decode")
    if not recorded:
        return
    labels = recorded["class_labels"]
    prompts = recorded["prompts"]
    width = max(map(len, prompts))
    ids = jnp.array([prompt + [0] * (width - len(prompt)) for prompt in prompts], jnp.int32)
    lengths = jnp.array([len(prompt) for prompt in prompts], jnp.int32)
    count = recorded["max_new_tokens"]
    for name, theirs in recorded["outputs"].items():
        settings = Refinement.from_config(DecodeConfig(solver="euler"), budget=1)
        if name != "base":
            method = name.rstrip("0123456789")
            points = int(name.removeprefix(method))
            budget = 1 + solvers.SOLVERS[method][1] * (points - 1)
            settings = Refinement.from_config(
                DecodeConfig(solver=method), budget=budget, guidance=recorded["guidance_parameter"]
            )
        keys = jax.random.split(jax.random.key(0), len(prompts))
        state = decode.prefill(model.llm, ids, lengths, keys, room=count)
        chosen = []
        for i in range(count):
            noise = (
                jnp.asarray(a[f"dec.{name}.noise"][i, :, 0])
                if name != "base"
                else jnp.zeros((len(prompts), model.path.config.width))
            )
            logits = _next_logits(
                model,
                state,
                noise,
                settings=settings,
                keys=keys,
                labels=None if labels is None or name == "base" else jnp.array(labels, jnp.int32),
            )
            chosen.append(jnp.argmax(logits, axis=-1).astype(jnp.int32))
            state = _advance(model.llm, state, chosen[-1], state.done)
        yield Check(f"dec.{name}", jnp.stack(chosen, axis=1), theirs, 0.0)


_next_logits = jax.jit(decode.next_logits)
_advance = jax.jit(decode.advance)
_llm = jax.jit(LLM.__call__)


def _read(llm: LLM, tokens: np.ndarray, mask: np.ndarray | None = None) -> Context:
    mask = np.ones_like(tokens) if mask is None else mask
    positions = jnp.asarray(np.where(mask == 1, np.cumsum(mask, axis=1) - 1, -1), jnp.int32)
    hidden, cache = _llm(llm, jnp.asarray(tokens, jnp.int32), positions)
    return Context(hidden=hidden, cache=cache, positions=positions)


def _context(model: Model, a: Arrays, key: str, run: Mapping[str, Any]) -> Context:
    padded = ".pad" in key
    context = _read(model.llm, a["lp.input_ids" if padded else "input_ids"], a["lp.attention_mask"] if padded else None)
    last = slice(-1, None) if run["mode"] == "last" else slice(None)
    positions, labels = context.positions[:, last], None
    if run["class_labels"] is not None:
        labels = jnp.broadcast_to(jnp.array(run["class_labels"], jnp.int32)[:, None], positions.shape)
    return Context(hidden=context.hidden[:, last], cache=context.cache, positions=positions, labels=labels)


def _recorded(
    model: Model, a: Arrays, name: str, *, noise: str | None = None, at: int | None = None
) -> tuple[Batch, Draws]:
    """A recorded batch with its draws; `noise` names where the draws are, `at` their index."""
    assert model.path is not None
    noise = noise or name
    labels = a[f"{name}.labels"]
    tokens = jnp.asarray(a[f"{name}.input_ids"], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    classes = a.get(f"{name}.class_labels", np.zeros(len(tokens)))
    batch = Batch(
        tokens=tokens,
        queries=positions,
        targets=jnp.asarray(np.maximum(labels, 0), jnp.int32),
        weights=jnp.asarray(labels >= 0, jnp.float32),
        classes=jnp.asarray(classes, jnp.int32),
    )
    pick = (lambda array: array) if at is None else (lambda array: array[at])
    config = model.path.config
    dropped = None
    if config.classes:
        uniform = pick(a[f"{noise}.drop_uniform"])
        dropped = jnp.where(uniform < config.class_dropout, config.classes, batch.classes[:, None])
    t, unit = (jnp.asarray(pick(a[f"{noise}.{part}"])) for part in ("timesteps", "noise"))
    return batch, Draws(t=t, noise=unit, labels=dropped)


@jax.jit
def _features(path: Any, llm: LLM, x: Any, t: Any, context: Context) -> Any:
    return path.features(llm, x, t, cache=context.cache, positions=context.positions)


def _loss(path: Any, llm: LLM, batch: Batch, draws: Draws) -> jax.Array:
    context = objective.read_context(llm, batch)
    hidden = objective.correct(path, llm, context, batch, draws)
    losses = objective.over_logits(llm, hidden, objective.negative_log_likelihood, batch.targets)
    return objective.average(losses, batch.weights, "token")


_loss_and_gradient = jax.jit(jax.value_and_grad(_loss))


@jax.jit
def _logits(model: Model, context: Context, x: Any, t: Any, labels: Any = None) -> jax.Array:
    update = model.path(model.llm, x, t, cache=context.cache, positions=context.positions, labels=labels)
    return model.llm.logits(context.hidden + update)


def _number(temperature: Any) -> float:
    return 0.0 if isinstance(temperature, str) else float(temperature)


def vars_of(module: Any) -> dict[str, Any]:
    """The fields of a module, to build another from."""
    return {name: getattr(module, name) for name in type(module).__dataclass_fields__}
