"""Writes what a run measures: `metrics.jsonl`, TensorBoard, and a progress bar on a terminal."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter
from tqdm import tqdm


class Metrics:
    """The log of one run, from `start` of `total` steps; later records are of a run that was cut off, and go."""

    def __init__(self, workdir: Path, *, start: int, total: int) -> None:
        path = workdir / "metrics.jsonl"
        kept = [line for line in _complete_lines(path) if json.loads(line)["step"] <= start]
        written = path.with_suffix(".partial")  # a run that is killed here loses nothing
        written.write_text("".join(kept))
        written.replace(path)
        self._file = path.open("a")
        self._tensorboard = SummaryWriter(str(workdir / "tensorboard"), purge_step=start + 1)
        self._bar = tqdm(initial=start, total=total, unit="step", disable=not sys.stderr.isatty())

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log scalars (and lists, in the JSON alone) at an optimizer step."""
        self._file.write(json.dumps({"step": step, **values}) + "\n")
        self._file.flush()
        for name, value in values.items():
            if isinstance(value, int | float):
                self._tensorboard.add_scalar(name, value, step)

    def progress(self, step: int, text: str) -> None:
        """Show the step and a few figures: on the bar, or as a line where there is no terminal."""
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


def read_metrics(workdir: Path) -> list[dict[str, Any]]:
    """All records of a run, oldest first."""
    return [json.loads(line) for line in _complete_lines(workdir / "metrics.jsonl")]


def _complete_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return lines if not lines or lines[-1].endswith("\n") else lines[:-1]
