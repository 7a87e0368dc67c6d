"""Reads rows of data sets, from files in a folder or from the Hugging Face hub."""

import logging
import re
import sys
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import datasets

from l2d_jax.data.text_rows import read_text_rows
from l2d_jax.errors import InputError, first_line, require, shorten
from l2d_jax.files import digest, identity

VERSION = 1  # version of the cached rows
PARQUET = ".parquet"
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv", ".csv.gz", PARQUET)
SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(-[0-9a-f]+)?")  # file name of a shard of a split, as on the hub
CONVERSION = "datasets.load_dataset(KIND, data_files=FILE)['train'].to_json('train.jsonl')"  # such as "arrow"


def find_files(folder: Path, split: str) -> list[Path]:
    """The files of a split: `folder/<split>.jsonl`, shards as on the hub, or a folder of `save_to_disk`.

    Raises `InputError` if there are none, or if a shard is missing.
    """
    for suffix in SUFFIXES:
        if (file := folder / f"{split}{suffix}").is_file():
            return [file]
    if is_saved(folder / split):
        return [folder / split]
    shards = [(found, file) for name, found, file in _shards(folder) if name == split]
    if shards:
        [count, *others] = {int(found[3]) for found, _ in shards}
        numbers = {int(found[2]) for found, _ in shards}
        missing = sorted(set(range(count)) - numbers)
        is_whole = not others and not missing and len(shards) == count
        there = f"{len(shards)} of {count} shards of split {split!r}"
        require(is_whole, f"{shorten(str(folder), 80)} has {there}, less {missing[:5]}: copy all of one set")
        return [file for _, file in sorted(shards, key=lambda shard: int(shard[0][2]))]
    found = shorten(", ".join(splits_in(folder)), 60) or "none"
    names = f"{split}.jsonl, {split}.json, {split}.csv or {split}{PARQUET}"
    raise InputError(f"no split {split!r} in {folder}: it needs {names}, and the splits there are {found}")


def splits_in(folder: Path) -> list[str]:
    """The names of the splits for which a folder has files."""
    names = {name for name, _, _ in _shards(folder)}
    for path in folder.glob("*"):
        suffix = _suffix(path)
        if path.is_file() and suffix and not SHARD.fullmatch(path.name.removesuffix(suffix)):
            names |= {path.name.removesuffix(suffix)} - {"dataset_dict", "dataset_info", "dataset_infos", "state"}
        elif is_saved(path):
            names.add(path.name)
    return sorted(names)


def is_saved(folder: Path) -> bool:
    """Whether a folder was written by `datasets.Dataset.save_to_disk`."""
    return (folder / "state.json").is_file() and (folder / "dataset_info.json").is_file()


def _shards(folder: Path) -> list[tuple[str, re.Match[str], Path]]:
    """The split, name and path of each shard in a folder, or in its folder `data`."""
    files = [file for place in (folder, folder / "data") for file in place.glob("*-of-*") if _suffix(file)]
    found = [(SHARD.fullmatch(file.name.removesuffix(_suffix(file))), file) for file in files]
    return [(match[1], match, file) for match, file in found if match]


def _suffix(path: Path) -> str:
    """The suffix that says how a file is read; "" if it is unknown."""
    return max((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), key=len, default="")


def read_files(files: Sequence[Path]) -> datasets.Dataset:
    """Read the files of a split; raises `InputError` if one is empty, unreadable, or has other columns."""
    parts = [read_file(file) for file in files]
    try:
        return parts[0] if len(parts) == 1 else datasets.concatenate_datasets(parts)
    except Exception as error:  # Arrow raises errors of many types
        problem = f"the shards of {shorten(str(files[0]), 80)} differ in their columns"
        raise InputError(f"{problem} ({shorten(first_line(error), 100)}): write them again") from error


def read_file(file: Path) -> datasets.Dataset:
    """Read a file, or a folder of `save_to_disk`; raises `InputError` if it is empty or unreadable."""
    known = f"{shorten(str(file), 80)} is none of {', '.join(SUFFIXES)}"
    require(is_saved(file) or _suffix(file) != "", f"{known}: convert it by {CONVERSION}")
    try:
        if is_saved(file):
            rows = datasets.Dataset.load_from_disk(str(file))
            rows = rows.with_format(None)
        else:
            require(file.stat().st_size > 0, f"{file} is empty: put one row a line into it")
            # One cache per content, because `datasets` identifies a file by its name and date.
            cache = Path(datasets.config.HF_DATASETS_CACHE) / digest([VERSION, *identity(file)])[:16]
            if _suffix(file) != PARQUET:
                return read_text_rows(file, cache)
            # `load_dataset` would first contact the hub, and wait seconds if there is no network.
            rows = datasets.Dataset.from_parquet(str(file), cache_dir=str(cache))
        rows.data.table.validate(full=True)  # otherwise invalid UTF-8 would be found in the middle of training
        return rows
    except InputError:
        raise
    except Exception as error:  # each parser raises other errors
        reason = shorten(first_line(error), 120)
        raise InputError(f"{file} cannot be read: {reason}: fix or replace it") from error


def read_hub(
    name: str, subset: str | None, *, split: str, revision: str | None = None, remedy: str
) -> datasets.Dataset:
    """Read a data set from the hub, or from its cached copy; raises an `InputError` that ends with `remedy`.

    `subset` None: the only one. `revision` (commit, tag or branch) None: the newest.
    """
    logging.getLogger("huggingface_hub.utils._http").addFilter(_is_no_retry)
    try:
        return datasets.load_dataset(name, subset, split=split, revision=revision)
    except Exception as error:  # network, hub client and parsers raise many kinds of errors
        what = f"data set {name!r} (subset {subset}, split {split!r})"
        raise InputError(f"{what} cannot be read: {first_line(error)}: {remedy}") from error


def _is_no_retry(record: logging.LogRecord) -> bool:
    """Whether to show a warning of the hub's client; those of its retries, two for each, become one line in all."""
    text = record.getMessage()
    if "thrown while requesting" not in text and not text.startswith("Retrying in"):
        return True
    _say_that_it_waits()
    return False


@cache
def _say_that_it_waits() -> None:
    print("the hub does not answer: trying again for up to a minute", file=sys.stderr, flush=True)


def keep_quiet() -> None:
    """Show the progress bars of `datasets` only on a terminal."""
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()


def require_columns(rows: datasets.Dataset, columns: Iterable[str], *, name: str) -> None:
    """Raise `InputError` unless there are rows and they have all `columns`; `name` is that of the data set."""
    missing = [column for column in columns if column not in rows.column_names]
    rule = f"rows of {name} need the columns {', '.join(columns)}, but {', '.join(missing)} is missing among"
    require(not missing, f"{rule} {', '.join(sorted(rows.column_names))}: rename them, or give the data set's own rows")
    require(len(rows) > 0, f"{name} has no rows: choose another split")
