"""The training step and decoding, traced from shapes: no weights are created and no device is used."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from l2d_jax.config.schema import Config
from l2d_jax.data.batch import random_batch
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.buckets import sample_bucket
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.parallel.begin import enter
from l2d_jax.decoding.parallel.pace import Order, Pace
from l2d_jax.decoding.parallel.stream import stream_decoder
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.refinement.solver import Grid
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.decoding.state import State
from l2d_jax.distributed import sharding
from l2d_jax.model.axes import LAYER_AXES
from l2d_jax.model.diffusion_path import DiffusionPath
from l2d_jax.model.l2d import Model, small_updates
from l2d_jax.model.llm import LLM
from l2d_jax.training.methods import method_of
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import TrainState, abstract_moments, check_batch, make_step
from l2d_jax.weights import base_model


def lower_train(config: Config, mesh: Mesh) -> jax.stages.Lowered:
    """Lower the training step of a config on a mesh; raises `InputError` if the mesh does not divide the batch."""
    check_batch(config.train, mesh)
    method, architecture = method_of(config), base_model.read_architecture(config.model)
    trained = sharding.abstract(method.declare(architecture), mesh)
    frozen = sharding.abstract(method.declare_frozen(architecture), mesh)
    adam = optimizer(config.optim, config.optim.peak_rate)
    state = TrainState(trained=trained, optimizer=abstract_moments(adam, trained, mesh))
    row = dataclasses.replace(config, train=dataclasses.replace(config.train, batch_size=1, accumulation=1))
    micro = config.train.batch_size // config.train.micro_batches
    placement = NamedSharding(mesh, PartitionSpec(None, sharding.RULES["batch"]))

    def declare(array: Any) -> jax.ShapeDtypeStruct:
        shape = (config.train.micro_batches, micro, *array.shape[1:])
        return jax.ShapeDtypeStruct(shape, array.dtype, sharding=placement)

    batch = jax.tree.map(declare, random_batch(row, architecture.vocab_size))
    key = _replicated(jax.eval_shape(lambda: jax.random.key(0)), mesh)
    step: Any = make_step(adam, config.train, state, mesh, objective=method.loss)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return step.lower(state, frozen, batch, key)


def lower_decode(
    config: Config, mesh: Mesh, *, batch: int, prompt: int, memory: int | None
) -> tuple[jax.stages.Lowered, Order]:
    """Lower decoding after prompts of equal length; also returns the order of evaluations that lanes would choose.

    The program makes `max_new_tokens` tokens, or this number of passes of a stream. `memory`, that of all devices in
    bytes, decides whether updates are merged; None: they are. A method without a path gives a plain language model with
    a budget of 1. Raises `InputError` for an impossible budget.
    """
    architecture, path = base_model.read_architecture(config.model), None
    llm = sharding.abstract(LLM.declare(architecture, dtype=jnp.dtype(config.model.dtype)), mesh)
    if config.train.method == "l2d":
        path = sharding.abstract(DiffusionPath.declare(config.path, architecture), mesh)
    else:
        config = dataclasses.replace(config, decode=dataclasses.replace(config.decode, budget=1, solver="euler"))

    def build(llm: Any, path: Any) -> Model:
        model = Model.build(llm, path)
        if model.can_merge(memory):
            is_apart = model.gains_apart(memory)
            if path is not None and path.adapter is not None:  # with the same shapes
                updating = small_updates(path, llm) if path.config.reader == "lm" else None
                model = dataclasses.replace(model, path=path.with_matrices(llm.layers), updating=updating)
            model = model.apart() if is_apart else model
        return model.reading(refines=config.decode.budget > 1)

    # The constructors need arrays, so the declared model is traced; some of its leaves are absent.
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):  # it says that this is for a TPU
        jaxpr, shapes = jax.make_jaxpr(build, return_shape=True)(llm, path)
        given = dict(zip(jaxpr.jaxpr.invars, jax.tree.leaves((llm, path)), strict=True))

        def place(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:  # the vocabulary vectors, a layer's matrix, an update
            names = [key.name for key in path if hasattr(key, "name")]
            if names[0] == "updating":
                axes = LAYER_AXES[".".join(names[2:])]
                axes = axes if len(axes) == leaf.ndim else ("layers", *axes)  # of one layer, or stacked
            else:
                axes = ("vocab", "diffusion") if len(path) == 1 else LAYER_AXES[names[-1]]
            return leaf.update(sharding=NamedSharding(mesh, sharding.partition(axes, leaf.shape, mesh)))

        paths, tree = jax.tree.flatten_with_path(shapes)
        pairs = zip(jaxpr.jaxpr.outvars, paths, strict=True)
        model = jax.tree.unflatten(tree, [given[name] if name in given else place(*leaf) for name, leaf in pairs])
        pace = Pace(model, batch)
        order = pace.order([config.decode], has_label=False, has_grammar=False)

        def prepare() -> Refinement:
            settings = Refinement.prepare(model, config.decode)
            if order is Order.SEQUENTIAL:
                return settings
            grid = Grid(config.decode.budget, config.decode.end)
            return settings.side_by_side([grid], window=pace.window([config.decode]))

        settings = jax.eval_shape(prepare)
        sampling = jax.eval_shape(lambda: SamplingOptions.from_config(config.decode))
        arrays = {"settings": settings, "sampling": sampling, "stop_ids": jax.ShapeDtypeStruct((2,), jnp.int32)}
        options: dict[str, Any] = {name: _replicated(array, mesh) for name, array in arrays.items()}
        state, count = (
            _decoding_state(config, mesh, model.llm, batch=batch, prompt=prompt),
            config.decode.max_new_tokens,
        )
        if order is Order.STREAM:
            begun = {name: options[name] for name in ("settings", "sampling")}
            stream = jax.eval_shape(partial(enter, size=settings.stages.size), model, state, **begun)
            return stream_decoder().lower(model, _place_rows(stream, mesh), passes=count, **options), order
        samples = sample_bucket(config.decode.draws)
        return token_decoder().lower(model, state, steps=count, noise_samples=samples, **options), order


def _decoding_state(config: Config, mesh: Mesh, llm: LLM, *, batch: int, prompt: int) -> State:
    """The state after `prefill`: sequences over `data` x `fsdp`, heads over `tensor`, if these divide them."""
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch, prompt), (batch,)))
    capacity = config.decode.max_new_tokens
    state = jax.eval_shape(lambda *arguments: prefill(*arguments, capacity=capacity), llm, tokens, lengths, keys)
    return _place_rows(state, mesh)


def _place_rows(state: Any, mesh: Mesh) -> Any:
    axes = {5: ("layers", "batch", "kv_heads", "length", "head_dim"), 2: ("batch", "length"), 1: ("batch",), 0: ()}

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        return leaf.update(sharding=NamedSharding(mesh, sharding.partition(axes[leaf.ndim], leaf.shape, mesh)))

    return jax.tree.map(place, state)


def _replicated(tree: Any, mesh: Mesh) -> Any:
    return jax.tree.map(lambda leaf: leaf.update(sharding=NamedSharding(mesh, PartitionSpec())), tree)
