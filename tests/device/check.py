"""Checks one GPU in minutes: `bash launch/device_check.sh` runs this, and prints one table last.

Each part runs in a process of its own, with a limit of time. If a part fails, crashes or hangs, that is a row of the
table, and the other parts run all the same. Nothing is installed or downloaded. The exit status is 1 if a row failed,
and 2 without a GPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from tests.device.options import Options, add_options, make_options
from tests.device.table import FAILED, LEFT_OUT, OK, REFUSED, Row, render

ROOT = Path(__file__).parents[2]
RESULTS = "device_check.json"
QUICK = ("--xla_backend_optimization_level=0", "--xla_llvm_disable_expensive_passes=true")  # of a rehearsal
LEAST = 15.0  # seconds: with less left, a part is not started
ENDING = 3.0  # seconds kept for the table


class Part(NamedTuple):
    """A part of the check, which `tests.device.part` runs."""

    name: str
    limit: float  # seconds
    uses_jax: bool = True  # False: JAX must leave the GPU alone


# The first says whether there is a GPU; the last ones run only if time is left.
PARTS = (
    Part("machine", 75),
    Part("numerics", 120),
    Part("attention", 75),
    Part("answers", 120),
    Part("decoding", 120),
    Part("training", 100),
    Part("PyTorch decoding", 120, uses_jax=False),
    Part("PyTorch training", 90, uses_jax=False),
    Part("more decoding", 150),
    Part("quickstart", 180),
)


def main() -> int:
    """Parse the command line, run the parts, and print the table; returns the exit status."""
    parser = argparse.ArgumentParser("device_check.sh", description=__doc__)
    add_options(parser)
    parser.add_argument("--rehearse", action="store_true", help="run everything on CPUs, with tiny sizes")
    parser.add_argument("--parts", nargs="+", choices=[part.name for part in PARTS], help="only these, and machine")
    parser.add_argument("--minutes", type=float, help="time for all parts together (8, and 20 in a rehearsal)")
    parser.add_argument("--out", type=Path, help=f"folder for {RESULTS} and logs; none are kept without it")
    given, rest = parser.parse_known_args()
    for argument in rest:
        if not argument.startswith("--config."):
            parser.error(f"unknown argument {argument}")
    chosen = [part for part in PARTS if given.parts is None or part.name in ("machine", *given.parts)]
    with tempfile.TemporaryDirectory(prefix="device_check_") as scratch:
        folder = Path(scratch) if given.out is None else given.out.resolve()
        for name in ("rows", "logs"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        options = make_options(given, folder, tuple(rest))
        minutes = given.minutes or (20.0 if given.rehearse else 8.0)
        return check(options, chosen, minutes=minutes, is_kept=given.out is not None)


def check(options: Options, parts: Sequence[Part], *, minutes: float, is_kept: bool) -> int:
    """Run the parts within the time, print the table, and write the results if they are kept."""
    end = time.monotonic() + 60 * minutes - ENDING
    rows, seconds, is_interrupted = list[Row](), dict[str, float](), False
    for part in parts:
        began, found = time.monotonic(), list[Row]()
        try:
            found = run_part(part, options, left=end - began, minutes=minutes)
        except KeyboardInterrupt:
            is_interrupted = True
            found = [*options.rows_of(part.name), Row(part.name, "-", "interrupted", status=FAILED)]
        rows, seconds[part.name] = [*rows, *found], round(time.monotonic() - began, 1)
        if found[0].what == REFUSED:
            print(f"error: {found[0].result}", file=sys.stderr)
            return 2
        print(f"{part.name}: {seconds[part.name]:.0f} s", file=sys.stderr)
        if is_interrupted:
            break
    if is_kept:
        written = {"options": json.loads(options.dump()), "seconds": seconds, "rows": [asdict(row) for row in rows]}
        (options.folder / RESULTS).write_text(json.dumps(written, indent=1) + "\n")
    print(render(rows))
    counts = {status: sum(row.status == status for row in rows) for status in (OK, FAILED, LEFT_OUT)}
    text = ", ".join(f"{count} {status}" for status, count in counts.items())
    kept = f"; logs and {RESULTS} are in {options.folder}" if is_kept else "; --out DIR keeps logs"
    print(f"\n{text}, {sum(seconds.values()):.0f} s{kept}")
    return 1 if counts[FAILED] else 0


def run_part(part: Part, options: Options, *, left: float, minutes: float) -> list[Row]:
    """Run a part in a process of its own, for at most `left` seconds; its rows, and one for what ended it early."""
    over = f"the {minutes:g} minutes were over"
    options.rows_file(part.name).unlink(missing_ok=True)
    if left < LEAST:
        return [Row(part.name, "-", over, status=LEFT_OUT)]
    command = [sys.executable, "-P", "-m", "tests.device.part", part.name, options.dump()]
    log = options.folder / "logs" / f"{options.rows_file(part.name).stem}.txt"
    own = part.limit * (3 if options.rehearse else 1)  # CPUs are slow
    limit = min(own, left)
    status = run_within(command, environment(part, options), log, limit=limit)
    rows = options.rows_of(part.name)
    if status is None and limit < own:
        return [*rows, Row(part.name, "the rest", over, status=LEFT_OUT)]
    if status is None:
        return [*rows, Row(part.name, "the rest", f"took longer than {limit:.0f} s", status=FAILED)]
    if status or not rows:
        return [*rows, Row(part.name, "the rest" if rows else "-", ended(status, log), status=FAILED)]
    return rows


def run_within(command: Sequence[str], variables: dict[str, str], log: Path, *, limit: float) -> int | None:
    """Run a command with its output in a file; its exit status, or None if it was killed at its limit."""
    with log.open("wb") as output:
        process = subprocess.Popen(  # in a group of its own, so that what it has started ends with it
            command, env=variables, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return process.wait(timeout=limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def environment(part: Part, options: Options) -> dict[str, str]:
    """The environment variables of a part's process: this clone first, one GPU, and no network."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    variables |= {"TPU_SKIP_MDS_QUERY": "1", "TOKENIZERS_PARALLELISM": "false"}
    variables.setdefault("CUDA_VISIBLE_DEVICES", "0")
    if options.rehearse or not part.uses_jax:
        variables["JAX_PLATFORMS"] = "cpu"
    if options.rehearse:  # most of the time goes into compiling
        variables["XLA_FLAGS"] = " ".join([variables.get("XLA_FLAGS", ""), *QUICK]).strip()
    return variables


def ended(status: int, log: Path) -> str:
    """How a process ended, and the last line of its output."""
    how = f"exit status {status}" if status >= 0 else f"killed by {signal.Signals(-status).name}"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"{how}: {lines[-1].strip()}" if lines else how


def stop(*_: object) -> None:
    """Treat SIGTERM like Ctrl-C: the table has what was found."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    sys.exit(main())
