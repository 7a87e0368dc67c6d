"""Recomputes the arrays that were recorded from the authors' PyTorch release in a `reference.npz`."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from l2d_jax.config.schema import OptimConfig
from l2d_jax.data.batch import Batch
from l2d_jax.model import diffusion, lm_head
from l2d_jax.model.context import read_context
from l2d_jax.model.diffusion_path import Conditions, DiffusionPath
from l2d_jax.model.l2d import Model
from l2d_jax.model.llm import LLM
from l2d_jax.parity.adaptive_runs import adaptive_trajectories
from l2d_jax.parity.fixed_step_runs import generations, trajectories
from l2d_jax.parity.recording import Check, Recording, logits_at, read
from l2d_jax.training import objective
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import init_state
from l2d_jax.weights import mapping

ACTIVATIONS = 1e-5  # relative to the largest entry
GRADIENTS = 1e-3  # relative to the largest entry
# The float error of an entry of a gradient, as a fraction of the largest entry of its tensor: twice the error measured
# with dense and LoRA paths of both families, where implementations agree to 2.4e-6.
GRADIENT_NOISE = 5e-6
BFLOAT16 = 5e-2  # relative to the largest entry, for logits and activations of a bfloat16 model


def checks(model: Model, a: Recording) -> Iterator[Check]:
    """All comparisons; for a model without a path, only those of the LM.

    For a bfloat16 model they are relative, and only single evaluations are judged: results of many evaluations
    (gradients at t = 1, chosen tokens) have no bound in this dtype. Raises `InputError` for missing arrays.
    """
    a.require_fit(model)
    single = [forward] if model.path is None else [forward, corrected, intermediate]
    many = [] if model.path is None else [training, optimization, trajectories, adaptive_trajectories, generations]
    is_coarse = model.llm.embed.dtype == jnp.bfloat16
    for group in (*single, *many):
        for check in group(model, a):
            yield check._replace(tolerance=BFLOAT16, relative=True, judged=group in single) if is_coarse else check


def forward(model: Model, a: Recording) -> Iterator[Check]:
    """Check the logits of the LM."""
    yield Check("base_logits", _head(model.llm, read(model.llm, a["input_ids"])), a["base_logits"])
    mask = a["lp.attention_mask"]
    padded = _head(model.llm, read(model.llm, a["lp.input_ids"], mask))
    yield Check("lp.base_logits", mask[..., None] * padded, mask[..., None] * a["lp.base_logits"])


def corrected(model: Model, a: Recording) -> Iterator[Check]:
    """Check the logits of one evaluation of the path with recorded noise."""
    assert model.path is not None
    assert model.table is not None
    context, t = read(model.llm, a["input_ids"]), jnp.asarray(a["timesteps"])
    x = diffusion.interpolate(model.table[a["target_ids"]], model.path.config.sigma * jnp.asarray(a["noise"]), t)
    yield Check("vocab_table", model.table, a["vocab_table"])
    yield Check("flow_representation_embeds", x, a["flow_representation_embeds"])
    yield Check("l2d_logits", logits_at(model, context, x, t), a["l2d_logits"])
    yield Check("l2d_logits_t0.7", logits_at(model, context, x, 0.7), a["l2d_logits_t0.7"])
    if model.path.config.classes:
        labelled = logits_at(model, context, x, t, a["class_labels"][:, None])
        yield Check("l2d_logits_class", labelled, a["l2d_logits_class"])
    mask = a["lp.attention_mask"]
    padded = logits_at(model, read(model.llm, a["lp.input_ids"], mask), x, t)
    yield Check("lp.l2d_logits", mask[..., None] * padded, mask[..., None] * a["lp.l2d_logits"])


def intermediate(model: Model, a: Recording) -> Iterator[Check]:
    """Check embeddings of t and x, and hidden states after each layer, with models whose later layers do nothing."""
    path, llm = model.path, model.llm
    assert path is not None
    assert path.time is not None
    t, x = jnp.asarray(a["timesteps"]), jnp.asarray(a["flow_representation_embeds"])
    features = diffusion.time_features(t, path.config.frequency_width)
    yield Check("mid.freq", features, a["mid.freq"])
    yield Check("mid.t_emb", path.time(features), a["mid.t_emb"])
    yield Check("mid.flow_in", path.translation(diffusion.scale_input(x, t, path.config.sigma)), a["mid.flow_in"])
    yield Check("mid.w_d", path.merge_weight(t), a["mid.w_d"])
    for i in range(llm.architecture.num_hidden_layers):
        cut_llm, cut_path = _cut(llm, path, i + 1)
        context = read(cut_llm, a["input_ids"])
        ours = {"hidden": context.hidden, "flow": _features(cut_path, cut_llm, x, t, context)}
        for name, value in ours.items():
            yield Check(f"mid.layer{i}.{name}", value, a[f"mid.layer{i}.{name}"], ACTIVATIONS, relative=True)


def training(model: Model, a: Recording) -> Iterator[Check]:
    """Check the loss and the gradient of every parameter for one batch, and the loss of the packed batch."""
    assert model.path is not None
    (value, logits), gradient = _gradient(model.path, model.llm, *_batch(model.path, a, "tr"))
    yield Check("tr.loss", value, a["tr.loss"])
    yield Check("tr.logits", logits, a["tr.logits"])
    yield Check("pack.loss", _loss(model.path, model.llm, *_batch(model.path, a, "pack"))[0], a["pack.loss"])
    for name, make in mapping.tensors(jax.device_get(gradient), mapping.PATH_ROWS):
        yield Check(f"grad.{name}", make(), a[f"grad.{name}"], GRADIENTS, relative=True)


def optimization(model: Model, a: Recording) -> Iterator[Check]:
    """Check AdamW steps on one batch, each with new noise.

    Adam divides a gradient by its magnitude, so an entry near zero moves by up to the learning rate in the direction of
    its float error. The same steps with all gradients moved up or down by that error bound the effect.
    """
    path = model.path
    assert path is not None
    adam = optimizer(OptimConfig(), 1e-3)

    @jax.jit
    def update(path: Any, moments: Any, gradient: Any, fraction: Any) -> tuple[Any, Any]:
        updates, moments = adam.update(_moved(gradient, fraction), moments, path)
        return optax.apply_updates(path, updates), moments

    moments = init_state(adam, path, jax.tree.leaves(path)[0].sharding.mesh).optimizer
    states = dict.fromkeys((0.0, -GRADIENT_NOISE, GRADIENT_NOISE), (path, moments))
    losses, norms = [], []
    for step in range(len(a["opt.losses"])):
        (value, _), gradient = _gradient(states[0.0][0], model.llm, *_batch(path, a, "tr", noise="opt", at=step))
        states = {fraction: update(*state, gradient, fraction) for fraction, state in states.items()}
        losses.append(value)
        norms.append(optax.tree.norm(gradient))
    yield Check("opt.losses", np.stack(losses), a["opt.losses"])
    yield Check("opt.grad_norms", np.stack(norms), a["opt.grad_norms"], GRADIENTS, relative=True)
    finals = (mapping.tensors(jax.device_get(path), mapping.PATH_ROWS) for path, _ in states.values())
    for (name, make), (_, make_low), (_, make_high) in zip(*finals, strict=True):
        final, low, high = make(), make_low(), make_high()
        noise = np.maximum(np.abs(low - final), np.abs(high - final))
        yield Check(f"opt.final.{name}", final, a[f"opt.final.{name}"], noise=noise)


def _moved(gradient: DiffusionPath, fraction: Any) -> DiffusionPath:
    """Add to every entry a fraction of the largest entry of its tensor; tensors of layers are stacked."""

    def move(place: Any, g: jax.Array) -> jax.Array:
        is_stacked = jax.tree_util.keystr(place).startswith(".layers")
        return g + fraction * jnp.max(jnp.abs(g), axis=tuple(range(int(is_stacked), g.ndim)), keepdims=True)

    return jax.tree_util.tree_map_with_path(move, gradient)


def _batch(
    path: DiffusionPath, a: Recording, name: str, *, noise: str | None = None, at: Any = ...
) -> tuple[Batch, objective.Corruption]:
    """A recorded batch with its random values; `noise` is the prefix of their names, `at` their index."""
    labels, tokens = a[f"{name}.labels"], jnp.asarray(a[f"{name}.input_ids"], jnp.int32)
    targets, weights = jnp.asarray(np.maximum(labels, 0), jnp.int32), jnp.asarray(labels >= 0, jnp.float32)
    classes = jnp.asarray(a[f"{name}.class_labels"] if path.config.classes else np.zeros(len(tokens)), jnp.int32)
    batch = Batch(tokens=tokens, queries=None, targets=targets, weights=weights, classes=classes)

    def draw(part: str) -> jax.Array:
        return jnp.asarray(a[f"{noise or name}.{part}"][at])

    dropped = None
    if path.config.classes:
        is_dropped = draw("drop_uniform") < path.config.class_dropout
        dropped = jnp.where(is_dropped, path.config.classes, batch.classes[:, None])
    return batch, objective.Corruption(t=draw("timesteps"), noise=draw("noise"), labels=dropped)


def _cut(llm: LLM, path: DiffusionPath, count: int) -> tuple[LLM, DiffusionPath]:
    """The models with only `count` active layers: the outputs of the others are multiplied by zero."""

    def cut(leaf: Any) -> Any:
        kept = np.asarray(leaf) * (np.arange(len(leaf)) < count).reshape(-1, *[1] * (leaf.ndim - 1))
        return jax.device_put(kept, leaf.sharding)

    layers = dataclasses.replace(llm.layers, o=cut(llm.layers.o), down=cut(llm.layers.down))
    modulation = jax.tree.map(cut, path.layers.modulation)  # gates of zero
    cut_path = dataclasses.replace(path, layers=dataclasses.replace(path.layers, modulation=modulation))
    return dataclasses.replace(llm, layers=layers), cut_path


_head = jax.jit(lambda llm, context: llm.logits(context.hidden))
_features = jax.jit(lambda path, *read: path(*read, conditions=Conditions(None, jnp.ones(1))))  # only f_d


@jax.jit
def _loss(path: DiffusionPath, llm: LLM, batch: Batch, draws: objective.Corruption) -> tuple[jax.Array, jax.Array]:
    logits = llm.logits(objective.correct(path, llm, read_context(llm, batch), batch, draws))
    losses = lm_head.negative_log_likelihood(logits.reshape(-1, logits.shape[-1]), batch.targets.reshape(-1))
    return jnp.sum(losses.reshape(batch.targets.shape) * objective.loss_weights(batch.weights, "token")), logits


_gradient = jax.jit(jax.value_and_grad(_loss, has_aux=True))
