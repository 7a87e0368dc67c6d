"""Reads rows of conversations: built-in problems, files and folders, or data sets of the hub.

If a source has only a training split, a share of its rows is held out for validation. The content of a row decides, so
the same rows are held out in any order, and equal rows are on the same side.
"""

import hashlib
from functools import partial
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
from jaxtyping import Int

from l2d_jax.config.schema import CATEGORIES, DataConfig
from l2d_jax.data import chains, smoltalk, word_problems
from l2d_jax.data.row_formats import COLUMNS, FORMATS, PLACE, TEXTS, check_columns, has_columns
from l2d_jax.data.rows import find_files, is_saved, read_files, read_hub, splits_in
from l2d_jax.data.text_rows import as_json
from l2d_jax.errors import InputError, require

# Hub id and default subsets of the sources with a short name.
HUB = {"smoltalk": ("HuggingFaceTB/smoltalk", smoltalk.SUBSETS), "gsm8k": ("openai/gsm8k", ("main",))}
CATEGORY = {"problems": "math", "gsm8k": "math"}  # sources whose rows all have the same category
REMEDY = "check the names, or put its rows into a folder and set config.data.data_dir"
PROBLEMS = 20_000  # rows of a built-in split if the config sets no number


def most_examples(config: DataConfig, split: str) -> int | None:
    """The largest number of examples of a split that the config sets; None: all."""
    return config.train_examples if split == config.train_split else config.validation_examples


def papers_count(config: DataConfig, split: str) -> int | None:
    """The paper's number of examples if `config` uses all the data that the paper trains on, else None."""
    is_papers = config.source == "smoltalk" and set(_subsets(config, split)) == set(smoltalk.SUBSETS)
    whole = most_examples(config, split) is None and config.max_length == smoltalk.MAX_LENGTH
    short = config.answer_length is not None and config.answer_length < config.max_length
    return smoltalk.EXAMPLES.get(split) if is_papers and whole and not short else None


class SplitParts(NamedTuple):
    """The rows of each subset of a source."""

    rows: list[datasets.Dataset]
    held_out: int  # rows of the training split that are held out for validation


def read_parts(config: DataConfig, split: str) -> SplitParts:
    """Read the rows of each subset, with the columns of one of `FORMATS`, and `class` if all have classes.

    A folder contains the rows or, like the hub, a part for each subset: <folder>/<subset>/<split>.parquet.
    """
    read = [_read_part(config, subset, split) for subset in _subsets(config, split)]
    parts, held_out = [rows for rows, _ in read], sum(count for _, count in read)
    columns = [column for column in parts[0].column_names if all(column in part.column_names for part in parts)]
    rule = f"subsets of {config.source} have different columns"
    has_text = any(has_columns(columns, needed) for needed in FORMATS)
    require(has_text, f"{rule}: give all 'messages', or all 'question' and 'answer'")
    parts = [part.select_columns(columns) for part in parts]
    for column in columns:
        if len({str(part.features[column]) for part in parts}) > 1:  # such as JSON lines and Parquet
            parts = [as_json(part, column) for part in parts]
    return SplitParts(parts, held_out)


def _place(config: DataConfig) -> Path | None:
    """The folder or file from which rows are read; None: they are built in, or on the hub."""
    if config.source == "problems":
        return None
    place = Path(config.data_dir, config.source) if config.data_dir else Path(config.source)
    return place if config.data_dir or place.exists() else None


def _subsets(config: DataConfig, split: str) -> tuple[str | None, ...]:
    """The subsets of a source; None stands for the whole."""
    place = _place(config)
    if config.subsets or config.source == "problems":
        return config.subsets or (None,)
    subsets = HUB.get(config.source, ("", (None,)))[1]
    if place is None:
        return subsets
    is_whole = place.is_file() or split in splits_in(place)
    return subsets if not is_whole and any((place / (name or "")).is_dir() for name in subsets if name) else (None,)


