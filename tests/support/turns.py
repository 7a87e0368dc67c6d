"""The turns of a conversation as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import text_ids, turn_texts


class Turn(NamedTuple):
    """One answer and everything before it."""

    context: list[int]
    answer: list[int]


def encode_turns(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[Turn]:
    texts = turn_texts(messages, tokenizer)
    ids = text_ids([text for turn in texts for text in turn], tokenizer)
    return [Turn(*pair) for pair in zip(ids[::2], ids[1::2], strict=True)]
