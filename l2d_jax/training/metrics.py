"""Writes the metrics of a run: to `metrics.jsonl`, to TensorBoard, and as a progress bar on a terminal.

A full disk loses no record and stops no run: records wait in memory. Only TensorBoard, which has a copy, lacks them.
A damaged line is skipped with a warning. The format has no checksum, so a changed digit in a record is not detected.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Annotated, Any, NotRequired

import numpy as np
from annotated_types import Interval
from tqdm import tqdm
from typing_extensions import TypedDict

from l2d_jax.config.schema import TrainConfig
from l2d_jax.errors import InputError, RunError
from l2d_jax.files import digest, explained, read_lines, write_whole
from l2d_jax.storage import mirror
from l2d_jax.training.stopwatch import Stopwatch

Steps = Annotated[int, Interval(ge=0, lt=2**63)]


class _Step(TypedDict):
    step: Steps
    skipped: NotRequired[Annotated[int, Interval(ge=0, le=1)]]


class Metrics:
    """The log of a run that continues after step `start` of `total`.

    Records after `start` belong to an interrupted run and are dropped, as are damaged lines. Only process 0 writes.
    `wandb` is a project of Weights & Biases, which also gets the scalars. Raises `InputError` if the workdir cannot be
    written to.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, wandb: str | None = None) -> None:
        from l2d_jax.distributed import processes  # here: a report reads metrics, and needs no JAX

        self._silent, self.skipped = not processes.is_first(), 0  # number of updates skipped in the whole run
        self._waiting: list[bytes] = []
        self._bar = tqdm(initial=start, total=total, unit="step", disable=self._silent or not sys.stderr.isatty())
        if self._silent:
            return
        self._wandb = None if wandb is None else _start_wandb(wandb, workdir)
        path = workdir / "metrics.jsonl"
        kept = [(line, record) for line, record in _read(path) if record["step"] <= start]
        self.skipped = sum(record.get("skipped", 0) for _, record in kept)
        with explained(f"cannot write to workdir {workdir}", "make room in it"):
            write_whole(path, b"".join(line for line, _ in kept))
            self._path, self._file = path, path.open("ab", buffering=0)
            self._end = path.stat().st_size  # bytes of whole lines
            self._events = _Events(workdir / "tensorboard", start=start)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log scalars and lists at a step. Lists go only to the JSON file. Values that are not finite are dropped."""
        if self._silent:
            return
        values = {name: value for name, value in values.items() if np.all(np.isfinite(value))}
        self._waiting.append((json.dumps({"step": step, **values}) + "\n").encode())
        with contextlib.suppress(OSError):  # `sync` raises it
            self._drain()
        scalars = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._events.write(step, scalars)
        if self._wandb is not None:
            self._wandb.log(scalars, step=step)

    def sync(self) -> None:
        """Flush all records to the disk; raises `OSError` if that fails."""
        if self._silent:
            return
        self._drain()
        os.fsync(self._file.fileno())
        with contextlib.suppress(OSError):
            self._events.flush()
        mirror.publish(self._path)
        mirror.publish(self._events.folder)

    def progress(self, step: int, text: str) -> None:
        """Show the step and a few figures on the progress bar, or as a line if there is no terminal."""
        if self._silent:
            return
        if self._bar.disable:
            with contextlib.suppress(OSError):
                print(f"step {step}/{self._bar.total}  {text}", flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Finish the files; raises `RunError` if records are lost."""
        self._bar.close()
        if self._silent:
            return
        try:
            self.sync()
        except OSError as error:
            lost = f"the last {len(self._waiting)} records" if self._waiting else "the log"
            lost += f" could not be written to {self._file.name}"
            raise RunError(f"{lost} ({error.strerror}): make room and give the same command again") from error
        finally:
            self._file.close()
            with contextlib.suppress(OSError):
                self._events.close()
            if self._wandb is not None:
                self._wandb.finish()

    def _drain(self) -> None:
        """Write waiting records after the last complete line; a failed attempt may have left part of a line."""
        os.ftruncate(self._file.fileno(), self._end)
        while self._waiting:
            rest = line = self._waiting[0]
            while rest:
                rest = rest[self._file.write(rest) :]
            self._end += len(line)
            self._waiting.pop(0)


def _start_wandb(project: str, workdir: Path) -> Any:
    """Open the workdir's run in Weights & Biases; it is the same run after a restart."""
    try:
        import wandb
    except ImportError:
        raise InputError("config.log.wandb needs the extra wandb: pip install 'l2d_jax[wandb]'") from None
    name = str(mirror.place(workdir))
    return wandb.init(project=project, name=name, id=digest(name)[:16], resume="allow", dir=workdir)


