"""Times this code and the authors' PyTorch release, in turns, on the CPUs of one machine, and prints the ratios.

`python -m l2d_jax.authors.speed decode|train --config smollm2_135m --release CHECKOUT
--release_python ENVIRONMENT/bin/python`: weights and tokens are random, in the config's shape. The release runs in a
separate process with the Python you name (`release_model` says what it needs). Both use the same number of threads and
`config.model.dtype`.
"""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from timeit import timeit
from typing import Any

import jax

from l2d_jax import command_line
from l2d_jax.config.schema import Config
from l2d_jax.data.batch import random_batch
from l2d_jax.decoding.refinement.solver import find_solver
from l2d_jax.distributed import runtime
from l2d_jax.errors import InputError, RunError, require
from l2d_jax.performance.decoding_speed import bytes_per_evaluation, decoder, random_model
from l2d_jax.performance.timing import read_rate, turns
from l2d_jax.training.methods import method_of
from l2d_jax.training.optimizer import optimizer
from l2d_jax.training.plans import start_planned
from l2d_jax.training.step import init_state, make_step, micro_batches
from l2d_jax.weights import base_model, release

Ask = Callable[..., Any]
ROOT = Path(__file__).parents[2]


def main() -> None:
    """Parse the command line, start the release, and time both."""
    parser = command_line.Parser(prog="python -m l2d_jax.authors.speed", description=__doc__)
    parser.add_argument("work", choices=["train", "decode"], help="what to time")
    parser.add_argument("--config", default="smollm2_135m", help="a config file, as for training")
    parser.add_argument("--release", type=command_line.local_path, required=True, help="a checkout of the release")
    parser.add_argument("--release_python", type=command_line.local_path, required=True, help="its Python")
    parser.add_argument("--batches", type="Rows", nargs="+", default=[1, 4], help="decode: sequences at a time")
    parser.add_argument("--budget", type="Budget", default=15, help="decode: evaluations per token, after those of 1")
    parser.add_argument("--prompt", type="Tokens", default=64, help="decode: tokens of each prompt, not timed")
    parser.add_argument("--new", type="Tokens", default=16, help="decode: tokens that are generated and timed")
    options, config = parser.parse_with_config()
    with beside(config, options.release, options.release_python) as (ask, multiplied):
        if options.work == "train":
            time_training(config, ask)
        else:
            mesh = runtime.start_jax(config.mesh)
            for batch in options.batches:
                shape = {"batch": batch, "prompt": options.prompt, "new": options.new}
                model = random_model(config, mesh).merged()
                time_decoding(config, model, ask, multiplied, budget=options.budget, **shape)


def time_decoding(
    config: Config, model: Any, ask: Ask, multiplied: int, *, budget: int, batch: int, prompt: int, new: int
) -> None:
    """The release as it is, the same with its vocabulary vectors computed once, and PyTorch's products alone."""
    solver = find_solver(config.decode.solver)
    shape: dict[str, Any] = {"batch": batch, "prompt": prompt, "new": new}
    grid = {"method": {"heun": "heun2"}.get(solver.name, solver.name), "points": solver.steps(budget) + 1}
    theirs = [partial(ask, work="decode", has_table=has_table, **shape, **grid) for has_table in (False, True)]
    ours = [decoder(model, config, budget=each, **shape).generate for each in (1, budget)]
    alone, seconds, released, tabled, multiplying = turns(*ours, *theirs, partial(ask, work="multiply", batch=batch))
    rate, read = read_rate().rate, bytes_per_evaluation(model)
    evaluation = (seconds - alone) / (budget - 1) / new
    print(f"batch {batch}, budget {budget}: {batch * new / seconds:.2f} tokens/s")
    print(f"  the release {batch * new / released:.2f}, ratio {released / seconds:.2f}")
    print(f"  with its table computed once {batch * new / tabled:.2f}, ratio {tabled / seconds:.2f}")
    print(f"  an evaluation {1000 * evaluation:.1f} ms: {read / evaluation / rate:.0%} of {rate / 1e9:.1f} GB/s")
    print(f"  PyTorch's products of the same shapes: {multiplied / multiplying / rate:.0%} of it", flush=True)


def time_training(config: Config, ask: Ask) -> None:
    """A step of both, on rows whose last `config.data.answer_length` positions have a loss."""
    config, mesh, _ = start_planned(config)
    train, length, architecture = config.train, config.data.max_length, base_model.read_architecture(config.model)
    method = method_of(config)
    trained, frozen = method.begin(base_model.BaseFiles(architecture, None, (), None), mesh)
    adam = optimizer(config.optim, config.optim.peak_rate)
    state = init_state(adam, trained, mesh)
    step: Any = make_step(adam, train, state, mesh, objective=method.loss)
    batch = micro_batches(random_batch(config, architecture.vocab_size), train.micro_batches, mesh)

    def run() -> None:
        nonlocal state
        state, results = step(state, frozen, batch, jax.random.key(2))
        float(results["loss"])

    run()  # compiles
    shape = {"batch": train.batch_size, "length": length, "answer": config.data.answer_length or length}
    work = partial(ask, work="train", micro_batches=train.micro_batches, **shape)
    ours, theirs = turns(partial(timeit, run, number=1), work)
    tokens = train.batch_size * length
    print(f"{tokens / ours:.1f} tokens/s; the release {tokens / theirs:.1f}, ratio {theirs / ours:.2f}")


@contextmanager
def beside(config: Config, checkout: Path, python: Path) -> Iterator[tuple[Ask, int]]:
    """What lets the release do a piece of work and returns the seconds, and the bytes that its products read."""
    require(config.model.dtype != "int8", "the release has no int8: set config.model.dtype to float32 or bfloat16")
    known = (config.path.reader, config.path.start) == ("lm", "released")
    require(known, "the release knows no config.path.reader but 'lm' and no config.path.start but 'released'")
    architecture = base_model.read_architecture(config.model)
    base = architecture.options() | {"tie_word_embeddings": architecture.tied}
    if base["rope_scaling"] is not None:
        base["rope_scaling"]["rope_type"] = "llama3"
    described: dict[str, Any] = {"checkout": str(checkout), "base": base, "dtype": config.model.dtype}
    described["family"] = "qwen2" if architecture.qkv_bias else "llama"
    worker = "from l2d_jax.authors.worker import main; main()"
    code = f"import sys; sys.path.append({str(ROOT)!r}); {worker}"
    ours = ("PYTHONPATH", "MALLOC", "GLIBC_TUNABLES")  # `launch/flags.sh` sets the last two for this code
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([python, "-c", code], **pipes, env=environment) as process:
        multiplied = ask_release(process, **described, path=release.options(config.path))
        yield partial(ask_release, process), multiplied


def ask_release(process: "subprocess.Popen[str]", **line: Any) -> Any:
    """What it answers to a line; raises `InputError` for an answer that says so, and `RunError` if there is none."""
    assert process.stdin is not None
    assert process.stdout is not None
    print(json.dumps(line), file=process.stdin, flush=True)
    answer = process.stdout.readline()
    if not answer:
        raise RunError("the process that runs the release has ended: its last lines are above")
    found = json.loads(answer)
    if isinstance(found, dict):
        raise InputError(found["error"])
    return found


if __name__ == "__main__":
    command_line.run(main)
