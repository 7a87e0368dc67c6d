"""Prepared data: a folder of examples that were tokenised and packed once, which training reads instead of the source.

`shards/` has Arrow files of turns (`turns`), each from a block of rows of the source, and packing plans. The name of a
file contains a hash of what determines it and a hash of its bytes. So an interrupted preparation keeps the shards that
it finds, and a damaged file is detected by its name. `manifest.json` is written last, and says what the examples were
made from.
"""

import contextlib
import hashlib
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import xxhash
from jaxtyping import Int
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import Config, DataConfig
from l2d_jax.data.packing import PackingPlan
from l2d_jax.data.sources import most_examples
from l2d_jax.data.turns import TokenisedSplit, tokenise_rows
from l2d_jax.errors import InputError, RunError, require, shown
from l2d_jax.files import digest, identity, read_json, sync, write_whole
from l2d_jax.storage import mirror

FORMAT = 3  # raise it when rows become other tokens than before: folders of earlier versions are then refused
SHARD = 8192  # source rows per shard
MANIFEST, SHARDS = "manifest.json", "shards"
OPTIONS = (
    "source",
    "subsets",
    "held_out",
    "max_length",
    "answer_length",
    "empty_thoughts",
)  # of the data, that change examples
AGAIN = "give the command of l2d_jax.prepare again, which completes and mends it"


def training_splits(config: Config) -> list[tuple[DataConfig, str]]:
    """The data and splits that training reads; the last one has the problems that validation answers freely."""
    data, count = config.data, config.validation.exact_examples
    splits = [(data, data.train_split), (data, data.validation_split)]
    return splits + ([(replace(data, validation_examples=count), data.validation_split)] if count else [])


def read_prepared(config: DataConfig, split: str, tokenizer: PreTrainedTokenizerFast | None = None) -> TokenisedSplit:
    """Open a split of the folder `config.prepared`; raises `InputError` if bytes, options or tokenizer differ."""
    folder = mirror.open_folder(str(config.prepared))
    entries, name = _read_manifest(folder, _subject(config, tokenizer))["splits"], _name(config, split)
    found = f"{folder} has the examples {', '.join(sorted(entries))}, not {name} (split and most examples)"
    require(name in entries, f"{found}: prepare it with this config, or set config.data.prepared to None")
    entry = entries[name]
    shards, plans = ([folder / SHARDS / file for file in entry[kind]] for kind in ("shards", "plans"))
    with ThreadPoolExecutor() as pool:
        for file, is_intact in zip(shards + plans, pool.map(_is_intact, shards + plans), strict=True):
            require(is_intact, f"{file} is missing, or not as it was written: {AGAIN}")
    return TokenisedSplit(_join(shards), plans=[PackingPlan(**np.load(plan)) for plan in plans], **entry["about"])


