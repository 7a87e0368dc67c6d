"""Conversations to batches of one fixed shape, in an order that is a pure function of the seed and the step.

Rows come from the built-in problems, from folders of JSON lines or Parquet, or from the Hugging Face hub. They are
tokenised once, each of the assistant's turns as one example; `datasets` keeps the result in its cache. There is no
iterator state: step k of any run, resumed or not and on any number of processes, reads the same examples.
"""

import dataclasses
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from grain import MapDataset, ReadOptions
from jaxtyping import Bool, Int
from transformers import PreTrainedTokenizerFast

from l2d_jax import problems, tokens
from l2d_jax.config import DataConfig
from l2d_jax.errors import InputError
from l2d_jax.objective import Batch

HUB = {"smoltalk": ("HuggingFaceTB/smoltalk", ("all",)), "gsm8k": ("openai/gsm8k", ("main",))}  # id, default subsets
FORMATS = {".jsonl": "json", ".parquet": "parquet"}
PROBLEMS = 20_000  # rows of a split where the config sets no number
COLUMNS = ("messages", "question", "answer", "class")  # all that is read of a row
FEATURES = datasets.Features(
    {
        "tokens": datasets.List(datasets.Value("int32")),  # context and answer
        "context": datasets.Value("int32"),  # number of tokens before the answer
        "length": datasets.Value("int32"),  # number of all tokens
        "class": datasets.Value("int32"),
    }
)
READING = ReadOptions(num_threads=4, prefetch_buffer_size=16)  # batches ahead of the one in use


@dataclass(frozen=True)
class Counts:
    """How many examples are used, and how many were left out for their length."""

    kept: int
    too_long: int  # context and answer exceed config.data.max_length
    answer_too_long: int  # the answer exceeds config.data.answer_length

    def __str__(self) -> str:
        return f"{self.kept} ({self.too_long} too long and {self.answer_too_long} with too long an answer left out)"


