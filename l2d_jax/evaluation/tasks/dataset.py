"""The data set of a task: rows from a folder of files, or from the hub."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets

from l2d_jax.data.rows import find_file, read_file, read_hub, require_columns
from l2d_jax.errors import InputError


@dataclass(frozen=True)
class Dataset:
    """Where the rows of a task are, and which."""

    hub: str  # id of the data set on the hub
    columns: tuple[str, ...]  # required of every row
    shot_split: str  # source of the examples in a prompt
    rows: Mapping[str, int]  # number of rows of each complete split
    split: str = "test"  # which the paper scores
    subset: str | None = None  # on the hub; None: there is only one
    revision: str | None = None  # on the hub; None: the newest

    def read(self, split: str, *, folder: Path | None = None) -> datasets.Dataset:
        """The rows of a split, from `<split>.jsonl` or `.parquet` in a folder, or from the hub.

        Raises `InputError` where they cannot be read, lack a column, or are more than the data set has (from the hub,
        also where they are fewer).
        """
        if folder is None:
            remedy = "check the network, or put the rows into a folder and give it with --data_dir"
            place = self.hub
            rows = read_hub(self.hub, self.subset, split=split, revision=self.revision, remedy=remedy)
        else:
            file = find_file(folder, split)
            place, rows = str(file), read_file(file)
        require_columns(rows, self.columns, name=place)
        known = self.rows.get(split)
        if known is not None and (len(rows) > known or (folder is None and len(rows) != known)):
            raise InputError(
                f"split {split!r} of {self.hub} has {known} rows, but {place} has {len(rows)}: get it again"
            )
        return rows
