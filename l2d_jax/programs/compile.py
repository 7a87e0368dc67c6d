"""Compiles the training step and decoding for a TPU slice, and reads the compiler's figures."""

import dataclasses
import hashlib
import importlib.metadata
import json
import math
import sys
import time
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.decoding import sampler
from l2d_jax.decoding.parallel.pace import Order
from l2d_jax.decoding.refinement.solver import find_solver
from l2d_jax.distributed.sharding import decoding_mesh, make_mesh, mesh_sizes
from l2d_jax.files import cache_folder, read_json, write_whole
from l2d_jax.performance import costs, lowering, tpu_estimate
from l2d_jax.performance.hlo_cost import Decided
from l2d_jax.performance.topologies import GENERATIONS, GIB, Topology
from l2d_jax.training import plans
from l2d_jax.weights import base_model

LIBRARIES = ("jax", "jaxlib", "libtpu", "flax", "optax", "diffrax")  # libraries on which the compiled program depends
PACKAGE = Path(__file__).parents[1]  # the package whose source the answers depend on
EVERY = 10  # seconds between lines of progress

Work = Literal["train", "decode"]


@dataclass(frozen=True)
class Question:
    """What is compiled, and for which devices."""

    work: Work
    config: Config
    topology: Topology
    batch: int  # decoding: sequences at a time
    prompt: int  # decoding: tokens of each prompt
    passes: float  # decoding as a stream: passes over the weights per token

    def key(self) -> str:
        """A hash of everything that determines the answer: the question, the libraries, the source of this package."""
        versions = [importlib.metadata.version(name) for name in LIBRARIES]
        files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".toml"))
        asked = asdict(self)
        if self.work == "train":
            del asked["batch"], asked["prompt"], asked["passes"]
        text = json.dumps([asked, str(base_model.read_architecture(self.config.model)), versions], sort_keys=True)
        return hashlib.sha256(text.encode() + b"".join(path.read_bytes() for path in files)).hexdigest()[:24]


def run(options: Namespace, config: Config) -> int:
    """Compile what is not in the cache, and print the figures; returns 1 if a program does not fit."""
    works: tuple[Work, ...] = ("train", "decode") if options.work == "both" else (options.work,)
    jax.config.update("jax_platforms", "cpu")  # otherwise a TPU of this machine would be started
    topology = Topology.parse(options.topology, slices=options.slices)
    devices = topology.devices()
    make_mesh(config.mesh, devices)  # raises if the sizes do not fit
    find_solver(config.decode.solver).steps(config.decode.budget)

    def ask(work: Work, config: Config, *, folder: Path | None = None) -> dict[str, Any]:
        question = Question(work, config, topology, options.batch, options.prompt, options.passes)
        return answer(question, make_mesh(config.mesh, devices), folder=folder)

    if options.search:
        plans.add_plans(config, devices, plans.search_plans(config, devices, partial(ask, "train")))
    plan, answers = plans.choose_plan(config, devices), {}
    for work in works:
        planned = plans.apply_plan(plan, config)
        if work == "decode":
            kv_heads = base_model.read_architecture(config.model).num_key_value_heads
            mesh = decoding_mesh(config.mesh, rows=options.batch, kv_heads=kv_heads, devices=len(devices))
            planned = dataclasses.replace(config, mesh=mesh)
        answers[work] = found = ask(work, planned, folder=options.hlo)
        if not options.json:
            sizes = " x ".join(f"{name}={size}" for name, size in mesh_sizes(planned.mesh, len(devices)).items())
            origin = "from the cache" if found["cached"] else f"compiled in {found['seconds of compiling']:.0f} s"
            title = f"{work} on {topology.name}, {len(devices)} devices, {sizes} ({origin}); per device:"
            chosen = [plans.plan_text(plan, devices)] if work == "train" else []
            lines = [title, *chosen, *tpu_estimate.estimate_lines(found, top=options.top)]
            print("\n  ".join(lines).replace("\n  \n", "\n\n"), end="\n\n", flush=True)
    if options.json:
        print(json.dumps(answers))
    return 0 if all(tpu_estimate.fits(found) for found in answers.values()) else 1


def answer(question: Question, mesh: Mesh, *, folder: Path | None = None) -> dict[str, Any]:
    """The figures of a program, from `tpu_estimate` or from the cache.

    With a `folder`, the cache is not read, and the optimized program is written there as `train.hlo` or `decode.hlo`.
    """
    file = cache_folder() / "estimates" / f"{question.key()}.json"
    if file.exists() and folder is None:
        return {**read_json(file), "cached": True}
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        compiling = pool.submit(compile_and_read, question, mesh, folder)
        while not wait([compiling], timeout=EVERY).done:
            work = f"compiling {question.work} for {question.topology.name}"
            print(f"{work}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    found = compiling.result()
    found["seconds of compiling"] = time.monotonic() - began
    file.parent.mkdir(parents=True, exist_ok=True)
    write_whole(file, json.dumps(found))
    return {**found, "cached": False}


def compile_and_read(question: Question, mesh: Mesh, folder: Path | None) -> dict[str, Any]:
    """Compile the program, which takes minutes, and read its figures; raises `InputError` as `lowering` does."""
    config, architecture = question.config, base_model.read_architecture(question.config.model)
    generation = GENERATIONS[question.topology.kind]
    trips = find_solver(config.decode.solver).steps(config.decode.budget)
    if question.work == "train":
        lowered = lowering.lower_train(config, mesh)
        tokens = config.train.batch_size * config.data.max_length
        flops = sum(costs.flops_per_step(config, architecture).values())
    else:
        sizes = {"batch": question.batch, "prompt": question.prompt, "memory": int(generation.usable * GIB * mesh.size)}
        lowered, order = lowering.lower_decode(config, mesh, **sizes)
        passes = question.passes if order is Order.STREAM else 1.0  # otherwise the program makes one pass per token
        tokens = round(question.batch * config.decode.max_new_tokens / passes)
        flops = tokens * costs.flops_per_decoded_token(config, architecture)
        trips = math.ceil(question.passes) if order is Order.PARALLEL else trips
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        refused = tpu_estimate.too_large(str(error))
        if refused is None:
            raise
        return refused
    text = compiled.as_text() or ""
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{question.work}.hlo").write_text(text)
    useful = flops / mesh.size  # without recomputation
    memory, decided = compiled.memory_analysis(), Decided(trips, sampler.skipped(config.decode))
    found = tpu_estimate.read_estimate(memory, text, generation, useful=useful, tokens=tokens, decided=decided)
    return found if question.work == "train" else found | {"evaluations": order.value}
