"""A folder of examples that are tokenised and packed once, which training reads in place of their source.

`manifest.json` says what the examples are of, and has the size and hash of every file of `shards/`; it is written last.
A shard is an Arrow file of the turns of some rows of the source (`turns`). Its name is a hash of all that determines
it, so that a preparation that was cut off keeps the shards that it finds, and makes the others.
"""

import hashlib
import io
import json
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Mapping
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
from typing_extensions import TypedDict

from l2d_jax.config.schema import Config, DataConfig
from l2d_jax.data.packing import PackingPlan
from l2d_jax.data.sources import most_examples
from l2d_jax.data.turns import TokenisedSplit, tokenise_rows
from l2d_jax.errors import InputError, RunError, shown
from l2d_jax.files import check, identity, read_json, sync, write_whole
from l2d_jax.fingerprint import digest

FORMAT = 1  # a higher number refuses the folders of former versions: where rows become other tokens than before
SHARD = 8192  # rows of the source
MANIFEST, SHARDS = "manifest.json", "shards"
OPTIONS = ("source", "subsets", "max_length", "answer_length", "empty_thoughts")  # of the data, that change examples
AGAIN = "give the command of l2d_jax.prepare again, which mends it"
_work: Any = None  # what a process of a pool does with each task


class _File(TypedDict):
    name: str
    size: int  # bytes
    xxh3: str


class _Split(TypedDict):
    shards: list[_File]
    plans: list[_File]  # like the others, see `TokenisedSplit`
    ends: list[int]
    has_classes: bool
    fingerprint: str


class _Manifest(TypedDict):
    of: dict[str, Any]
    splits: dict[str, _Split]


def training_splits(config: Config) -> list[tuple[DataConfig, str]]:
    """The data and splits that training reads; the last is of the problems that a validation answers freely."""
    data, count = config.data, config.validation.exact_examples
    splits = [(data, data.train_split), (data, data.validation_split)]
    return splits + ([(replace(data, validation_examples=count), data.validation_split)] if count else [])


def read_prepared(config: DataConfig, split: str, tokenizer: PreTrainedTokenizerFast | None = None) -> TokenisedSplit:
    """Open a split of the folder `config.prepared`, all of whose bytes are compared with the manifest.

    Raises `InputError` for a folder that is damaged, half written, or of other options, examples or another
    `tokenizer`, which is not compared if it is None.
    """
    folder = Path(str(config.prepared))
    manifest = _read_manifest(folder)
    _require_same(folder, manifest, _subject(config, tokenizer))
    name = _name(config, split)
    if name not in manifest["splits"]:
        found = ", ".join(sorted(manifest["splits"]))
        raise InputError(
            f"{folder} has the examples {found}, and this config reads {name} (split and most examples): prepare it "
            "with this config, or set config.data.prepared to None"
        )
    entry, folder = manifest["splits"][name], folder / SHARDS
    with ThreadPoolExecutor() as pool:
        list(pool.map(partial(_verify, folder), entry["shards"] + entry["plans"]))
    plans = [PackingPlan(**np.load(folder / file["name"])) for file in entry["plans"]]
    turns = _join(folder, entry["shards"])
    return TokenisedSplit(turns, entry["ends"], entry["has_classes"], entry["fingerprint"], plans)


class Preparation:
    """Fills a folder with the examples of a config; raises `InputError` for one that holds anything else."""

    def __init__(self, folder: Path, config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, processes: int) -> None:
        self._folder, self._of, self._processes = folder, _subject(config, tokenizer), processes
        self._shards: list[_File] = []  # of the rows that were tokenised last
        self._splits: dict[str, _Split] = {}
        if (folder / MANIFEST).exists():
            _require_same(folder, _read_manifest(folder), self._of)
        try:
            (folder / SHARDS).mkdir(parents=True, exist_ok=True)
            others = sorted({path.name for path in folder.iterdir()} - {MANIFEST, SHARDS})
        except OSError as error:
            raise InputError(f"cannot write to {folder} ({error.strerror}): choose another --out") from None
        if others:
            raise InputError(f"{folder} holds {shown(others[0])}, which is no prepared data: choose another --out")

    def tokenise(
        self, rows: datasets.Dataset, numbers: Int[np.ndarray, " n"], arguments: Mapping[str, Any]
    ) -> datasets.Dataset:
        """What `turns.tokenise_rows` returns, made in several processes and shard by shard.

        Raises `InputError` as it does, and `RunError` for a disk that is full or a process that was killed.
        """
        blocks = np.split(numbers, range(SHARD, len(numbers), SHARD))
        tasks = [(digest([self._of, rows._fingerprint, block.tolist()]), block) for block in blocks]
        work = partial(_write_shard, self._folder / SHARDS, rows, arguments)
        count = min(self._processes, len(tasks))
        self._shards = []
        try:
            if count == 1:
                self._collect((work(task) for task in tasks), tasks, arguments["name"])
            else:
                context = multiprocessing.get_context("spawn")  # a process that has loaded JAX must not fork
                with ProcessPoolExecutor(count, context, _begin, (work,)) as pool:
                    self._collect(pool.map(_do, tasks), tasks, arguments["name"])
        except BrokenProcessPool:
            problem = "a process that tokenises was killed, perhaps for want of memory"
            raise RunError(f"{problem}: give the same command again with fewer --processes") from None
        except OSError as error:
            raise RunError(f"{self._folder} cannot be written ({error}): make room, then {AGAIN}") from error
        return _join(self._folder / SHARDS, self._shards)

    def add(self, config: DataConfig, split: str, made: TokenisedSplit) -> int:
        """Enter the split whose rows were tokenised last, and return how many bytes it takes."""
        plans = []
        for number, plan in enumerate(made.plans):
            file, content = self._folder / SHARDS / f"{digest([self._of, made.fingerprint, number])}.npz", io.BytesIO()
            np.savez(content, **vars(plan))
            write_whole(file, content.getvalue())
            plans.append(_describe(file))
        about = {"ends": made.ends, "has_classes": made.has_classes, "fingerprint": made.fingerprint}
        self._splits[_name(config, split)] = {"shards": self._shards, "plans": plans, **about}
        return sum(file["size"] for file in self._shards + plans)

    def finish(self) -> None:
        """Write the manifest, and remove what it does not name."""
        manifest: _Manifest = {"of": self._of, "splits": self._splits}
        text = json.dumps({"xxh3": _hash(manifest), "manifest": manifest}, indent=1) + "\n"
        sync(self._folder / SHARDS)
        write_whole(self._folder / MANIFEST, text)
        named = {file["name"] for entry in self._splits.values() for file in entry["shards"] + entry["plans"]}
        for path in (self._folder / SHARDS).iterdir():
            if path.name.removesuffix(".json") not in named:
                path.unlink()

    def _collect(self, made: Iterable[_File], tasks: list[Any], name: str) -> None:
        """Wait for the shards, with a progress bar that counts rows on a terminal."""
        with tqdm(total=sum(len(block) for _, block in tasks), desc=f"preparing {name}", disable=None) as bar:
            for shard, (_, block) in zip(made, tasks, strict=True):
                self._shards.append(shard)
                bar.update(len(block))


