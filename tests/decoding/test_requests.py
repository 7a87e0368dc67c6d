import jax
import jax.numpy as jnp

from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import decode, requests
from l2d_jax.decoding.buckets import answer_slots, pad
from l2d_jax.distributed.memory import tree_bytes
from tests.support import tiny

PROMPTS = [[1, 2, 3]] * 3


def test_the_cache_is_counted_as_it_is_made(monkeypatch):
    found = {}
    monkeypatch.setattr(requests, "require_memory", lambda needs, remedy: found.update(needs))
    llm, settings = tiny.llm("llama"), DecodeConfig(max_new_tokens=13, draws=5)
    requests.check_decoding_memory(llm, None, settings, rows=3, longest=3, remedy="x")
    keys = jax.random.split(jax.random.key(0), 3)
    state = decode.prefill(llm, *pad(PROMPTS), keys, capacity=answer_slots(13))
    assert found["KV cache"] == state.cache.k.nbytes + state.cache.v.nbytes
    assert found["weights"] == tree_bytes(llm) == sum(leaf.nbytes for leaf in jax.tree.leaves(llm))
    assert found["logits"] == jnp.zeros((3, 5, llm.architecture.vocab_size)).nbytes
    assert found["candidates"] == 0
