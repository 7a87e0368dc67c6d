"""Reads rows of data sets from files of a folder, or from the Hugging Face hub by name."""

import codecs
import json
import sys
from collections.abc import Iterable
from pathlib import Path

import datasets

from l2d_jax.data import tokenizer
from l2d_jax.errors import InputError, require, shown
from l2d_jax.files import digest, identity

# `load_dataset` is not used for files: it first reports to the hub, and waits seconds where there is no network.
FORMATS = {".jsonl": datasets.Dataset.from_json, ".parquet": datasets.Dataset.from_parquet}


def find_file(folder: Path, split: str) -> Path:
    """The file `folder/<split>.jsonl` or `.parquet`; raises `InputError` if there is neither."""
    files = [folder / f"{split}{suffix}" for suffix in FORMATS]
    for file in filter(Path.is_file, files):
        return file
    found = ", ".join(sorted({file.stem for file in folder.glob("*") if file.suffix in FORMATS})) or "none"
    names = f"{files[0].name} or {files[1].name}"
    raise InputError(f"no split {split!r} in {folder}: it needs {names}, and the splits there are {found}")


def read_file(file: Path) -> datasets.Dataset:
    """The rows of a file; raises `InputError` if it is empty or unreadable."""
    require(file.stat().st_size > 0, f"{file} is empty: put one row a line into it")
    # `datasets` knows a file by its name and date; a cache for each content notices what was replaced all the same.
    cache = Path(datasets.config.HF_DATASETS_CACHE) / digest(identity(file))[:16]
    if file.suffix == ".jsonl":
        _check_lines(file)
    try:
        rows = FORMATS[file.suffix](str(file), cache_dir=str(cache))
        rows.data.table.validate(full=True)  # bytes that are no UTF-8 would be found in the middle of training
        return rows
    except Exception as error:  # each format's parser raises errors of its own
        raise InputError(f"{file} cannot be read: {tokenizer.first_line(error)}: mend or replace it") from error


def _check_lines(file: Path) -> None:
    """Raise `InputError` for a line that pyarrow's parser of JSON ends the process by: no object, or one too deep."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            text = line.removeprefix(codecs.BOM_UTF8).strip() if number == 1 else line.strip()
            if text and (not text.startswith(b"{") or _is_deep(text)):
                rule = "must be a JSON object, and not nested too deep"
                raise InputError(f"line {number} of {file} {rule}, got {shown(text[:200])}: mend or replace it")


def _is_deep(text: bytes) -> bool:
    """Whether a text is nested too deep for Python, which takes less than pyarrow does."""
    try:
        if text.count(b"[") + text.count(b"{") > 500:
            json.loads(text)
    except RecursionError:
        return True
    except ValueError:  # pyarrow says what is wrong
        pass
    return False


def read_hub(
    name: str, subset: str | None, *, split: str, revision: str | None = None, remedy: str
) -> datasets.Dataset:
    """The rows of a data set of the hub, or of its cached copy; raises `InputError`, which ends with `remedy`.

    A `subset` of None stands for the only one, and a `revision` (commit, tag or branch) of None for the newest.
    """
    try:
        return datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # the network, the hub's client and the parsers raise many kinds: there are no rows
        what = f"data set {name!r} (subset {subset}, split {split!r})"
        raise InputError(f"{what} cannot be read: {tokenizer.first_line(error)}: {remedy}") from error


def keep_quiet() -> None:
    """Show the progress bars of `datasets` only on a terminal."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def require_columns(rows: datasets.Dataset, columns: Iterable[str], *, name: str) -> None:
    """Raise `InputError` unless there are rows with all these columns; `name` is that of the data set."""
    missing = [column for column in columns if column not in rows.column_names]
    rule = f"rows of {name} need the columns {', '.join(columns)}, but {', '.join(missing)} is missing among"
    require(not missing, f"{rule} {', '.join(sorted(rows.column_names))}: rename them, or give the data set's own rows")
    require(len(rows) > 0, f"{name} has no rows: choose another split")
