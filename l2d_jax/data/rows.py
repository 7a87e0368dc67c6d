"""Rows of data sets, by the names that Hugging Face's hub gives them: from files of a folder, or from the hub."""

import sys
from collections.abc import Iterable
from pathlib import Path

import datasets

from l2d_jax.data import tokenizer
from l2d_jax.errors import InputError

# Not `load_dataset`, which reports each use of its readers to the hub first, and waits seconds where there is none.
FORMATS = {".jsonl": datasets.Dataset.from_json, ".parquet": datasets.Dataset.from_parquet}


def find_file(folder: Path, split: str) -> Path:
    """`folder/<split>.jsonl` or `.parquet`; `InputError` where there is neither."""
    files = [folder / f"{split}{suffix}" for suffix in FORMATS]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        found = sorted({file.stem for file in folder.glob("*") if file.suffix in FORMATS})
        raise InputError(
            f"no split {split!r} in {folder}: it needs {files[0].name} or {files[1].name}, and the splits there are "
            f"{', '.join(found) or 'none'}"
        )
    return file


def read_file(file: Path) -> datasets.Dataset:
    """The rows of a file; `InputError` where it is empty or unreadable."""
    if file.stat().st_size == 0:
        raise InputError(f"{file} is empty: put one row a line into it")
    try:
        return FORMATS[file.suffix](str(file))
    except Exception as error:  # each format's parser raises its own, wrapped or not
        raise InputError(f"{file} cannot be read: {tokenizer.first_line(error)}: mend or replace it") from error


def read_hub(
    name: str, subset: str | None, *, split: str, revision: str | None = None, remedy: str
) -> datasets.Dataset:
    """The rows of a data set of the hub, or of its copy on this machine.

    Args:
      name: the data set's id, such as openai/gsm8k.
      subset: which of its configurations; None: the only one.
      split: such as train.
      revision: a commit, tag or branch; None: the newest.
      remedy: the end of the error's line, where there is no such data set, or no network.
    """
    try:
        return datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # of the network, the hub's client, the parsers; all mean that there are no rows
        raise InputError(
            f"data set {name!r} (subset {subset}, split {split!r}) cannot be read: {tokenizer.first_line(error)}: "
            f"{remedy}"
        ) from error


def keep_quiet() -> None:
    """Show the progress of reading and encoding on a terminal alone."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def require_columns(rows: datasets.Dataset, columns: Iterable[str], *, name: str) -> None:
    """Raise `InputError` unless there are rows, and they have all these columns; `name` says whose they are."""
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"rows of {name} need the columns {', '.join(columns)}, but {', '.join(missing)} is missing among "
            f"{', '.join(sorted(rows.column_names))}: rename them, or give the data set's own rows"
        )
    if len(rows) == 0:
        raise InputError(f"{name} has no rows: choose another split")