class _Events:
    """TensorBoard's file, written synchronously: the library's writer thread dies if the disk is full, then blocks."""

    def __init__(self, folder: Path, *, start: int) -> None:
        # Imported here, because it imports PyTorch if that is installed, and only training writes events.
        from tensorboardX.event_file_writer import EventsWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.summary import scalar

        folder.mkdir(exist_ok=True)
        self.folder = folder
        self._event, self._scalar = Event, scalar
        writer = EventsWriter(str(folder / "events"), filename_suffix=f".{os.getpid()}")
        self._add, self.flush, self.close = writer.write_event, writer.flush, writer.close  # flush and close block
        self._flushed = time.monotonic()
        resumed = SessionLog(status=SessionLog.START)  # hides later steps, which belong to an interrupted run
        self._add(Event(step=start + 1, wall_time=time.time(), session_log=resumed))

    def write(self, step: int, values: Mapping[str, int | float]) -> None:
        with contextlib.suppress(OSError):
            for name, value in values.items():
                self._add(self._event(step=step, wall_time=time.time(), summary=self._scalar(name, value)))
            if time.monotonic() > self._flushed + 10:
                self._flushed = time.monotonic()
                self.flush()


@dataclass
class StepLog:
    """Reads the results of a step after the next step was dispatched, so that the device never waits for the log."""

    metrics: Metrics  # where to write
    config: TrainConfig  # how often to log, and how many consecutive skipped updates stop the run
    _: KW_ONLY
    last: int  # the run's last step
    rate: Callable[[int], Any]  # learning rate by number of updates; it must not wait for the running step
    ids: Callable[[int], Sequence[int]]  # the row numbers of the data that a step reads
    watch: Stopwatch  # where the time of the run goes
    skipped: int = field(default=0, init=False)  # number of consecutive skipped updates, up to the last step read

    def __post_init__(self) -> None:
        self._pending: tuple[int, Mapping[str, Any]] | None = None
        self.restart()

    def add(self, step: int, results: Mapping[str, Any], *, tokens: int) -> None:
        """Take the results of the step that was just dispatched, and read and log those of the step before."""
        self.flush()
        self._pending = step, results
        self._tokens += tokens

    def flush(self) -> None:
        """Wait for the running step and log it; raises `RunError` if too many consecutive updates were skipped."""
        if self._pending is None:
            return
        step, results = self._pending
        self._pending = None
        values = {name: float(value) for name, value in results.items()}
        if values.pop("skipped"):
            self._skip(step, values)
            return
        self.skipped = 0
        if step % self.config.log_every and step != self.last:
            return
        now = time.perf_counter()  # time from here on belongs to the next record
        speed = self._tokens / (now - self._began)
        rate = float(self.rate(step - 1 - self.metrics.skipped))
        values |= {"learning_rate": rate, "tokens_per_second": speed, **self.watch.lap()}
        self.metrics.write(step, values)
        self.metrics.progress(step, f"loss {values['loss']:.4f}  {speed:.0f} tokens/s")
        self.restart(at=now)

    def restart(self, *, at: float | None = None) -> None:
        """Restart the clock for tokens per second, after something else took time; `at`: a clock reading, None: now."""
        self._tokens = 0
        self._began = time.perf_counter() if at is None else at

    def _skip(self, step: int, values: Mapping[str, float]) -> None:
        self.skipped += 1
        self.metrics.skipped += 1
        self.metrics.write(step, {**values, "skipped": 1})
        what = f"loss {values['loss']}, gradient norm {values['gradient_norm']}"
        what += ", a new weight or moment not finite" if all(map(math.isfinite, values.values())) else ""
        self.metrics.progress(step, f"update skipped: {what}")
        if self.skipped == self.config.max_skipped:
            problem = f"{self.skipped} updates in a row were skipped, the last at step {step} ({what})"
            rows = f"which read the rows {', '.join(map(str, self.ids(step)))} of the training data"
            remedy = "lower config.optim.peak_rate or look at these rows; the checkpoints are of before"
            raise RunError(f"{problem}, {rows}: {remedy}")


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """All records of a run, oldest first; damaged lines are skipped with a warning."""
    return [record for _, record in _read(workdir / "metrics.jsonl")]


def _read(path: Path) -> list[tuple[bytes, dict[str, Any]]]:
    """The lines of the log and their records (numbers and lists of numbers), in the order of steps."""
    return read_lines(path, (_Step, dict[str, float | list[float]]), _misplaced)


def _misplaced(records: list[dict[str, Any]]) -> dict[int, str]:
    """Records whose step is not between those of their neighbours, keyed by place, with the reason."""
    steps = [record["step"] for record in records]
    around = zip([0, *steps], steps, [*steps[1:], math.inf], strict=False)
    faults = {i: (step, a, b) for i, (a, step, b) in enumerate(around) if a <= b and not a <= step <= b}
    return {i: f"step {step} stands between {a} and {b}" for i, (step, a, b) in faults.items()}
