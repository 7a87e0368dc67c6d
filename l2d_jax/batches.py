"""Tokenised examples as batches of one fixed shape, with one example per row or several."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from l2d_jax.config import DataConfig
from l2d_jax.objective import Batch


def stack(
    rows: Sequence[Sequence[Mapping[str, Any]]], config: DataConfig, *, padding: int, is_packed: bool = False
) -> Batch:
    """A batch as NumPy arrays, which become JAX's as they are placed on the mesh.

    Args:
      rows: the examples of each row, which fit into it; none make a row of padding. An example has its `tokens`, the
        number of those before the answer as `context`, and a `class`.
      config: of the row's shape.
      padding: id of the token that fills a row.
      is_packed: number the examples of a row, of which there may be several.
    """
    length, width = config.max_length, config.answer_length or config.max_length
    full: Any = np.full
    batch: Any = Batch(
        tokens=full((len(rows), length), padding, np.int32),
        queries=None if config.answer_length is None else full((len(rows), width), np.arange(width), np.int32),
        targets=full((len(rows), width), padding, np.int32),
        weights=full((len(rows), width), 0, np.float32),
        classes=full((len(rows), width) if is_packed else len(rows), 0, np.int32),
        segments=full((len(rows), length), 0, np.int32) if is_packed else None,
    )
    for row, examples in enumerate(rows):
        assert is_packed or len(examples) <= 1
        start = answered = 0  # tokens and answer positions that are taken
        for number, example in enumerate(examples, 1):
            ids, context = example["tokens"], int(example["context"])
            answer, end = len(ids) - context, start + len(ids) - 1
            first = start + context - 1  # the context's last token predicts the answer's first
            place = slice(first, first + answer)
            if config.answer_length is not None:
                place = slice(answered, answered + answer)
                batch.queries[row, answered:] = first + np.minimum(np.arange(width - answered), answer - 1)
            batch.tokens[row, start:end] = ids[:-1]
            batch.targets[row, place] = ids[context:]
            batch.weights[row, place] = 1
            batch.classes[(row, place) if is_packed else row] = example["class"]
            if batch.segments is not None:
                batch.segments[row, start:end] = number
            start, answered = end, answered + answer
    return batch


def count_text(batch: Batch) -> int:
    """The tokens of a batch without padding."""
    if batch.segments is not None:
        return int(np.count_nonzero(batch.segments))
    queries = np.arange(batch.weights.shape[1]) if batch.queries is None else batch.queries
    last = np.where(np.asarray(batch.weights) > 0, queries, -1).max(axis=1)  # an example ends with its answer
    return int((last + 1).sum())
