"""The memory that decoding needs, and a check that refuses what cannot fit, before anything is allocated."""

from typing import Any

import jax.numpy as jnp

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding.buckets import TOGETHER, answer_slots, round_up, sample_bucket
from l2d_jax.decoding.parallel.pace import can_be_parallel, window
from l2d_jax.decoding.refinement.condition_table import CAPACITY
from l2d_jax.distributed.memory import require_memory, tree_bytes
from l2d_jax.model.llm import LLM


def check_decoding_memory(
    llm: LLM,
    path: PathConfig | None,
    settings: DecodeConfig,
    *,
    rows: int,
    longest: int,
    remedy: str,
    candidates: int = 0,
    cached: int = 0,
) -> None:
    """Raise `InputError` if decoding `rows` sequences together needs more memory than the devices have.

    Args:
      llm: the language model; declared weights, without values, are enough.
      path: config of its path, or None.
      settings: how to decode.
      rows: sequences at a time; beams, in a search.
      longest: tokens of the longest prompt.
      remedy: what the error tells the user to lower.
      candidates: tokens that a search tries per beam; 0: no search.
      cached: bytes of a prefix cache.
    """
    is_parallel = path is not None and settings.parallel != "off" and can_be_parallel(settings)
    evaluations = window([settings], vocab_size=llm.architecture.vocab_size, lanes=rows) + 1 if is_parallel else 1
    a, item, slots = llm.architecture, jnp.dtype(llm.dtype).itemsize, answer_slots(settings.max_new_tokens)
    needs: dict[str, Any] = {
        "weights": tree_bytes(llm),
        "KV cache": rows * (round_up(longest) + slots) * llm.token_bytes * (2 if candidates else 1),  # beams move
        "logits": 4 * rows * min(sample_bucket(settings.draws), TOGETHER) * a.vocab_size * evaluations,
        "candidates": rows * candidates * (12 + slots),  # compared with all tokens of their answers
        "prefix cache": cached,
    }
    if path is not None:
        needs["conditions"] = CAPACITY * (path.classes + 1) * 6 * a.num_hidden_layers * a.hidden_size * item
    require_memory(needs, remedy)
