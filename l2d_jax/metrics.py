"""Writes what a run measures: `metrics.jsonl`, TensorBoard, and a progress bar on a terminal."""

import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm


class Metrics:
    """The log of one run, from `start` of `total` steps; later records are of a run that was cut off, and go.

    `silent` takes all calls and writes nothing, for the processes other than 0.
    """

    def __init__(self, workdir: Path, *, start: int, total: int, silent: bool = False) -> None:
        path = Path(os.devnull) if silent else workdir / "metrics.jsonl"
        if not silent:
            kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= start]
            written = path.with_suffix(".partial")  # a run that is killed here loses nothing
            written.write_text("".join(kept))
            written.replace(path)
        self._silent = silent
        self._file = path.open("a")
        folder = str(workdir / "tensorboard")
        self._tensorboard = SummaryWriter(folder, purge_step=start + 1, write_to_disk=not silent)
        self._bar = tqdm(initial=start, total=total, unit="step", disable=silent or not sys.stderr.isatty())

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log scalars (and lists, in the JSON alone) at an optimizer step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._tensorboard.add_scalar(name, value, step)

    def progress(self, step: int, text: str) -> None:
        """Show the step and a few figures: on the bar, or as a line where there is no terminal."""
        if self._silent:
            return
        if self._bar.disable:
            print(f"step {step}/{self._bar.total}  {text}", flush=True)
        else:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(step - self._bar.n)

    def close(self) -> None:
        """Finish the files."""
        self._bar.close()
        self._file.close()
        self._tensorboard.close()


class StepLog:
    """Reads each step's results once the next one is under way, so that the device never waits for the log."""

    def __init__(self, metrics: Metrics, *, every: int, last: int, rate: Callable[[int], Any]) -> None:
        self._metrics, self._every, self._last, self._rate = metrics, every, last, rate
        self._pending: tuple[int, Mapping[str, Any]] | None = None
        self._tokens = 0
        self._began = time.perf_counter()

    def add(self, step: int, results: Mapping[str, Any], *, tokens: int) -> None:
        """Take the results of a step that has just been dispatched and read those of the one before it."""
        self.flush()
        self._pending = step, results
        self._tokens += tokens

    def flush(self) -> None:
        """Wait for the step that is under way; raises `FloatingPointError` if its loss is not finite."""
        if self._pending is None:
            return
        step, results = self._pending
        self._pending = None
        values = {name: float(value) for name, value in results.items()}
        if not math.isfinite(values["loss"]):
            raise FloatingPointError(f"the loss is {values['loss']} at step {step}: lower config.optim.peak_rate")
        if step % self._every and step != self._last:
            return
        speed = self._tokens / (time.perf_counter() - self._began)
        values |= {"learning_rate": float(self._rate(step - 1)), "tokens_per_second": speed}
        self._metrics.write(step, values)
        self._metrics.progress(step, f"loss {values['loss']:.4f}  {speed:.0f} tokens/s")
        self.restart()

    def restart(self) -> None:
        """Start the clock anew, after something else has taken time."""
        self._tokens = 0
        self._began = time.perf_counter()


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """All records of a run, oldest first."""
    return [json.loads(line) for line in _complete_lines(workdir / "metrics.jsonl")]


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]