class Preparation:
    """Fills a folder with the examples of a config; raises `InputError` for a folder with anything else in it."""

    def __init__(self, folder: Path, config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, processes: int) -> None:
        self._folder, self._of, self._processes = folder, _subject(config, tokenizer), processes
        self._splits: dict[str, dict[str, Any]] = {}
        self._shards: list[Path] = []  # shards of the rows tokenised last
        (folder / SHARDS).mkdir(parents=True, exist_ok=True)
        others = {path.name for path in folder.iterdir()} - {MANIFEST, SHARDS}
        if others:
            raise InputError(f"{folder} holds {shown(min(others))}, which is no prepared data: choose another --out")
        if (folder / MANIFEST).exists():
            _read_manifest(folder, self._of)

    def tokenise(
        self, rows: datasets.Dataset, numbers: Int[np.ndarray, " n"], arguments: Mapping[str, Any]
    ) -> datasets.Dataset:
        """`tokenise_rows` in several processes; raises `RunError` if one of them is killed."""
        blocks = np.split(numbers, range(SHARD, len(numbers), SHARD))
        tasks = [(digest([self._of, rows._fingerprint, block.tolist()]), block) for block in blocks]
        work = partial(_write_shard, self._folder / SHARDS, rows, arguments)
        context = multiprocessing.get_context("spawn")  # a process that has loaded JAX must not fork
        count = min(self._processes, len(tasks))
        pool = ProcessPoolExecutor(count, context, _begin_process) if count > 1 else None
        try:
            with pool or contextlib.nullcontext():
                made = pool.map(work, tasks) if pool else map(work, tasks)
                bar = {"total": len(tasks), "unit": "shard", "disable": None}  # only on a terminal
                self._shards = list(tqdm(made, desc=f"preparing {arguments['name']}", **bar))
        except BrokenProcessPool:
            problem = "a process that tokenises was killed, perhaps for want of memory"
            raise RunError(f"{problem}: give the same command again with fewer --processes") from None
        return _join(self._shards)

    def add(self, config: DataConfig, split: str, made: TokenisedSplit) -> None:
        """Add the split whose rows were tokenised last to the manifest."""
        plans = []
        for plan in made.plans:
            file = self._folder / SHARDS / "plan.npz"
            np.savez(file, **vars(plan))
            plans.append(_keep(file, digest([self._of, made.fingerprint])))
        about = {"ends": made.ends, "has_classes": made.has_classes, "fingerprint": made.fingerprint}
        about |= {"silent": made.silent, "held_out": made.held_out}
        files = {"shards": [file.name for file in self._shards], "plans": [file.name for file in plans]}
        self._splits[_name(config, split)] = {**files, "about": about}

    def finish(self) -> int:
        """Write the manifest, remove files that it does not name, and return the number of remaining bytes."""
        content = {"of": self._of, "splits": self._splits}
        write_whole(self._folder / MANIFEST, json.dumps({**content, "digest": digest(content)}, indent=1) + "\n")
        named = {file for entry in self._splits.values() for file in entry["shards"] + entry["plans"]}
        for path in (self._folder / SHARDS).iterdir():
            if path.name not in named:
                path.unlink()
        return sum(path.stat().st_size for path in (self._folder / SHARDS).iterdir())


def _write_shard(folder: Path, rows: datasets.Dataset, arguments: Mapping[str, Any], task: tuple[str, Any]) -> Path:
    """Tokenise a block of rows into a file, unless the file exists; returns its path."""
    name, block = task
    for file in filter(_is_intact, folder.glob(f"{name}-*")):
        return file
    file = folder / f"{name}.arrow"
    tokenise_rows(rows, block, arguments, file=file)
    return _keep(file, name)


def _keep(file: Path, name: str) -> Path:
    """Flush a complete file to the disk, under a name that ends with the hash of its bytes; returns its path."""
    sync(file)
    kept = file.with_name(f"{name}-{_hash_file(file, *identity(file))}{file.suffix}")
    file.replace(kept)
    sync(file.parent)
    return kept


def _is_intact(file: Path) -> bool:
    return file.is_file() and file.stem.endswith(f"-{_hash_file(file, *identity(file))}")


@cache
def _hash_file(file: Path, *_: int) -> str:
    """The hash of a file, cached; the other arguments distinguish its present content from earlier ones."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()


def _join(shards: list[Path]) -> datasets.Dataset:
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(file)) for file in shards])


def _begin_process() -> None:
    """Set up a process of a pool: it ends with its parent, and silently at Ctrl-C."""

    def end_with_parent() -> None:
        if parent := multiprocessing.parent_process():
            parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # there is one process per core
    datasets.disable_progress_bars()


def _name(config: DataConfig, split: str) -> str:
    return f"{split}-{most_examples(config, split) or 'all'}"


def _subject(config: DataConfig, tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """What determines the examples, as JSON values."""
    of: dict[str, Any] = {f"config.data.{name}": getattr(config, name) for name in OPTIONS}
    if tokenizer is not None:
        of["tokenizer"] = digest([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template])
    return json.loads(json.dumps({"format": FORMAT, **of}))


def _read_manifest(folder: Path, of: Mapping[str, Any]) -> dict[str, Any]:
    """Read the manifest of a folder; raises `InputError` if it is missing, damaged, or differs from `of`."""
    file = folder / MANIFEST
    if not file.is_file():
        raise InputError(f"{folder} has no {MANIFEST}: its preparation has not ended, or it is another folder: {AGAIN}")
    manifest = read_json(file)
    if manifest.pop("digest", None) != digest(manifest):
        raise InputError(f"{file} is not as it was written: remove it, and {AGAIN}")
    for name, value in of.items():
        if (recorded := manifest["of"].get(name)) != value:
            difference = f"{name} {shown(recorded)}, not {shown(value)}"
            raise InputError(f"{folder} was prepared with {difference}: go back to that, or prepare another folder")
    return manifest
