import jax
import jax.numpy as jnp
import pytest

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.decoding import memory
from l2d_jax.decoding.batch.prefill import prefill
from l2d_jax.decoding.buckets import answer_slots, pad, sample_bucket
from l2d_jax.decoding.memory import check_decoding_memory
from l2d_jax.decoding.refinement.settings import check_settings
from l2d_jax.decoding.refinement.solver import AMPLE
from l2d_jax.decoding.requests import check_asked, override_settings
from l2d_jax.distributed.memory import tree_bytes
from l2d_jax.errors import InputError
from tests.support import tiny

PROMPTS = [[1, 2, 3]] * 3


def test_the_cache_is_counted_as_it_is_made(monkeypatch):
    found = {}
    monkeypatch.setattr(memory, "require_memory", lambda needs, remedy: found.update(needs))
    llm, settings = tiny.llm("llama"), DecodeConfig(max_new_tokens=13, draws=5)
    check_decoding_memory(llm, None, settings, rows=3, longest=3, remedy="x")
    keys = jax.random.split(jax.random.key(0), 3)
    state = prefill(llm, *pad(PROMPTS), keys, capacity=answer_slots(13))
    assert found["KV cache"] == state.cache.k.nbytes + state.cache.v.nbytes
    assert found["weights"] == tree_bytes(llm) == sum(leaf.nbytes for leaf in jax.tree.leaves(llm))
    assert found["logits"] == jnp.zeros((3, sample_bucket(5), llm.architecture.vocab_size)).nbytes
    assert found["candidates"] == 0


GUIDED = PathConfig(classes=2)


@pytest.mark.parametrize(
    ("options", "path", "message"),
    [
        ({"guidance": 2.0}, PathConfig(), "guidance 2.0 is the strength of a class"),
        ({"guidance": 2.0, "budget": 1}, None, "guidance 2.0 is the strength of a class"),
        (
            {"guidance": 2.0},
            PathConfig(classes=2, class_dropout=0.0),
            "mixes in the null class, which is never trained",
        ),
        ({"anneal": True}, PathConfig(), "lets config.decode.velocity_temperature fall to 0, but it is 0 already"),
        ({"velocity": "expectation"}, PathConfig(), "'expectation' is the arg max"),
        ({"budget": 3}, None, "a budget of 3 needs a diffusion path"),
        (
            {"solver": "fehlberg2", "end": 0.99},
            PathConfig(sigma=64.0),
            r"end 0.99 is later than 1 - 1/sigma = 0.984375, where the adaptive solver 'fehlberg2' stops: lower it",
        ),
    ],
)
def test_options_that_contradict_one_another_are_refused(options, path, message):
    with pytest.raises(InputError, match=message):
        check_settings(override_settings(DecodeConfig(), options), path)


@pytest.mark.parametrize(
    ("options", "path", "label", "message"),
    [
        ({"budget": 1, "solver": "euler"}, PathConfig(), None, "solver changes nothing at a budget of 1"),
        ({"budget": 1, "draws": 4}, PathConfig(), None, "draws changes nothing at a budget of 1"),
        ({"budget": 1, "gate": 0.5}, PathConfig(), None, "gate changes nothing at a budget of 1"),
        ({"budget": 1, "end": 0.5}, PathConfig(), None, "end changes nothing at a budget of 1"),
        ({"budget": 1, "end": 0.5}, None, None, "end is an option of a diffusion path"),
        ({"budget": 1}, GUIDED, 1, "label changes nothing at a budget of 1"),
        ({"budget": 1, "velocity_temperature": 1.0}, None, None, "is an option of a diffusion path"),
        ({"tolerance": 1e-2}, PathConfig(), None, "tolerance is for adaptive solvers"),
        ({"guidance": 2.0}, GUIDED, None, "no label is given: give one"),
    ],
)
def test_what_is_asked_for_and_changes_nothing_is_refused(options, path, label, message):
    settings, has_label = override_settings(DecodeConfig(), options), label is not None
    asked = {*options, "label"} if has_label else {*options}
    with pytest.raises(InputError, match=message):
        check_asked(asked, [settings], path, has_label=has_label)
    check_asked({"budget"}, [settings], path, has_label=has_label)  # a default may be unused


@pytest.mark.parametrize(
    ("several", "path", "label"),
    [
        ([{"budget": 1, "solver": "euler"}, {"budget": 15, "solver": "euler"}], PathConfig(), None),
        ([{"budget": 1, "draws": 1, "gate": 0.0, "guidance": 1.0, "velocity_temperature": 0.0}], None, None),
        ([{"temperature": 0.0, "top_k": 5, "top_p": 0.9}], PathConfig(), None),
        ([{"solver": "fehlberg2", "tolerance": 1e-2}], PathConfig(), None),
        ([{"guidance": 2.0}], GUIDED, 0),
        ([{"solver": "fehlberg2", "end": 63 / 64}, {"solver": "rk4", "budget": 17, "end": 0.99}], PathConfig(), None),
        ([{"budget": 1, "end": 1.0}], None, None),
    ],
)
def test_what_is_asked_for_and_done_is_accepted(several, path, label):
    chosen = [override_settings(DecodeConfig(), options) for options in several]
    check_asked({name for options in several for name in options}, chosen, path, has_label=label is not None)


def test_a_default_that_a_change_leaves_without_effect_is_no_conflict():
    default = DecodeConfig(velocity="expectation", velocity_temperature=1.0, anneal=True)
    assert override_settings(default, {"velocity_temperature": 0.0}) == DecodeConfig()
    assert override_settings(default, {"solver": "fehlberg2"}).budget == AMPLE
    assert override_settings(default, {"solver": "fehlberg2", "budget": 15}).budget == 15
    asked = override_settings(default, {"velocity_temperature": 0.0, "anneal": True})
    with pytest.raises(InputError, match="it is 0 already"):
        check_settings(asked, PathConfig())
