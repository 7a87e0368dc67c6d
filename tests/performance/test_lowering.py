"""The programs that are traced from shapes are those that run."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from l2d_jax.data.batch import random_batch
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.decode import token_decoder
from l2d_jax.decoding.parallel.pace import Order
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.decoding.sampler import SamplingOptions
from l2d_jax.performance import lowering
from l2d_jax.performance.decoding_speed import random_model
from l2d_jax.training.methods import METHODS, method_of
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.step import init_state, make_step, micro_batches
from l2d_jax.weights.base_model import BaseFiles, read_architecture
from tests.support.programs import config


def operations(lowered: jax.stages.Lowered) -> set[str]:
    """The lines of a program, without placements and the numbers of values and of functions, whose sharing varies.

    Nor are reshapes to the shape that is there: jax 0.12 leaves some, where an argument is placed.
    """
    lines = [re.sub(r"%\w+(:\d+)?(#\d+)?|_\d+\b", "%", line) for line in lowered.as_text().splitlines()]
    return {line for line in lines if "sdy." not in line and not re.search(r"reshape % : \((.*)\) -> \1$", line)}


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_training_step_is_that_of_training(method, mesh):
    options = config(train__accumulation=2, train__method=method, lora__modules="('q_proj', 'o_proj')")
    architecture = read_architecture(options.model)
    adam = optimizer(options.optim, options.optim.peak_rate)
    trained, llm = method_of(options).begin(BaseFiles(architecture, None, (), None), mesh)
    state = init_state(adam, trained, mesh)
    batch = micro_batches(random_batch(options, architecture.vocab_size), 2, mesh)
    step = make_step(adam, options.train, state, mesh, objective=method_of(options).loss)
    real = step.lower(state, llm, batch, jax.random.key(0))
    assert operations(lowering.lower_train(options, mesh)) == operations(real)


@pytest.mark.slow
@pytest.mark.parametrize(
    "beyond", [{}, {"path__start": "anchored", "path__reader": "path"}], ids=["released", "reading"]
)
def test_decoding_is_that_of_generation(mesh, beyond):
    options = config(decode__max_new_tokens=2, decode__parallel="off", **beyond)
    model = random_model(options, mesh).merged()
    llm = dataclasses.replace(model.llm, in_place=False)  # as on other platforms
    model = dataclasses.replace(model, llm=llm).reading(refines=True)
    settings = Refinement.prepare(model, options.decode)
    keys = jax.random.split(jax.random.key(0), 2)
    state = prefill(model.llm, jnp.zeros((2, 8), jnp.int32), jnp.full(2, 8, jnp.int32), keys, capacity=2)
    real = token_decoder().lower(
        model,
        state,
        settings=settings,
        sampling=SamplingOptions.from_config(options.decode),
        stop_ids=jnp.zeros(2, jnp.int32),
        steps=2,
        noise_samples=1,
    )
    found, order = lowering.lower_decode(options, mesh, batch=2, prompt=8, memory=None)
    assert order is Order.SEQUENTIAL
    assert operations(found) == operations(real)
