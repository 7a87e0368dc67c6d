"""Batches of tokenised examples in a fixed shape, with one example per row, or several packed into a row."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from l2d_jax.config.schema import Config, DataConfig


class Batch(NamedTuple):
    """Examples in a fixed shape: T tokens of context and answer, M positions that predict the answer."""

    tokens: Int[Array, "B T"]  # context, and answer without its last token, padded on the right
    queries: Int[Array, "B M"] | None  # index of the token whose successor is predicted; None: every token
    targets: Int[Array, "B M"]  # the token that is predicted
    weights: Float[Array, "B M"]  # 1 for an answer token, 0 for padding
    classes: Int[Array, " B"] | Int[Array, "B M"]  # class for guidance, per query if packed; 0 without classes
    segments: Int[Array, "B T"] | None = None  # number of each token's example, from 1; 0: padding; None: not packed
    working: Int[Array, "B M S"] | None = None  # the target after each worked step; None: no worked steps

    @property
    def query_segments(self) -> Int[Array, "*A B M"] | None:
        """The number of each query's example, if rows are packed; else None."""
        if self.segments is None:
            return None
        if self.queries is None:
            return jnp.repeat(self.segments, self.targets.shape[-1] // self.tokens.shape[-1], axis=-1)
        return jnp.take_along_axis(self.segments, self.queries, axis=-1)

    def repeat(self, count: int) -> "Batch":
        """Repeat each query `count` times, next to each other, and divide its weight among the copies."""
        copy = partial(jnp.repeat, repeats=count, axis=1)
        parts = (self.queries, self.targets, self.weights, self.working)
        queries, targets, weights, working = jax.tree.map(copy, parts)
        classes = self.classes if self.classes.ndim == 1 else copy(self.classes)
        return Batch(self.tokens, queries, targets, weights / count, classes, self.segments, working)


def stack(rows: Sequence[Sequence[Mapping[str, Any]]], config: DataConfig, *, padding: int) -> Batch:
    """Build a batch of NumPy arrays from rows of examples. All must fit; without packing, a row has one at most.

    An example has `tokens`, `context` (the number of tokens before the answer) and `class`. With `config.working` it
    also has `working`: the tokens of the answer after each worked step, one step after the other. If there are more
    steps than `config.working`, evenly spaced ones are taken; if there are fewer, the answer fills the rest.
    """
    length, width, is_packed = config.max_length, config.answer_length or config.max_length, config.packing
    full: Any = np.full
    batch: Any = Batch(
        tokens=full((len(rows), length), padding, np.int32),
        queries=None if config.answer_length is None else full((len(rows), width), np.arange(width), np.int32),
        targets=full((len(rows), width), padding, np.int32),
        weights=full((len(rows), width), 0, np.float32),
        classes=full((len(rows), width) if is_packed else len(rows), 0, np.int32),
        segments=full((len(rows), length), 0, np.int32) if is_packed else None,
        working=full((len(rows), width, config.working), padding, np.int32) if config.working else None,
    )
    for row, examples in enumerate(rows):
        assert is_packed or len(examples) <= 1
        start = answered = 0  # tokens and answer positions filled so far
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
            if batch.working is not None:
                steps = np.append(np.asarray(example["working"], np.int32), ids[context:]).reshape(-1, answer)
                stride = max((len(steps) - 1) / config.working, 1)
                chosen = np.minimum(np.round(stride * np.arange(config.working)).astype(int), len(steps) - 1)
                batch.working[row, place] = steps[chosen].T
            start, answered = end, answered + answer
    return batch


def count_text(batch: Batch) -> int:
    """The number of tokens of a batch without padding."""
    if batch.segments is not None:
        return int(np.count_nonzero(batch.segments))
    queries = np.arange(batch.weights.shape[1]) if batch.queries is None else batch.queries
    last = np.where(np.asarray(batch.weights) > 0, queries, -1).max(axis=1)  # an example ends with its answer
    return int((last + 1).sum())


def random_batch(config: Config, vocab_size: int) -> Batch:
    """A batch of full rows of random tokens in the config's shape, for benchmarks."""
    length, width = config.data.max_length, config.data.answer_length or config.data.max_length
    tokens = np.random.default_rng(0).integers(vocab_size, size=(config.train.batch_size, length + 1), dtype=np.int32)
    rows = [[{"tokens": row, "context": length - width + 1, "class": 0, "working": ()}] for row in tokens]
    return stack(rows, config.data, padding=0)