@dataclass(frozen=True)
class Examples:
    """The examples of one split, tokenised."""

    config: DataConfig
    counts: Counts
    turns: datasets.Dataset  # of FEATURES, whatever their length
    kept: Int[np.ndarray, " n"]  # the rows of `turns` that are used
    padding: int  # id of the token that fills the rows of a batch

    @classmethod
    def load(cls, config: DataConfig, tokenizer: PreTrainedTokenizerFast, *, split: str) -> "Examples":
        """Read and tokenise a split, at most the number of examples that the config asks for.

        That number is spread evenly over the split. Raises `InputError` for rows that cannot be read, for a tokenizer
        without a chat template, and where no example fits the lengths of the config.
        """
        tokens.require_chat_template(tokenizer)
        name, limit = f"{config.source}/{split}", _limit(config, split)
        rows = read_rows(config, split)
        taken = limit or len(rows)
        while True:
            turns = _tokenise(rows, _spread(len(rows), taken), tokenizer, name=name)
            fits, counts = _fit(turns, config)
            if limit is None or counts.kept >= limit or taken >= len(rows):
                break
            taken *= 2  # some were too long, or had no answer
        if counts.kept == 0:
            raise InputError(_misfit(turns, config, name))
        kept = np.flatnonzero(fits)[_spread(counts.kept, limit or counts.kept)]
        counts = dataclasses.replace(counts, kept=len(kept))
        return cls(config, counts, turns.with_format("numpy"), kept, tokens.padding_id(tokenizer))

    def __len__(self) -> int:
        return len(self.kept)

    def batches(
        self, batch_size: int, *, start_step: int = 0, process_index: int = 0, process_count: int = 1
    ) -> Iterator[Batch]:
        """Batches without end, from `start_step` on; each epoch has an order of its own.

        Args:
          batch_size: examples of one step over all processes; a process yields its contiguous share of them.
          start_step: batches that an earlier run has used.
          process_index: of this process, from 0 on.
          process_count: number of processes; must divide `batch_size`, or `InputError` is raised.
        """
        order = MapDataset.range(len(self)).seed(self.config.seed).shuffle().repeat()
        return self._read(order, batch_size, start_step, (process_index, process_count))

    def in_order(self, batch_size: int, *, process_index: int = 0, process_count: int = 1) -> Iterator[Batch]:
        """Every example once, as they stand; the last batch is filled up with rows of weight 0. Arguments as above."""
        order = MapDataset.range(-(-len(self) // batch_size) * batch_size)
        return self._read(order, batch_size, 0, (process_index, process_count))

    def _read(self, order: MapDataset, batch_size: int, start: int, process: tuple[int, int]) -> Iterator[Batch]:
        index, count = process
        if batch_size % count:
            raise InputError(f"the batch size must be a multiple of the {count} processes, got {batch_size}: change it")
        share = batch_size // count
        # Nothing remains to be dropped; but without it, grain fails to count the batches of one of an endless order.
        shares = order.map(self._example).batch(share, drop_remainder=True, batch_fn=self._stack)
        return iter(shares[start * count + index :: count].to_iter_dataset(READING))

    def _example(self, index: int) -> dict[str, Any]:
        return self.turns[int(self.kept[index])] if index < len(self) else {}

    def _stack(self, examples: Sequence[dict[str, Any]]) -> Batch:
        """Examples in the batch's shape; {} becomes a row of padding (grain skips a None)."""
        rows, length = len(examples), self.config.max_length
        width = self.config.answer_length or length
        full: Any = np.full  # NumPy's arrays become JAX's as they are placed on the mesh
        batch: Any = Batch(
            tokens=full((rows, length), self.padding, np.int32),
            queries=None if self.config.answer_length is None else full((rows, width), np.arange(width), np.int32),
            targets=full((rows, width), self.padding, np.int32),
            weights=full((rows, width), 0, np.float32),
            classes=full(rows, 0, np.int32),
        )
        for row, example in enumerate(examples):
            if not example:
                continue
            ids, context = example["tokens"], int(example["context"])
            answer, first = len(ids) - context, context - 1  # the context's last token predicts the answer's first
            batch.tokens[row, : len(ids) - 1] = ids[:-1]
            place = slice(first, first + answer)
            if self.config.answer_length is not None:
                place = slice(0, answer)
                batch.queries[row] = first + np.minimum(np.arange(width), answer - 1)
            batch.targets[row, place] = ids[context:]
            batch.weights[row, place] = 1
            batch.classes[row] = example["class"]
        return batch


def read_rows(config: DataConfig, split: str) -> datasets.Dataset:
    """The rows of a split, with a `messages` column or `question` and `answer`, and `class` where there are classes.

    Raises `InputError` for a source, split or column that is missing, a file that cannot be parsed, and no rows.
    """
    if config.source == "problems":
        return datasets.Dataset.from_list(problems.conversations(_limit(config, split) or PROBLEMS, split=split))
    folder = Path(config.data_dir, config.source) if config.data_dir else Path(config.source)
    if config.data_dir or folder.is_dir():
        if config.subsets:
            raise InputError(f"config.data.subsets is for the hub, but rows are read from {folder}: leave it empty")
        return _read_file(folder, split)
    return _read_hub(config, split)


def _read_file(folder: Path, split: str) -> datasets.Dataset:
    files = [folder / f"{split}{suffix}" for suffix in FORMATS]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        found = sorted({file.stem for file in folder.glob("*") if file.suffix in FORMATS})
        raise InputError(
            f"no split {split!r} in {folder}: it needs {files[0].name} or {files[1].name}, and the splits there are "
            f"{', '.join(found) or 'none'}"
        )
    if file.stat().st_size == 0:
        raise InputError(f"{file} is empty: put one row a line into it")
    try:
        rows = datasets.load_dataset(FORMATS[file.suffix], data_files=str(file), split="train")
    except Exception as error:  # each format's parser raises its own, wrapped or not
        raise InputError(f"{file} cannot be read: {tokens.first_line(error)}: mend or replace it") from error
    return _check_columns(rows, str(file))


def _read_hub(config: DataConfig, split: str) -> datasets.Dataset:
    name, subsets = HUB.get(config.source, (config.source, (None,)))
    parts = []
    for subset in config.subsets or subsets:
        try:
            rows = datasets.load_dataset(name, subset, split=split)
        except Exception as error:  # of the network, the hub's client, the parsers; all mean that there are no rows
            raise InputError(
                f"data set {name!r} (subset {subset}, split {split!r}) cannot be read: {tokens.first_line(error)}: "
                "check the names, or put its rows into a folder and set config.data.data_dir"
            ) from error
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


def _limit(config: DataConfig, split: str) -> int | None:
    return config.train_examples if split == config.train_split else config.validation_examples


def _spread(length: int, count: int) -> Int[np.ndarray, " n"]:
    """At most `count` of `length` indices, evenly spaced: joined subsets all get their share."""
    count = min(count, length)
    return np.arange(count) * length // count


def _tokenise(
    rows: datasets.Dataset, numbers: Int[np.ndarray, " n"], tokenizer: PreTrainedTokenizerFast, *, name: str
) -> datasets.Dataset:
    """The turns of the rows of these numbers, or those of an earlier call from the cache of `datasets`."""
    # `datasets` knows a cached result by the arguments and by this function's name, so the code is an argument too.
    code = hashlib.sha256((inspect.getsource(tokens) + inspect.getsource(_turns)).encode()).hexdigest()
    arguments = {"numbers": numbers, "tokenizer": tokenizer, "name": name, "code": code}
    return rows.select(numbers).map(
        _turns,
        batched=True,
        with_indices=True,
        fn_kwargs=arguments,
        remove_columns=rows.column_names,
        features=FEATURES,
        desc=f"tokenising {name}",
    )


def _turns(
    rows: Mapping[str, list[Any]],
    indices: list[int],
    *,
    numbers: Int[np.ndarray, " n"],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    code: str,  # noqa: ARG001
) -> dict[str, list[Any]]:
    """Tokenise a batch of rows: one row of FEATURES per turn of the assistant."""
    texts, classes = [], []
    for index, messages, label in zip(
        indices, _conversations(rows), rows.get("class", [0] * len(indices)), strict=True
    ):
        try:
            if not (isinstance(messages, list) and all(isinstance(message, dict) for message in messages)):
                raise InputError(f"'messages' must be a list of objects with role and content, got {messages!r:.60}")
            if not isinstance(label, int) or label < 0:
                raise InputError(f"'class' must be an integer, 0 or more, got {label!r}")
            pairs = tokens.turn_texts(messages, tokenizer)
        except InputError as error:
            raise InputError(f"row {numbers[index]} of {name} (the first is 0): {error}") from error
        texts += [text for pair in pairs for text in pair]
        classes += [label] * len(pairs)
    ids = tokens.encode(texts, tokenizer)
    contexts, answers = ids[::2], ids[1::2]
    turns = [context + answer for context, answer in zip(contexts, answers, strict=True)]
    return {"tokens": turns, "context": [*map(len, contexts)], "length": [*map(len, turns)], "class": classes}


def _conversations(rows: Mapping[str, list[Any]]) -> Iterable[Any]:
    if "messages" in rows:
        return rows["messages"]
    pairs = zip(rows["question"], rows["answer"], strict=True)
    return ([{"role": "user", "content": q}, {"role": "assistant", "content": a}] for q, a in pairs)


def _lengths(turns: datasets.Dataset) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
    """The number of tokens that go in (nothing is predicted from the last one), and of those in the answer."""
    lengths, contexts = (turns.data.column(name).to_numpy() for name in ("length", "context"))
    return lengths - 1, lengths - contexts


def _fit(turns: datasets.Dataset, config: DataConfig) -> tuple[Bool[np.ndarray, " n"], Counts]:
    """Which turns the batch's shape can hold."""
    lengths, answers = _lengths(turns)
    long = lengths > config.max_length
    long_answer = ~long & (answers > (config.answer_length or config.max_length))
    fits = ~long & ~long_answer
    return fits, Counts(int(fits.sum()), int(long.sum()), int(long_answer.sum()))


def _misfit(turns: datasets.Dataset, config: DataConfig, name: str) -> str:
    """Why there is no example at all."""
    if len(turns) == 0:
        return f"{name} has no message of the assistant to learn from: choose another source"
    lengths, answers = _lengths(turns)
    long = lengths > config.max_length
    option, values = ("max_length", lengths) if long.all() else ("answer_length", answers[~long])
    return (
        f"none of the {len(turns)} examples of {name} fits config.data.{option} {getattr(config, option)}: "
        f"they take {values.min()} to {values.max()} tokens: raise config.data.{option}"
    )
