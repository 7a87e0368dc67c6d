"""Trains a diffusion path: `python -m l2d_jax.train --config configs/smollm2_135m.py --workdir DIR`.

Or, for comparison, the language model itself (`config.train.method`: `methods`). The same command again resumes from
the newest checkpoint. Only what is trained, its optimizer state and the step are saved: a frozen model is read from
where it came from, and the order of the data is a function of the step.
"""

import contextlib
import dataclasses
import math
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from l2d_jax import command_line
from l2d_jax.config import config_file
from l2d_jax.config.schema import Config
from l2d_jax.data import rows
from l2d_jax.data.batch import count_text
from l2d_jax.data.examples import Examples
from l2d_jax.decoding.refine import Refinement
from l2d_jax.distributed import processes, runtime
from l2d_jax.errors import InputError, RunError
from l2d_jax.performance import cost_tables
from l2d_jax.performance.cost_tables import variant_table
from l2d_jax.training import profiler, time_density
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.methods import method_of
from l2d_jax.training.metrics import Metrics, StepLog
from l2d_jax.training.optimizer import optimizer, schedule
from l2d_jax.training.preemption import STOPPED, Preemption
from l2d_jax.training.step import TrainState, begin, check_batch, local_rows, make_step, micro_batches
from l2d_jax.training.validation import placed_in_order
from l2d_jax.training.workdir import claim, differences, hold, is_measured, plain
from l2d_jax.weights import model_folder


def main() -> int | None:
    """Parse the command line, then train or, with `--dry_run`, say what training would take."""
    parser = command_line.Parser(prog="python -m l2d_jax.train", description=__doc__)
    parser.add_argument("--config", required=True, help=config_file.CONFIG_HELP)
    parser.add_argument("--workdir", type=command_line.local_path, help="where config, checkpoints and metrics go")
    parser.add_argument("--dry_run", action="store_true", help="print parameters, memory and FLOPs; no weights needed")
    listing = "list the variants of the config file, with their trainable parameters; overrides do not count"
    parser.add_argument("--variants", action="store_true", help=listing)
    options, config = parser.parse_with_config()
    if options.variants:
        print(variant_table(options.config))
        return 0
    if options.dry_run:
        mesh = runtime.start_jax(config.mesh)
        print(cost_tables.cost_table(config, model_folder.read_architecture(config.model), mesh))
        return 0
    if options.workdir is None:
        raise InputError("--workdir is missing: name a folder for config, checkpoints and metrics")
    with Preemption() as preemption:
        return 0 if train(config, options.workdir, preemption=preemption) else STOPPED


def train(config: Config, workdir: Path, *, preemption: Preemption) -> bool:
    """Train from the newest good checkpoint in `workdir`, if there is one; return whether the last step was reached.

    Otherwise `preemption` has stopped it, after saving. Raises `InputError`, and `RunError` where the run has to stop
    or its end cannot be saved.
    """
    with contextlib.ExitStack() as held:
        mesh = prepare(config, workdir, held)
        config = dataclasses.replace(config, model=model_folder.recorded_base(workdir, config.model))
        return train_on(mesh, config, workdir, preemption=preemption)


def train_on(mesh: Mesh, config: Config, workdir: Path, *, preemption: Preemption) -> bool:
    """Train in a workdir that process 0 holds, as `train` does."""
    base, training, held_out = processes.take_turns(partial(read_inputs, config))
    processes.print_once(f"training examples: {training.describe()}; validation examples: {held_out.counts}")
    steps = config.train.steps or max(1, math.ceil(config.train.epochs * training.rows / config.train.batch_size))
    profiler.check_steps(config.profile, steps)

    method = method_of(config)
    trained, frozen = method.begin(base, mesh)
    rate = schedule(config.optim, steps)
    adam = optimizer(config.optim, rate)
    state = begin(adam, trained, mesh, seen=time_density.nothing_seen(config.train))
    del trained  # steps donate it

    if processes.is_first():
        (workdir / "checkpoints").mkdir(exist_ok=True)  # from here on the workdir belongs to this config
    checkpoints = Checkpoints(workdir / "checkpoints", keep=config.train.keep)
    start = checkpoints.latest() or 0
    if start:
        found = checkpoints.restore(start, parts_of(state, config))
        state = TrainState(found[method.part], found["optimizer"], found.get("loss_by_time"))
        processes.print_once(f"resuming after step {start}")
    measured = processes.decide(partial(is_measured, workdir, start))  # a run that was cut off may not have come to it
    metrics = Metrics(workdir, start=start, total=steps, silent=not processes.is_first())

    def measure(step: int, state: TrainState) -> None:
        budgets = config.validation.budgets if step else (1,)  # an untrained path is the LM at every budget
        examples = placed_in_order(held_out, config.validation.batch_size, mesh)
        report = method.validate(state.trained, frozen, examples, budgets=budgets)
        metrics.write(step, report | time_density.describe(state.loss_by_time, sigma=config.path.sigma))
        figures = {name: value for name, value in report.items() if isinstance(value, float)}
        metrics.progress(step, "  ".join(f"{name.split('/')[1]} {value:.4f}" for name, value in figures.items()))

    def due(step: int) -> bool:
        every = config.train.validate_every
        return step in (0, steps) or (every > 0 and step % every == 0)

    run_step = make_step(adam, config.train, state, mesh, objective=method.objective())
    run_step = profiler.trace_steps(run_step, config.profile, workdir, start=start)
    key = jax.random.key(config.train.seed + 1)
    batches = training.batches(config.train.batch_size, start_step=start, rows=local_rows(config.train, mesh))
    if due(start) and not measured:
        measure(start, state)
    preemption.watch()
    step, stopped, owed = start, False, False
    log = StepLog(
        metrics,
        every=config.train.log_every,
        last=steps,
        rate=np.asarray(jax.vmap(rate)(jnp.arange(steps))).__getitem__,
        max_skipped=config.train.max_skipped,
        ids=partial(training.ids, config.train.batch_size),
    )
    for step, batch in zip(range(start + 1, steps + 1), batches, strict=False):
        placed = micro_batches(batch, config.train.accumulation, mesh)
        state, results = run_step(state, frozen, placed, jax.random.fold_in(key, step))
        text = count_text(batch) * config.train.batch_size // len(batch.tokens)  # of all processes, by this one's rows
        log.add(step, results, tokens=text)
        stopped = preemption.reached(step) and step < steps
        saved = owed or stopped or step == steps or step % config.train.checkpoint_every == 0
        if saved or due(step):
            log.flush()  # before it is saved, or a run that is cut off in between would lack it
        owed = saved and log.skipped > 0 and step < steps  # what a skipped update leaves waits for one that is not
        if saved and not owed:
            save(step, parts_of(state, config), checkpoints, metrics)
        if stopped:
            break
        if due(step):
            measure(step, state)
            log.restart()
    finish(checkpoints, metrics)
    if stopped:
        kept = "the newest checkpoint is from before a skipped update" if owed else f"step {step} is saved"
        processes.print_once(f"stopped by SIGTERM: {kept}, and the same command goes on from there")
        return False
    export(state.trained, config, workdir, mesh)
    return True


