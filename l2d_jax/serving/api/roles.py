"""The role `developer`, by which OpenAI's newer models and clients call what others call `system`."""

from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from l2d_jax.data.tokenizer import find_template

DEVELOPER = "developer"


def name_system(messages: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerFast) -> list[Mapping[str, Any]]:
    """Give messages of the role `developer` the role `system`, unless the chat template knows `developer`.

    Many templates leave out messages of a role that they do not know.
    """
    if DEVELOPER in find_template(tokenizer):
        return [*messages]
    return [{**message, "role": "system"} if message.get("role") == DEVELOPER else message for message in messages]
