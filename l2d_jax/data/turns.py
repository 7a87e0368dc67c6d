"""Tokenises rows of conversations into Arrow rows, one example for each of the assistant's turns.

`datasets` writes the result to a file and maps it into memory, so a process holds only the rows that it reads.
"""

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from jaxtyping import Int
from transformers import PreTrainedTokenizerFast

from l2d_jax.data import chat_template, messages, row_formats, template_bounds
from l2d_jax.data import tokenizer as tokenization
from l2d_jax.data.packing import PackingPlan
from l2d_jax.data.text_rows import values_of
from l2d_jax.errors import InputError, shown

# Token ids of context and answer, and of the answer after each worked step; the number of tokens before the answer, and
# of context and answer; the class; the row in the split, from 0.
TOKENS = dict.fromkeys(("tokens", "working"), datasets.List(datasets.Value("int32")))
NUMBERS = dict.fromkeys(("context", "length", "class", "row"), datasets.Value("int32"))
FEATURES = datasets.Features({**TOKENS, **NUMBERS})


@dataclass(frozen=True)
class TokenisedSplit:
    """The turns of a split; a folder of prepared data adds fingerprint and packing plans."""

    turns: datasets.Dataset  # rows of FEATURES, mapped into memory
    ends: list[int]  # for each subset, the number of its last row plus one
    has_classes: bool  # whether the rows of the source have a column `class`
    fingerprint: str | None = None  # of the examples; None: not computed yet
    plans: Sequence[PackingPlan] = ()  # which examples share a row, if that is known
    silent: int = 0  # rows without an answer to learn
    held_out: int = 0  # rows of the training split that are held out for validation


def tokenise_rows(
    rows: datasets.Dataset, numbers: Int[np.ndarray, " n"], arguments: Mapping[str, Any], *, file: Path | None = None
) -> datasets.Dataset:
    """Tokenise the rows with these numbers by `_turns`, or take the result from the cache of `datasets`.

    With `file`, rows are always tokenised, and the result is written there.
    """
    # `datasets` identifies a cached result by the arguments and the function's name, so the code is an argument too.
    modules: Any = (tokenization, messages, chat_template, template_bounds, row_formats, _turns)
    code = hashlib.sha256("".join(map(inspect.getsource, modules)).encode()).hexdigest()
    # Until it is written, the tokenizer's output takes hundreds of bytes per token, so batches are small.
    options = {"batch_size": 250, "with_indices": True, "remove_columns": rows.column_names, "features": FEATURES}
    options["fn_kwargs"] = {**arguments, "numbers": numbers, "code": code}
    if file is not None:
        options |= {"cache_file_name": str(file), "load_from_cache_file": False, "new_fingerprint": file.stem}
    return (
        rows.select(numbers)
        .with_format("arrow")
        .map(_turns, batched=True, desc=f"tokenising {arguments['name']}", **options)
    )


def _turns(
    rows: pa.Table,
    indices: list[int],
    *,
    numbers: Int[np.ndarray, " n"],
    tokenizer: PreTrainedTokenizerFast,
    name: str,
    empty_thoughts: bool,
    code: str,  # noqa: ARG001
) -> dict[str, list[Any]]:
    """Tokenise a batch of rows: one row of FEATURES per learnt turn of the assistant."""
    texts, classes, origins, steps = [], [], [], []
    columns = {column: values_of(rows.column(column)) for column in rows.column_names}
    for place, index in enumerate(indices):
        row = {column: values[place] for column, values in columns.items()}
        label, working = row.get("class", 0), row.get("working")
        try:
            if type(label) is not int or label < 0:
                raise InputError(f"'class' must be an integer, 0 or more, got {shown(label)}")
            said, tools = row_formats.conversation_of(row)
            pairs = tokenization.turn_texts(said, tokenizer, empty_thoughts=empty_thoughts, tools=tools)
            steps += [tokenization.working_ids(pairs, said, working, tokenizer)] if working else [[]] * len(pairs)
        except InputError as error:
            number = row.get(row_formats.PLACE, numbers[index])
            raise InputError(f"row {number} of {name} (the first is 0): {error}") from error
        texts += [text for pair in pairs for text in pair]
        classes += [label] * len(pairs)
        origins += [numbers[index]] * len(pairs)
    ids = tokenization.text_ids(texts, tokenizer)
    turns = [context + answer for context, answer in zip(ids[::2], ids[1::2], strict=True)]
    lengths = {"context": [*map(len, ids[::2])], "length": [*map(len, turns)]}
    return {"tokens": turns, "working": steps, **lengths, "class": classes, "row": origins}
