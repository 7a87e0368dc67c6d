"""A training run: from the newest good checkpoint of its workdir to its last step, or until it is stopped."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from l2d_jax.config.schema import Config
from l2d_jax.data import rows
from l2d_jax.data.batch import count_text
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.settings import Refinement
from l2d_jax.distributed import processes, runtime
from l2d_jax.distributed.sharding import make_mesh
from l2d_jax.errors import RunError, require
from l2d_jax.files import AnyPath, differences
from l2d_jax.storage import lock, mirror
from l2d_jax.training import preflight, profiler, stopwatch
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.training.held_out.exact_match import exact_match
from l2d_jax.training.held_out.sample_answer import SampleAnswer
from l2d_jax.training.held_out.validation import placed_in_order, validate
from l2d_jax.training.inputs import Inputs
from l2d_jax.training.methods import method_of
from l2d_jax.training.metrics import Metrics, StepLog, read_metrics
from l2d_jax.training.optimizer import on_host, optimizer, schedule
from l2d_jax.training.plans import apply_plan, choose_plan, plan_text, record_plan
from l2d_jax.training.preemption import Preemption
from l2d_jax.training.step import TrainState, check_batch, init_state, is_finite, make_step, micro_batches, process_rows
from l2d_jax.training.workdir import claim, plain_values
from l2d_jax.weights import base_model, tokenizer_files


def train(config: Config, workdir: AnyPath) -> bool:
    """Train, from the newest good checkpoint in `workdir` if there is one; return whether the last step was reached.

    False means that SIGTERM stopped the run after saving. Raises `InputError` for bad input, and `RunError` if the run
    must stop or its result cannot be saved.
    """
    watch = stopwatch.StartWatch()
    folder = mirror.open_folder(workdir)
    with contextlib.ExitStack() as held:
        config, mesh = prepare(config, folder, held)
        watch.ended("checks")
        run = Run(config, folder, mesh, watch)
        with Preemption() as preemption:  # before this there is nothing to save, and SIGTERM ends a process at once
            return run.train(preemption)


def prepare(
    config: Config, workdir: Path, held: contextlib.ExitStack, *, show: Callable[[str], object] = lambda *_: None
) -> tuple[Config, Mesh]:
    """Start JAX, check what every host needs, claim the workdir and lock it; `held` releases the lock.

    Returns the mesh and the config, completed with the place or revision of the base and the values of the plan; the
    workdir records both. `show` gets a line for each check. Raises `InputError` before any model or data is read.
    """
    rows.keep_quiet()
    runtime.start_jax(config.mesh)
    base = processes.decide(lambda: preflight.pinned_base(config.model.name, workdir))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name=base))

    def check() -> dict[str, Any]:
        plan = choose_plan(config, jax.devices(), workdir=workdir)
        planned = apply_plan(plan, config)
        check_batch(planned.train, make_mesh(planned.mesh))
        for budget in config.validation.budgets:  # unused without a path, but a later evaluation may use them
            Refinement.from_config(config.decode, budget=budget)
        held.enter_context(lock.hold(workdir))
        claim(workdir, config)
        record_plan(workdir, jax.devices(), plan)
        return {"config": plain_values(config), "plan": plan}

    decided = processes.decide(check)
    changed = differences(decided["config"], plain_values(config), "config.")
    require(not changed, f"process 0 runs another config: {'; '.join(changed[:5])}: start the same command everywhere")
    if config.train.method != "l2d" and config.validation.budgets != (1,):
        processes.print_once("validation is at a budget of 1: a language model without a path has no other")
    processes.print_once(plan_text(decided["plan"], jax.devices()))
    config = apply_plan(decided["plan"], config)
    base = processes.decide(lambda: base_model.recorded_base(workdir, config.model).name)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, name=base))
    mesh = runtime.start_jax(config.mesh)
    for line in preflight.check_run(config, workdir, mesh):
        show(line)
    return config, mesh


class Run:
    """A run in a workdir that process 0 has locked. Every process makes a `Run` and calls the same methods."""

    def __init__(self, config: Config, workdir: Path, mesh: Mesh, starting: stopwatch.StartWatch) -> None:
        self._config, self._workdir, self._mesh = config, workdir, mesh
        self._inputs = processes.take_turns(partial(Inputs.read, config, mesh, starting))
        base, training, held_out = self._inputs.base, self._inputs.training, self._inputs.held_out
        processes.print_once(f"training examples: {training.describe()}; validation examples: {held_out.counts}")
        starting.ended("examples")
        epoch = training.rows / config.train.batch_size
        self._steps = config.train.steps or max(1, math.ceil(config.train.epochs * epoch))
        profiler.check_steps(config.profile, self._steps)

        self._method = method_of(config)
        trained, self._frozen = self._method.begin(base, mesh)
        self._rate = schedule(config.optim, self._steps)
        self._optimizer = optimizer(config.optim, self._rate)
        self._state = init_state(self._optimizer, trained, mesh)

        if processes.is_first():
            (workdir / "checkpoints").mkdir(exist_ok=True)  # from here on the workdir belongs to this config
        starting.ended("weights")
        self._base_fingerprint, examples = processes.decide(self._inputs.fingerprints)
        inputs = self._base_fingerprint | examples
        self._checkpoints = Checkpoints(workdir / "checkpoints", keep=config.train.keep, inputs=inputs)
        self._start = self._checkpoints.latest() or 0  # optimizer steps done so far
        if self._start:
            parts = self._checkpoints.restore(self._start, self._parts())
            self._state = TrainState(parts[self._method.part], parts["optimizer"])
            processes.print_once(f"resuming after step {self._start}")
        if processes.is_first():
            base_model.record_base(workdir, config.model, self._base_fingerprint)
            self._write_tokenizer(workdir / tokenizer_files.FOLDER)
            mirror.publish(workdir)
        measured = processes.decide(lambda: [one["step"] for one in read_metrics(workdir) if "validation/loss" in one])
        self._metrics = Metrics(workdir, start=self._start, total=self._steps, wandb=config.log.wandb)
        starting.ended("checkpoint")
        self._starting, self._watch = starting, stopwatch.Stopwatch()
        self._saved = time.monotonic()  # when the last save began
        self._sample = SampleAnswer(held_out, base, config.decode) if config.validation.answer_every else None
        if self._sample is not None:
            self._sample.introduce()
            self.answer(self._start)
        # An interrupted run may have saved this step without validating it.
        if self._validates_at(self._start) and self._start not in measured:
            self.validate(self._start)
            starting.ended("validation")

    def train(self, preemption: Preemption) -> bool:
        """Take the remaining steps and export. Returns False if `preemption` stopped the run, after saving."""
        config, start = self._config.train, self._start
        take_step = make_step(self._optimizer, config, self._state, self._mesh, objective=self._method.loss)
        take_step = profiler.trace_steps(take_step, self._config.profile, self._workdir, start=start)
        key = jax.random.key(config.seed + 1)
        here, training = process_rows(config, self._mesh), self._inputs.training
        batches = training.batches(config.batch_size, start_step=start, rows=here)
        rate, ids = on_host(self._rate, start=start), partial(training.ids, config.batch_size)
        log = StepLog(self._metrics, config, last=self._steps, rate=rate, ids=ids, watch=self._watch)
        step, stops, waits = start, False, False
        for step, batch in zip(range(start + 1, self._steps + 1), self._watch.waiting(batches), strict=False):
            placed = micro_batches(batch, config.micro_batches, self._mesh)
            self._state, results = take_step(self._state, self._frozen, placed, jax.random.fold_in(key, step))
            if step == start + 1:
                jax.block_until_ready(results)
                self._starting.ended("compilation and step")
                processes.print_once(self._starting.summary())
            log.add(step, results, tokens=count_text(batch) * config.batch_size // len(batch.tokens))  # by its rows
            is_last = step == self._steps
            stops = preemption.reached(step) and not is_last
            saves = waits or stops or is_last or self._saves_at(step)
            if saves or self._validates_at(step) or self._answers_at(step):
                log.flush()  # before the save: otherwise a run killed in between would lack this record
            waits = saves and log.skipped > 0  # save after a step whose update is not skipped
            if saves and not waits:
                with self._watch.during("save"):
                    self.save(step)
            if stops:
                break
            if self._answers_at(step) or self._validates_at(step):
                with self._watch.during("validation"):
                    if self._answers_at(step):
                        self.answer(step)
                    if self._validates_at(step):
                        self.validate(step)
                log.restart()
        with self._watch.during("save"):
            self.finish()
        processes.print_once(self._watch.summary())
        if stops:
            kept = "the newest checkpoint is from before a skipped update" if waits else f"step {step} is saved"
            processes.print_once(f"stopped by SIGTERM: {kept}, and the same command goes on from there")
            return False
        if waits:
            problem = f"the last {log.skipped} updates were skipped, for a loss, gradient or new weight that is not"
            remedy = "train in another workdir with a lower config.optim.peak_rate"
            raise RunError(f"{problem} finite, and nothing was exported: {remedy}")
        self.export()
        return True

    def validate(self, step: int) -> None:
        """Measure the held-out examples with the state after `step`, and log the report."""
        config = self._config
        budgets = config.validation.budgets if step else (1,)  # an untrained path is the LM at every budget
        examples = placed_in_order(self._inputs.held_out, config.validation.batch_size, self._mesh)
        model = self._method.model(self._state.trained, self._frozen)
        report = validate(model, examples, config, budgets=budgets)
        base, problems = self._inputs.base, self._inputs.problems
        if problems is not None and (step or model.path is None):  # with a path, a budget of 1 is measured later
            loaded = LoadedModel(model, base.tokenizer, base.stop_ids, config.decode)
            report |= exact_match(loaded, problems, config.validation, budgets=budgets)
        self._metrics.write(step, report)
        figures = {name: value for name, value in report.items() if isinstance(value, float)}
        self._metrics.progress(step, "  ".join(f"{name.split('/')[1]} {value:.4f}" for name, value in figures.items()))

    def answer(self, step: int) -> None:
        """Print the answer to a held-out example with the state after `step`."""
        assert self._sample is not None
        self._sample.show(self._method.model(self._state.trained, self._frozen), step)

    def save(self, step: int) -> None:
        """Start saving a checkpoint, after flushing the log of its steps; raises `RunError` as `check_held` does."""

        def sync_log() -> None:
            lock.check_held()
            self._metrics.sync()

        self._saved = time.monotonic()
        for failed in self._checkpoints.failures():
            self._metrics.write(step, {"failed_save": failed})
        self._checkpoints.save(step, self._parts(), first=sync_log)

    def finish(self) -> None:
        """Wait for the files of the run; raises `RunError` if the last checkpoint or records could not be saved."""
        failed: Sequence[int] = processes.decide(self._checkpoints.failures)
        self._checkpoints.close()
        self._metrics.close()
        if failed:
            remedy = "fix what is wrong and give the same command again, which goes on from the newest good one"
            raise RunError(f"the last checkpoint, of step {failed[-1]}, could not be saved: {remedy}")

    def export(self) -> None:
        """Write the trained weights as a model folder; raises `RunError` if they are not finite, or if that fails."""
        folder = self._workdir / "export"
        if not jax.jit(is_finite)(self._state.trained):
            raise RunError(f"the trained {self._method.says} has entries that are not finite: train in another workdir")
        try:
            if processes.is_first():
                folder.mkdir(exist_ok=True)
            self._method.export(folder, self._state.trained, self._mesh, base_fingerprint=self._base_fingerprint)
            if processes.is_first():
                self._write_tokenizer(folder)
            mirror.publish(folder)
        except OSError as error:
            problem = f"the trained {self._method.says} cannot be written to {folder} ({error.strerror})"
            raise RunError(f"{problem}: make room and give the same command again, which does this alone") from error

    def _write_tokenizer(self, folder: Path) -> None:
        """Write the tokenizer and its chat template into a folder, if the config replaces the base's."""
        if tokenizer_files.is_replaced(self._config.model) and self._inputs.base.tokenizer is not None:
            folder.mkdir(exist_ok=True)
            tokenizer_files.write_tokenizer(folder, self._inputs.base.tokenizer)

    def _validates_at(self, step: int) -> bool:
        every = self._config.train.validate_every
        return step in (0, self._steps) or (every > 0 and step % every == 0)

    def _answers_at(self, step: int) -> bool:
        every = self._config.validation.answer_every
        return self._sample is not None and (step == self._steps or step % every == 0)

    def _saves_at(self, step: int) -> bool:
        """Whether a save is due by the number of steps, and not too soon after the last one (clock of process 0)."""
        config = self._config.train
        if step % config.checkpoint_every:
            return False
        pause = 60 * config.checkpoint_minutes
        return not pause or bool(processes.decide(lambda: time.monotonic() - self._saved >= pause))

    def _parts(self) -> dict[str, Any]:
        return {self._method.part: self._state.trained, "optimizer": self._state.optimizer}
