"""One optimizer step: gradients summed over micro-batches, then AdamW, in one compiled program.

The caller chooses what is trained and with which loss (`methods`). If the loss, the gradient or the new state is not
finite, a step changes nothing: neither weights nor moments nor their count.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from l2d_jax.config.schema import TrainConfig
from l2d_jax.data.batch import Batch
from l2d_jax.distributed import sharding
from l2d_jax.errors import require
from l2d_jax.model import attention, gathering, layers
from l2d_jax.model.llm import LLM
from l2d_jax.training.objective import loss_weights


def save_all_but_weights(primitive: Any, *_: Any, **parameters: Any) -> bool:
    """A policy that saves everything that a layer computes, except gathered weights, which would be a full copy.

    JAX's `save_anything_except_these_names` would save them as well.
    """
    if primitive.name == "name":
        return bool(parameters["name"] != gathering.NAME)
    return bool(primitive.name != "sharding_constraint")  # a gathered weight, before it is named


REMAT: dict[str, Callable[..., Any]] = {
    # A scan already separates forward and backward pass, so no further barrier is needed.
    name: partial(jax.checkpoint, policy=policy, prevent_cse=False)
    for name, policy in {
        "none": save_all_but_weights,
        "products": jax.checkpoint_policies.save_only_these_names(layers.PRODUCT, attention.NAME),
        "full": jax.checkpoint_policies.nothing_saveable,
        "auto": jax.checkpoint_policies.nothing_saveable,  # if no plan has replaced it
    }.items()
}

# (trained, frozen, batch, key) -> the micro-batch's part of the loss. `frozen` is None if the whole model is trained.
# The weights in the micro-batch are loss weights with respect to the whole batch.
Objective = Callable[[Any, LLM | None, Batch, jax.Array], jax.Array]

# XLA's options by kind of device. If a fusion may take 64 MiB of on-chip memory, the matrix products of v5p run at 98 %
# of peak instead of 80 %; v5e and v6e gain nothing over the default (all compiled, not run).
COMPILER_OPTIONS: dict[str, dict[str, Any]] = {"TPU v5": {"xla_tpu_scoped_vmem_limit_kib": "65536"}}


@nnx.dataclass
class TrainState(nnx.Module):
    """The state that a step updates."""

    trained: Any = nnx.data()  # pytree of float32 weights
    optimizer: Any = nnx.data()  # their Adam moments, with the same placement


def abstract_moments(optimizer: optax.GradientTransformation, trained: Any, mesh: Mesh) -> Any:
    """The optimizer's state as shapes; moments have the shardings of their weights."""
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, weight: moment.update(sharding=weight.sharding),
        jax.eval_shape(optimizer.init, trained),
        trained,
        transform_non_params=lambda count: count.update(sharding=NamedSharding(mesh, PartitionSpec())),
    )


def init_state(optimizer: optax.GradientTransformation, trained: Any, mesh: Mesh) -> TrainState:
    """The state before the first step: all moments are zero."""
    placements = jax.tree.map(lambda moment: moment.sharding, abstract_moments(optimizer, trained, mesh))
    return TrainState(trained=trained, optimizer=jax.jit(optimizer.init, out_shardings=placements)(trained))


def make_step(
    optimizer: optax.GradientTransformation, config: TrainConfig, state: TrainState, mesh: Mesh, *, objective: Objective
) -> Callable[[TrainState, LLM | None, Batch, jax.Array], tuple[TrainState, dict[str, jax.Array]]]:
    """Compile the step: `(state, frozen, batch, key) -> (state, metrics)`; `state` is donated.

    The batch has a leading axis of micro-batches, as `micro_batches` makes it. The loss is the mean over the whole
    batch, however it is divided. Metrics: loss in nats, gradient norm, and whether the update was skipped (0 or 1).
    """

    def step(
        state: TrainState, frozen: LLM | None, batch: Batch, key: jax.Array
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        def accumulate(carry: Any, scanned: tuple[Batch, jax.Array]) -> tuple[Any, None]:
            micro, key = scanned
            return jax.tree.map(jnp.add, carry, jax.value_and_grad(objective)(state.trained, frozen, micro, key)), None

        batch = batch._replace(weights=loss_weights(batch.weights, config.reduction, segments=batch.query_segments))
        zero = jax.tree.map(jnp.zeros_like, (jnp.float32(0), state.trained))
        (value, gradient), _ = jax.lax.scan(accumulate, zero, (batch, jax.random.split(key, config.micro_batches)))
        updates, moments = optimizer.update(gradient, state.optimizer, state.trained)
        new_state = TrainState(trained=optax.apply_updates(state.trained, updates), optimizer=moments)
        norm = optax.tree.norm(gradient)
        # optax.apply_if_finite will not do: it applies the NaN after a number of skips.
        finite = jnp.isfinite(value) & jnp.isfinite(norm) & is_finite(new_state)
        new_state = jax.tree.map(partial(jnp.where, finite), new_state, state)
        return new_state, {"loss": value, "gradient_norm": norm, "skipped": 1 - finite.astype(jnp.float32)}

    placements = jax.tree.map(lambda x: x.sharding, state), NamedSharding(mesh, PartitionSpec())
    options = COMPILER_OPTIONS.get(mesh.devices.flat[0].device_kind)
    return jax.jit(step, donate_argnums=0, out_shardings=placements, compiler_options=options)


def is_finite(tree: Any) -> jax.Array:
    """Whether every entry of every floating-point array is finite."""
    arrays = [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(array)) for array in arrays]))


def check_batch(config: TrainConfig, mesh: Mesh | AbstractMesh) -> None:
    """Raise `InputError` if the mesh does not divide a micro-batch, or is meant for decoding."""
    stationary = mesh.shape["stationary"]
    require(stationary == 1, f"config.mesh.stationary={stationary} is for decoding: use fsdp to train")
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    micro = config.batch_size // config.micro_batches
    sizes = f"{micro} examples (config.train.batch_size {config.batch_size} / accumulation {config.micro_batches})"
    problem = f"a micro-batch of {sizes} does not divide over data x fsdp = {shards} devices"
    require(micro % shards == 0, f"{problem}: use a multiple of {shards}")


def process_rows(config: TrainConfig, mesh: Mesh) -> list[int]:
    """The rows of a batch that this process passes to `micro_batches`, in that order."""
    micro = config.batch_size // config.micro_batches
    held = sharding.rows_on_devices(mesh, micro)
    return [first + row for first in range(0, config.batch_size, micro) for row in held]


def micro_batches(batch: Batch, accumulation: int, mesh: Mesh) -> Batch:
    """Place this process's rows of a batch on the mesh, with a leading axis of micro-batches."""
    placement = NamedSharding(mesh, PartitionSpec(None, sharding.RULES["batch"]))

    def place(array: Any) -> jax.Array:
        array = np.asarray(array)
        split = array.reshape(accumulation, array.shape[0] // accumulation, *array.shape[1:])
        return jax.make_array_from_process_local_data(placement, split)

    return jax.tree.map(place, batch)
