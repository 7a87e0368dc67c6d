"""Reads rows of conversations from the built-in problems, from folders of JSON lines or Parquet, or from the hub."""

from collections.abc import Collection
from pathlib import Path

import datasets
import numpy as np

from l2d_jax.config.schema import CATEGORIES, DataConfig
from l2d_jax.data import chains, smoltalk, word_problems
from l2d_jax.data.rows import FORMATS, find_file, read_file, read_hub
from l2d_jax.errors import require

# Hub id and default subsets of the sources that have a short name.
HUB = {"smoltalk": ("HuggingFaceTB/smoltalk", smoltalk.SUBSETS), "gsm8k": ("openai/gsm8k", ("main",))}
CATEGORY = {"problems": "math", "gsm8k": "math"}  # sources whose rows all have one category
REMEDY = "check the names, or put its rows into a folder and set config.data.data_dir"
PROBLEMS = 20_000  # rows of a built-in split if the config sets no number
COLUMNS = ("messages", "question", "answer", "class", "working")  # the columns that are read


def most_examples(config: DataConfig, split: str) -> int | None:
    """The largest number of examples of a split that the config asks for; None: all."""
    return config.train_examples if split == config.train_split else config.validation_examples


def papers_count(config: DataConfig, split: str) -> int | None:
    """The paper's number of examples if `config` asks for all that the paper trains on, else None."""
    is_papers = config.source == "smoltalk" and set(_subsets(config, split)) == set(smoltalk.SUBSETS)
    whole = most_examples(config, split) is None and config.max_length == smoltalk.MAX_LENGTH
    short = config.answer_length is not None and config.answer_length < config.max_length
    return smoltalk.EXAMPLES.get(split) if is_papers and whole and not short else None


def read_parts(config: DataConfig, split: str) -> list[datasets.Dataset]:
    """The rows of each subset, with a column `messages` or `question` and `answer`, and `class` if all have classes.

    A folder holds the rows themselves or, like the hub, a part for each subset: <folder>/<subset>/<split>.parquet.
    """
    parts = [_read_part(config, subset, split) for subset in _subsets(config, split)]
    columns = [column for column in parts[0].column_names if all(column in part.column_names for part in parts)]
    rule = f"subsets of {config.source} have different columns"
    require(_have_text(columns), f"{rule}: give all 'messages', or all 'question' and 'answer'")
    return [part.select_columns(columns) for part in parts]


def _folder(config: DataConfig) -> Path | None:
    """The folder that rows are read from; None: they are built in, or on the hub."""
    if config.source == "problems":
        return None
    folder = Path(config.data_dir, config.source) if config.data_dir else Path(config.source)
    return folder if config.data_dir or folder.is_dir() else None


def _subsets(config: DataConfig, split: str) -> tuple[str | None, ...]:
    """The subsets of a source; None stands for the whole."""
    folder = _folder(config)
    if config.subsets or config.source == "problems":
        return config.subsets or (None,)
    subsets = HUB.get(config.source, ("", (None,)))[1]
    if folder is None:
        return subsets
    whole = any((folder / f"{split}{suffix}").is_file() for suffix in FORMATS)
    return subsets if not whole and any((folder / (name or "")).is_dir() for name in subsets if name) else (None,)


def _read_part(config: DataConfig, subset: str | None, split: str) -> datasets.Dataset:
    folder = _folder(config)
    if config.source == "problems":
        count = most_examples(config, split) or PROBLEMS
        if subset == "chains":
            made = chains.chain_rows(count, split=split)
        else:
            made = word_problems.conversations(count, split=split, working=subset or "sentences")
        name, rows = config.source, datasets.Dataset.from_list(made)
    elif folder is not None:
        file = find_file(folder / (subset or ""), split)
        name, rows = str(file), read_file(file)
    else:
        hub, _ = HUB.get(config.source, (config.source, ()))
        name, rows = f"{hub} {subset or ''}".strip(), read_hub(hub, subset, split=split, remedy=REMEDY)
    if config.source == "smoltalk":
        rows = smoltalk.select_rows(rows, subset)
    elif config.source in CATEGORY and "class" not in rows.column_names:
        rows = rows.add_column("class", np.full(len(rows), CATEGORIES.index(CATEGORY[config.source]), np.int64))
    columns = set(rows.column_names)
    rule = f"rows need a column 'messages', or 'question' and 'answer', but {name} has {', '.join(sorted(columns))}"
    require(_have_text(columns), f"{rule}: rename them")
    require(len(rows) > 0, f"{name} has no rows: choose another split or source")
    return rows.select_columns([column for column in COLUMNS if column in columns])


def _have_text(columns: Collection[str]) -> bool:
    return "messages" in columns or {"question", "answer"} <= set(columns)
