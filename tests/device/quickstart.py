"""Trains the path of the quickstart on the device, if a model of SmolLM2 is there; nothing is downloaded."""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from l2d_jax.training.metrics import read_metrics
from tests.device.options import Options
from tests.device.table import LEFT_OUT, Rows

PLACES = ("runs/smollm2", "runs/download/smollm2.gguf")  # where launch/quickstart.sh leaves it
EXACT = "validation/exact@"  # metric, before the budget
ROOT = Path(__file__).parents[2]


def find_base(options: Options) -> str | None:
    """The model that was named, or what the quickstart has left in this clone."""
    return options.smollm2 or next((str(ROOT / place) for place in PLACES if (ROOT / place).exists()), None)


def run(rows: Rows, options: Options) -> None:
    """A row for the time of the training, and one for the held-out accuracy at each budget."""
    base = find_base(options)
    if base is None:
        rows.add("-", "there is no model of SmolLM2 here: --smollm2 names one", status=LEFT_OUT)
        return
    with tempfile.TemporaryDirectory(prefix="quickstart_") as workdir:
        began = time.monotonic()
        status = subprocess.run(command(base, Path(workdir), options), check=False).returncode
        if status:
            raise RuntimeError(f"python -m l2d_jax.train ended with status {status}: the log has its last lines")
        records, seconds = read_metrics(Path(workdir)), time.monotonic() - began
    text = f"{records[-1]['step']} steps in {seconds:.0f} s"
    rows.add("training and answering", text, "the whole program, with its start and compiling", seconds=seconds)
    last = next(record for record in reversed(records) if any(name.startswith(EXACT) for name in record))
    for name, value in last.items():
        if name.startswith(EXACT) and isinstance(value, float):
            what = f"right answers at budget {name.removeprefix(EXACT)}"
            rows.add(what, f"{value:.3f}", "held-out problems", value=value)


def command(base: str, workdir: Path, options: Options) -> list[str]:
    """The training of launch/quickstart.sh; a rehearsal takes two steps."""
    changes: dict[str, object] = {"model.name": base, "model.architecture": None}
    if options.rehearse:
        changes |= {"train.steps": 2, "data.train_examples": 16, "validation.exact_examples": 2}
    given = [f"--config.{name}={value}" for name, value in changes.items()]
    program = [sys.executable, "-P", "-m", "l2d_jax.train", "--config", "smollm2_135m:quickstart"]
    return [*program, "--workdir", str(workdir), *given]