def _read_part(config: DataConfig, subset: str | None, split: str) -> tuple[datasets.Dataset, int]:
    """Read the rows of a subset, with the needed columns; also returns the number of held-out rows."""
    place, held_out = _place(config), 0
    if config.source == "problems":
        count = most_examples(config, split) or PROBLEMS
        if subset == "chains":
            made = chains.chain_rows(count, split=split)
        else:
            made = word_problems.conversations(count, split=split, working=subset or "sentences")
        name, rows, has_one = config.source, datasets.Dataset.from_list(made), False
    elif place is not None:
        name, rows, has_one = _read_place(place / (subset or ""), config, split)
    else:
        name, rows, has_one = _read_hub(subset, config, split)
    if config.source == "smoltalk":
        rows = smoltalk.select_rows(rows, subset)
    elif config.source in CATEGORY and "class" not in rows.column_names:
        rows = rows.add_column("class", np.full(len(rows), CATEGORIES.index(CATEGORY[config.source]), np.int64))
    check_columns(rows.column_names, name)
    require(len(rows) > 0, f"{name} has no rows: choose another split or source")
    rows = rows.select_columns([column for column in COLUMNS if column in rows.column_names])
    if has_one and config.held_out > 0:
        is_held_out = choose_held_out(rows, config.held_out, name=name)
        held_out = int(is_held_out.sum())
        rows = rows.add_column(PLACE, np.arange(len(rows)))  # so that errors can name a row
        rows = rows.select(np.flatnonzero(is_held_out == (split == config.validation_split)))
    return rows, held_out


def _read_place(place: Path, config: DataConfig, split: str) -> tuple[str, datasets.Dataset, bool]:
    """The name and rows of a file or folder, and whether training and validation must share these rows."""
    is_ours = split in (config.train_split, config.validation_split) and config.source not in HUB
    if place.is_file() or is_saved(place):
        rule = f"{place} has rows of one split, which are divided into {config.train_split} and"
        require(is_ours, f"{rule} {config.validation_split}, not {split}: choose one of them")
        return str(place), read_files([place]), True
    has_one = is_ours and config.held_out > 0 and splits_in(place) == [config.train_split]
    files = find_files(place, config.train_split if has_one else split)
    return str(files[0]), read_files(files), has_one


def _read_hub(subset: str | None, config: DataConfig, split: str) -> tuple[str, datasets.Dataset, bool]:
    """`_read_place` for a data set of the hub."""
    hub, _ = HUB.get(config.source, (config.source, ()))
    name, read = f"{hub} {subset or ''}".strip(), partial(read_hub, hub, subset, remedy=REMEDY)
    try:
        rows = read(split=split)
    except InputError:
        if split != config.validation_split or config.held_out == 0:
            raise
        try:
            rows = read(split=config.train_split)
        except InputError:
            rows = None
        if rows is None or not _has_one(rows, config):
            raise
    return name, rows, _has_one(rows, config)


def _has_one(rows: datasets.Dataset, config: DataConfig) -> bool:
    """Whether the training split, to which these rows belong, is the only split of the data set."""
    return set(rows.info.splits or ()) == {config.train_split}


def choose_held_out(rows: datasets.Dataset, share: float, *, name: str) -> Int[np.ndarray, " n"]:
    """Choose the rows to hold out for validation (1; others 0): a share of all different rows, at least one.

    Raises `InputError` if all rows have the same content.
    """
    texts = rows.select_columns([column for column in TEXTS if column in rows.column_names]).with_format("arrow")
    hashes = []
    for block in texts.iter(batch_size=1000):
        for row in block.to_pylist():
            said = repr([(column, row[column]) for column in TEXTS if row.get(column) is not None])
            hashes.append(int.from_bytes(hashlib.blake2b(said.encode(), digest_size=8).digest()))
    found = np.array(hashes, np.uint64)
    different = np.unique(found)
    rule = f"all rows of {name} say the same, and none can be held out for validation"
    require(len(different) > 1, f"{rule}: give more of them, or a file for each split")
    count = int((different < np.uint64(min(share * 2.0**64, 2.0**64 - 2048))).sum())
    return (found < different[min(max(count, 1), len(different) - 1)]).astype(np.int64)
