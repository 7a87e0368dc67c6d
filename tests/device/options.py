"""The options of a device check, and the sizes of its measurements."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.device.table import Row, read_rows


@dataclass(frozen=True)
class Options:
    """What all parts of a check are given."""

    folder: Path  # rows, logs and what the parts write
    rehearse: bool = False  # whether this is a rehearsal on CPUs with tiny sizes
    config: str = "llama1b"  # config file or name, whose architecture is measured
    dtype: str = "bfloat16"  # of the language model's weights in measurements
    overrides: tuple[str, ...] = ()  # --config.section.option=value
    batches: tuple[int, ...] = (1, 16)  # decoding: sequences at a time
    budgets: tuple[int, ...] = (1, 15)  # decoding: evaluations per token
    prompt: int = 64  # decoding: tokens of a prompt
    new: int = 32  # decoding: tokens that are timed
    rows: int = 8  # training: rows of a step
    length: int = 2048  # training: tokens of a row
    torch_rows: int = 2  # training: rows that PyTorch processes at a time
    smollm2: str | None = None  # model for the quickstart

    def dump(self) -> str:
        """The options as text, for `load`."""
        return json.dumps(asdict(self), default=str)

    @classmethod
    def load(cls, text: str) -> "Options":
        """The options that `dump` has written."""
        fields: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
        return cls(**fields | lists | {"folder": Path(fields["folder"])})

    def rows_file(self, part: str) -> Path:
        """Where a part writes its rows."""
        return self.folder / "rows" / f"{part.replace(' ', '_')}.jsonl"

    def rows_of(self, part: str) -> list[Row]:
        """The rows that a part has written so far."""
        return read_rows(self.rows_file(part))


TINY: dict[str, Any] = {"config": "tiny", "batches": (1, 2), "budgets": (1, 5), "prompt": 8, "new": 4}
TINY |= {"rows": 2, "length": 64, "torch_rows": 1}  # of a rehearsal


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for each field of `Options` but `folder`, `rehearse` and `overrides`; no defaults are set."""
    parser.add_argument("--config", help="config file or name, whose shape is measured (llama1b)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], help="type of the weights in measurements (bfloat16)"
    )
    parser.add_argument("--batches", type=int, nargs="+", help="decoding: sequences at a time (1 16)")
    parser.add_argument("--budgets", type=int, nargs="+", help="decoding: evaluations per token, from 1 on (1 15)")
    parser.add_argument("--prompt", type=int, help="decoding: tokens of a prompt (64)")
    parser.add_argument("--new", type=int, help="decoding: tokens that are timed (32)")
    parser.add_argument("--rows", type=int, help="training: rows of a step (8)")
    parser.add_argument("--length", type=int, help="training: tokens of a row (2048)")
    parser.add_argument("--torch_rows", type=int, help="training: rows that PyTorch processes at a time (2)")
    parser.add_argument("--smollm2", help="folder or GGUF file of SmolLM2-135M-Instruct, for the quickstart's training")


def make_options(given: argparse.Namespace, folder: Path, overrides: tuple[str, ...]) -> Options:
    """The options of a command line; what it leaves out is a default, in a rehearsal a tiny one."""
    known = {name: value for name, value in vars(given).items() if name in Options.__dataclass_fields__}
    chosen = {name: tuple(value) if isinstance(value, list) else value for name, value in known.items() if value}
    return Options(folder, **((TINY if given.rehearse else {}) | chosen), overrides=overrides)
