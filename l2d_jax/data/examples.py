"""Turns conversations into batches of a fixed shape, in an order that is a pure function of seed and step.

Conversations are tokenised once; the result is in the cache of `datasets`, or in a folder (`prepared`). There is no
iterator state: step k of any run, resumed or not and on any number of processes, reads the same examples.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

import datasets
import numpy as np
from grain import MapDataset, ReadOptions
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerFast

from l2d_jax.config.schema import DataConfig
from l2d_jax.data import tokenizer as tokenization
from l2d_jax.data.batch import Batch, stack
from l2d_jax.data.packing import PackingPlan, pack
from l2d_jax.data.prepared import read_prepared
from l2d_jax.data.sources import most_examples, papers_count, read_parts
from l2d_jax.data.turns import TOKENS, TokenisedSplit, tokenise_rows
from l2d_jax.errors import InputError, require

READING = ReadOptions(num_threads=4, prefetch_buffer_size=16)  # read ahead of the current batch


@dataclasses.dataclass(frozen=True)
class Counts:
    """How many examples are used, and how many were dropped, and why."""

    kept: int
    too_long: int  # context and answer exceed config.data.max_length
    answer_too_long: int  # the answer exceeds config.data.answer_length
    papers: int | None = None  # the paper's number of examples; None: the paper does not use this data
    silent: int = 0  # rows without an answer to learn
    held_out: int = 0  # rows of the training split that are held out for validation

    def __str__(self) -> str:
        found = f"{self.kept} ({self.too_long} too long and {self.answer_too_long} with too long an answer left out)"
        found += f", {self.silent} rows without an answer to learn left out" if self.silent else ""
        found += f", {self.held_out} rows held out for validation (config.data.held_out)" if self.held_out else ""
        if self.papers in (None, self.kept):
            return found if self.papers is None else f"{found}, as many as in the paper"
        return f"{found}, not the paper's {self.papers}: the rows, the tokenizer or its chat template are not the same"


@dataclasses.dataclass(frozen=True)
class Examples:
    """The tokenised examples of a split."""

    config: DataConfig
    counts: Counts
    turns: datasets.Dataset  # rows of `turns.FEATURES`, of any length
    kept: Int[np.ndarray, " n"]  # the rows of `turns` that are used
    padding: int  # id of the padding token
    source: TokenisedSplit

    @classmethod
    def load(
        cls,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerFast,
        *,
        split: str,
        classes: int = 0,
        tokenise: Callable[..., datasets.Dataset] = tokenise_rows,
    ) -> "Examples":
        """Read and `tokenise` a split, or read a folder of prepared data; keep as many examples as the config sets.

        They are evenly spread over the split. Raises `InputError` for unreadable data, for a class that is not below
        `classes` (unless this is 0), and if no example fits the lengths of the config.
        """
        tokenization.require_chat_template(tokenizer)
        name, limit = f"{config.source}/{split}", most_examples(config, split)
        if config.prepared is None:
            parts, held_out = read_parts(config, split)
            rows = datasets.concatenate_datasets(parts)
            _check_classes(rows, classes, name=name)
            sample = limit or len(rows)
            arguments = {"tokenizer": tokenizer, "name": name, "empty_thoughts": config.empty_thoughts}
            while True:
                turns = tokenise(rows, _spread(len(rows), sample), arguments)
                if limit is None or _fit(turns, config)[1].kept >= limit or sample >= len(rows):
                    break
                sample *= 2  # some were too long, or had no answer
            silent = min(sample, len(rows)) - len(turns.unique("row"))
            ends, has_classes = np.cumsum([*map(len, parts)]).tolist(), "class" in rows.column_names
            source = TokenisedSplit(turns, ends, has_classes, silent=silent, held_out=held_out)
        else:
            source = read_prepared(config, split, tokenizer)
            turns = source.turns
            _check_classes(turns if source.has_classes else turns.remove_columns("class"), classes, name=name)
        fits, counts = _fit(turns, config)
        _check_turns(turns, counts, config, name)
        kept = np.flatnonzero(fits)[_spread(counts.kept, limit or counts.kept)]
        about: dict[str, Any] = {
            "papers": papers_count(config, split),
            "silent": source.silent,
            "held_out": source.held_out,
        }
        counts = dataclasses.replace(counts, kept=len(kept), **about)
        return cls(config, counts, turns.with_format("numpy"), kept, tokenization.padding_id(tokenizer), source)

    def __len__(self) -> int:
        return len(self.kept)

    def texts(self) -> Iterator[tuple[list[int], list[int]]]:
        """Context and answer of each example, as token ids, in the order of the split."""
        for number in self.kept:
            turn = self.turns[int(number)]
            ids, context = turn["tokens"].tolist(), int(turn["context"])
            yield ids[:context], ids[context:]

    def fingerprint(self) -> str:
        """A hash of the tokens, answers and classes of all examples, in order."""
        if self.source.fingerprint is not None:
            return self.source.fingerprint
        hashed = hashlib.sha256(self.kept.astype("<i8").tobytes())
        for name in ("tokens", "context", "length", "class", *(["working"] if self.config.working else [])):
            for chunk in self.turns.data.column(name).chunks:
                values = chunk.flatten() if name in TOKENS else chunk
                hashed.update(np.ascontiguousarray(values.to_numpy()).data)
        return hashed.hexdigest()[:32]

    @cached_property
    def parts(self) -> list[Int[np.ndarray, " k"]]:
        """The example numbers of each subset with a weight; without weights, one list of all examples."""
        if not self.config.weights:
            return [np.arange(len(self))]
        subset = np.searchsorted(self.source.ends, self.turns.data.column("row").to_numpy()[self.kept], side="right")
        parts = [np.flatnonzero(subset == number) for number in range(len(self.source.ends))]
        for name, part in zip(self.config.subsets, parts, strict=True):
            require(len(part) > 0, f"config.data.weights names {name}, of which no example fits: leave that subset out")
        return parts

    @cached_property
    def plans(self) -> list[PackingPlan]:
        """For each of `parts`, which examples share a row, if the config enables packing."""
        if len(self.source.plans) == len(self.parts):
            return list(self.source.plans)
        length, answer_length = self.config.max_length, self.config.answer_length or self.config.max_length
        lengths, answers = (sizes[self.kept] for sizes in _lengths(self.turns))
        return [pack(lengths[i], answers[i], length=length, answer_length=answer_length) for i in self.parts]

    @property
    def rows(self) -> int:
        """The number of rows in an epoch of training."""
        return sum(map(len, self.plans if self.config.packing else self.parts))

    def describe(self) -> str:
        """The number of examples and the share of padding in training rows, as a line."""
        text = _lengths(self.turns)[0][self.kept].sum() / self.config.max_length
        padding, alone = (f"{100 * (1 - text / rows):.0f} %" for rows in (self.rows, len(self)))
        if not self.config.packing:
            return f"{self.counts}, {padding} padding"
        return f"{self.counts}, packed into {self.rows} rows, {padding} padding instead of {alone}"

    def batches(self, batch_size: int, *, start_step: int = 0, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield batches forever, after the first `start_step`; `rows`: which rows of each batch to read (None: all)."""
        return self._read(self._order(), batch_size, start_step, rows, config=self.config)

    def ids(self, batch_size: int, step: int) -> list[int]:
        """The row numbers (from 0) in the split whose turns are in the batch of a step (from 1), in order."""
        order = self._order()
        used = [number for row in range((step - 1) * batch_size, step * batch_size) for number in order[row]]
        return [int(self.turns[int(self.kept[number])]["row"]) for number in used]

    def in_order(self, batch_size: int, *, rows: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield every example once, in the order of the split, one per row; arguments as for `batches`.

        Missing rows of the last batch have weight 0. With packing, rows are only as long as the longest example needs.
        """
        order = MapDataset.range(_round_up(len(self), batch_size))
        order = order.map(lambda index: [index] if index < len(self) else [])
        config = dataclasses.replace(self.config, packing=False)
        if self.config.packing:
            longest, answer = (int(sizes[self.kept].max()) for sizes in _lengths(self.turns))
            length = min(_round_up(longest, 128), config.max_length)  # attention kernels take multiples of 128
            answer_length = config.answer_length and min(_round_up(answer, 16), config.answer_length)
            config = dataclasses.replace(config, max_length=length, answer_length=answer_length)
        return self._read(order, batch_size, 0, rows, config=config)

    def _order(self) -> MapDataset:
        """The example numbers of each row, epoch after epoch; with weights, each subset has its own epochs."""
        orders = [self._order_of(number) for number in range(len(self.parts))]
        return MapDataset.mix(orders, self.config.weights) if self.config.weights else orders[0]

    def _order_of(self, number: int) -> MapDataset:
        part, seed = self.parts[number], self.config.seed
        rows = len(self.plans[number] if self.config.packing else part)
        # A batch at the end of an epoch has rows of two epochs.
        deal = lru_cache(maxsize=2)(lambda epoch: self.plans[number].deal(seed, epoch))

        def examples(index: int, row: int) -> list[int]:
            return part[deal(index // rows)[row] if self.config.packing else [row]].tolist()

        return MapDataset.range(rows).seed(seed).shuffle().repeat().map_with_index(examples)

    def _read(
        self, order: MapDataset, batch_size: int, start: int, local: Sequence[int] | None, *, config: DataConfig
    ) -> Iterator[Batch]:
        """Yield batches of rows; `order` gives the examples of each row, and `config` the lengths."""
        rows = range(batch_size) if local is None else local

        def read(step: int) -> Batch:
            numbers = [order[step * batch_size + row] if row < batch_size else [] for row in rows]
            examples = [[self.turns[int(self.kept[number])] for number in row] for row in numbers]
            return stack(examples, config, padding=self.padding)

        return iter(MapDataset.range(start, len(order) // batch_size).map(read).to_iter_dataset(READING))


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _check_classes(rows: datasets.Dataset, classes: int, *, name: str) -> None:
    if classes == 0:
        return
    rule = f"guidance needs the class of each row, but those of {name} have none"
    remedy = f"add a column 'class' with numbers from 0 to {classes - 1}, or set config.path.classes to 0"
    require("class" in rows.column_names, f"{rule}: {remedy}")
    if not str(getattr(rows.features["class"], "dtype", "")).startswith(("int", "uint")):
        return  # `_turns` reports the row
    found = rows.select_columns(["class"]).unique("class")  # select first: `unique` would copy the texts too
    largest = max((label for label in found if isinstance(label, int)), default=0)
    problem = f"{name} has rows of class {largest}, but config.path.classes {classes} ends at {classes - 1}"
    require(largest < classes, f"{problem}: raise it")


def _spread(length: int, count: int) -> Int[np.ndarray, " n"]:
    """At most `count` of `length` indices, evenly spaced, so that all joined subsets are represented."""
    count = min(count, length)
    return np.arange(count) * length // count


def _lengths(turns: datasets.Dataset) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The number of input tokens of each turn (all but the last), and of tokens in its answer."""
    lengths, contexts = (turns.data.column(name).to_numpy() for name in ("length", "context"))
    return lengths - 1, lengths - contexts


def _fit(turns: datasets.Dataset, config: DataConfig) -> tuple[Bool[np.ndarray, " n"], Counts]:
    lengths, answers = _lengths(turns)
    long = lengths > config.max_length
    long_answer = ~long & (answers > (config.answer_length or config.max_length))
    fits = ~long & ~long_answer
    return fits, Counts(int(fits.sum()), int(long.sum()), int(long_answer.sum()))


def _check_turns(turns: datasets.Dataset, counts: Counts, config: DataConfig, name: str) -> None:
    require(len(turns) > 0, f"{name} has no message of the assistant to learn from: choose another source")
    if counts.kept == 0:
        lengths, answers = _lengths(turns)
        long = lengths > config.max_length
        option, values = ("max_length", lengths) if long.all() else ("answer_length", answers[~long])
        rule = f"none of the {len(turns)} examples of {name} fits config.data.{option} {getattr(config, option)}"
        raise InputError(f"{rule}: they take {values.min()} to {values.max()} tokens: raise config.data.{option}")
    has_working = config.working == 0 or any(map(len, turns.with_format("arrow")["working"]))
    rule = f"config.data.working is {config.working}, but no row of {name} has a 'working'"
    require(has_working, f"{rule}: add that column, or set it to 0")