def _join(folder: Path, shards: list[_File]) -> datasets.Dataset:
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(folder / shard["name"])) for shard in shards])


def _write_shard(folder: Path, rows: datasets.Dataset, arguments: Mapping[str, Any], task: tuple[str, Any]) -> _File:
    """Tokenise a block of rows into a file, unless it is there already; the record beside it is written last."""
    name, block = task
    file = folder / f"{name}.arrow"
    record = folder / f"{file.name}.json"
    try:
        saved: _File = check(read_json(record), _File, record)
        _verify(folder, saved)
    except InputError:
        tokenise_rows(rows, block, arguments, file=file)
        saved = _describe(file)
        write_whole(record, json.dumps(saved))
    return saved


def _begin(work: Any) -> None:
    """Prepare a process of a pool, which ends with its parent, and silently at Ctrl-C."""
    global _work
    _work = work
    datasets.disable_progress_bars()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do(task: Any) -> Any:
    return _work(task)


def _name(config: DataConfig, split: str) -> str:
    return f"{split}-{most_examples(config, split) or 'all'}"


def _subject(config: DataConfig, tokenizer: PreTrainedTokenizerFast | None) -> dict[str, Any]:
    """What examples are of, as JSON holds it."""
    options = {f"config.data.{name}": getattr(config, name) for name in OPTIONS}
    if tokenizer is not None:
        options["tokenizer"] = digest([tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template])
    return json.loads(json.dumps({"format": FORMAT, **options}))


def _require_same(folder: Path, manifest: _Manifest, of: Mapping[str, Any]) -> None:
    """Raise `InputError` if a folder is of anything else than `of`."""
    recorded = manifest["of"]
    changed = [
        f"{name} {shown(recorded.get(name))}, now {shown(of[name])}" for name in of if recorded.get(name) != of[name]
    ]
    if changed:
        raise InputError(f"{folder} was prepared with {changed[0]}: go back to that, or prepare another folder")


def _read_manifest(folder: Path) -> _Manifest:
    """The manifest of a folder; raises `InputError` if it is missing or not as it was written."""
    file = folder / MANIFEST
    if not file.is_file():
        what = "its preparation has not ended" if (folder / SHARDS).is_dir() else "it is no folder of prepared data"
        raise InputError(f"{folder} has no {MANIFEST}, so {what}: {AGAIN.replace('mends', 'completes')}")
    whole = read_json(file)
    if whole.get("xxh3") != _hash(whole.get("manifest")):
        raise InputError(f"{file} has changed since it was written: remove it, and {AGAIN}")
    manifest: _Manifest = check(whole["manifest"], _Manifest, file, remedy=AGAIN)
    return manifest


def _describe(file: Path) -> _File:
    """The name, size and hash of a file, once it is on the disk."""
    sync(file)
    return {"name": file.name, "size": file.stat().st_size, "xxh3": _hash_file(file, *identity(file))}


def _verify(folder: Path, saved: _File) -> None:
    """Raise `InputError` unless a file is as it was written."""
    file = folder / saved["name"]
    try:
        size = file.stat().st_size
        if size == saved["size"] and _hash_file(file, *identity(file)) == saved["xxh3"]:
            return
        problem = "has other bytes than it was written with" if size == saved["size"] else f"is of {size} bytes"
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    raise InputError(f"the shard {file} {problem}: {AGAIN}")


@cache
def _hash_file(file: Path, *_: int) -> str:
    """The hash of a file, which the other arguments tell from its former content: each is read once."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, xxhash.xxh3_64).hexdigest()


def _hash(content: Any) -> str:
    return str(xxhash.xxh3_64_hexdigest(json.dumps(content, sort_keys=True).encode()))