def prepare(config: Config, workdir: Path, held: contextlib.ExitStack) -> Mesh:
    """Start JAX, then claim the workdir and keep it `held`; raises `InputError`, before any model or data is read."""
    rows.keep_quiet()
    mesh = runtime.start_jax(config.mesh)

    def check() -> dict[str, Any]:
        check_batch(config.train, mesh)
        for budget in config.validation.budgets:  # unused without a path, but its evaluation may ask for them
            Refinement.from_config(config.decode, budget=budget)
        held.enter_context(hold(workdir))
        claim(workdir, config)
        return plain(config)

    changed = differences(processes.decide(check), config)
    if changed:
        raise InputError(f"process 0 runs another config: {'; '.join(changed[:5])}: start the same command everywhere")
    if config.train.method != "l2d" and config.validation.budgets != (1,):
        processes.print_once("validation is at a budget of 1: a language model without a path has no other")
    return mesh


def read_inputs(config: Config) -> tuple[model_folder.BaseFiles, Examples, Examples]:
    """The files of the base model, checked, with the examples for training and validation; raises `InputError`."""
    base = model_folder.find_base(config.model)
    if base.tokenizer is None:
        raise InputError(f"{config.model.name} has no tokenizer: training reads text; add its tokenizer files")
    data = config.data
    training, held_out = (
        Examples.load(data, base.tokenizer, split=split, classes=config.path.classes)
        for split in (data.train_split, data.validation_split)
    )
    return base, training, held_out


def save(step: int, parts: dict[str, Any], checkpoints: Checkpoints, metrics: Metrics) -> None:
    """Begin a checkpoint; it holds no step that is not in the log, on the disk."""
    for failed in checkpoints.failures():
        metrics.write(step, {"failed_save": failed})
    checkpoints.save(step, parts, first=metrics.sync)


def finish(checkpoints: Checkpoints, metrics: Metrics) -> None:
    """Wait for the files of a run at its end; raises `RunError` where the last checkpoint or records are not saved."""
    failed = processes.decide(checkpoints.failures)
    checkpoints.close()
    metrics.close()
    if failed:
        raise RunError(
            f"the last checkpoint, of step {failed[-1]}, could not be saved: mend what is wrong and give the same "
            "command again, which goes on from the newest good one"
        )


def export(trained: Any, config: Config, workdir: Path, mesh: Mesh) -> None:
    """Write what was trained as a model folder; raises `RunError` where that fails."""
    folder = workdir / "export"
    try:
        if processes.is_first():
            folder.mkdir(exist_ok=True)
        method_of(config).export(folder, trained, mesh)
    except OSError as error:
        again = "make room and give the same command again, which does this alone"
        raise RunError(
            f"the trained {method_of(config).says} cannot be written to {folder} ({error.strerror}): {again}"
        ) from error


def parts_of(state: TrainState, config: Config) -> dict[str, Any]:
    """The named parts of a checkpoint."""
    parts = {method_of(config).part: state.trained, "optimizer": state.optimizer, "loss_by_time": state.loss_by_time}
    return {name: part for name, part in parts.items() if part is not None}


if __name__ == "__main__":
    command_line.run(main)
