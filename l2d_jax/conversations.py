"""Rows of conversations: from the built-in problems, from folders of JSON lines or Parquet, or from the hub."""

from pathlib import Path

import datasets

from l2d_jax import problems
from l2d_jax.config import DataConfig
from l2d_jax.errors import InputError
from l2d_jax.rows import find_file, read_file, read_hub

HUB = {"smoltalk": ("HuggingFaceTB/smoltalk", ("all",)), "gsm8k": ("openai/gsm8k", ("main",))}  # id, default subsets
REMEDY = "check the names, or put its rows into a folder and set config.data.data_dir"
PROBLEMS = 20_000  # rows of a split where the config sets no number
COLUMNS = ("messages", "question", "answer", "class")  # all that is read of a row


def most_examples(config: DataConfig, split: str) -> int | None:
    """How many examples of a split the config asks for at most."""
    return config.train_examples if split == config.train_split else config.validation_examples


def read_rows(config: DataConfig, split: str) -> datasets.Dataset:
    """The rows of a split, with a `messages` column or `question` and `answer`, and `class` where there are classes.

    Raises `InputError` for a source, split or column that is missing, a file that cannot be parsed, and no rows.
    """
    if config.source == "problems":
        return datasets.Dataset.from_list(problems.conversations(most_examples(config, split) or PROBLEMS, split=split))
    folder = Path(config.data_dir, config.source) if config.data_dir else Path(config.source)
    if config.data_dir or folder.is_dir():
        if config.subsets:
            raise InputError(f"config.data.subsets is for the hub, but rows are read from {folder}: leave it empty")
        file = find_file(folder, split)
        return _check_columns(read_file(file), str(file))
    return _read_hub(config, split)


def _read_hub(config: DataConfig, split: str) -> datasets.Dataset:
    name, subsets = HUB.get(config.source, (config.source, (None,)))
    parts = []
    for subset in config.subsets or subsets:
        rows = read_hub(name, subset, split=split, remedy=REMEDY)
        parts.append(_check_columns(rows, f"{name} {subset or ''}".strip()))
    return datasets.concatenate_datasets(parts)


def _check_columns(rows: datasets.Dataset, name: str) -> datasets.Dataset:
    columns = set(rows.column_names)
    if not ("messages" in columns or {"question", "answer"} <= columns):
        found = ", ".join(sorted(columns))
        raise InputError(
            f"rows need a column 'messages', or 'question' and 'answer', but {name} has {found}: rename them"
        )
    if len(rows) == 0:
        raise InputError(f"{name} has no rows: choose another split or source")
    return rows.select_columns([column for column in COLUMNS if column in columns])
