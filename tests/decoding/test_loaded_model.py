"""The Python interface: text for text, token ids for token ids, and one clear line for what does not fit."""

import dataclasses
import logging
import subprocess
import sys

import numpy as np
import pytest

import l2d_jax
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import byte_tokenizer, prompt_ids, text_ids
from l2d_jax.decoding.likelihood import Likelihood
from l2d_jax.decoding.loaded_model import OTHER_OPTIONS, LoadedModel
from l2d_jax.errors import InputError
from l2d_jax.model.l2d import Model
from tests.support import requests, tiny
from tests.support.programs import config, open_base

IDS = [[5, 17, 3], [60, 2, 41, 8, 8, 30]]
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def model():
    """With token ids alone."""
    return LoadedModel(tiny.model(classes=2), None, (95,), DecodeConfig(budget=3, max_new_tokens=6))


@pytest.fixture(scope="module")
def speaking(mesh):
    """A plain language model with a tokenizer."""
    base = open_base(config().model, mesh)
    return l2d_jax.LoadedModel(
        Model.build(base.llm, None), base.tokenizer, base.stop_ids, DecodeConfig(budget=1, max_new_tokens=6)
    )


@pytest.mark.slow
def test_ids_are_answered_with_ids(model):
    both = model.generate(IDS)
    assert both == requests.generate(model, IDS)
    assert model.generate(IDS[0]) == both[0]
    assert model.generate(tuple(IDS[0])) == both[0]
    assert model.generate(np.array(IDS[0]).tolist()) == both[0]


@pytest.mark.slow
def test_a_trace_has_the_tokens_of_the_answer(model, speaking):
    traced = model.trace(IDS[0], seed=3)
    assert [token.token for token in traced] == model.generate(IDS[0], seed=3)
    assert {token.evaluations for token in traced} == {3}
    assert "".join(token.text for token in speaking.trace("Hi")) == speaking.generate("Hi")
    with pytest.raises(InputError, match="draws"):
        model.trace(IDS[0], draws=2)
    with pytest.raises(InputError, match="one value of each option"):
        model.trace(IDS[0], budget=[3])


@pytest.mark.slow
def test_text_is_answered_with_text(speaking):
    text = speaking.generate("Hi")
    ids = speaking.generate(prompt_ids(HI, speaking.tokenizer))
    assert text == speaking.tokenizer.decode(ids, skip_special_tokens=True)
    assert text
    assert speaking.generate(HI) == text
    assert speaking.generate(["Hi"]) == speaking.generate([HI]) == [text]
    assert speaking.generate(["Hi", prompt_ids(HI, speaking.tokenizer)]) == [text, ids]
    assert "".join(speaking.stream("Hi")) == "".join(speaking.stream(HI)) == text
    assert "".join(speaking.stream(prompt_ids(HI, speaking.tokenizer))) == text
    assert (
        speaking.generate("Hi", stop=text[2])
        == "".join(speaking.stream("Hi", stop=[text[2]]))
        == text[: text.index(text[2])]
    )


@pytest.mark.slow
def test_options_change_the_defaults(model):
    free = model.generate(IDS[0])
    assert len(model.generate(IDS[0], max_new_tokens=2)) == 2
    assert (
        model.generate(IDS[0], budget=7)
        == requests.generate(model, IDS[:1], settings=DecodeConfig(budget=7, max_new_tokens=6))[0]
    )
    assert (
        model.generate(IDS[0], settings=DecodeConfig(budget=1, max_new_tokens=2))
        == requests.generate(model, IDS[:1], settings=DecodeConfig(budget=1, max_new_tokens=2))[0]
    )
    assert model.generate(IDS[0], temperature=1, seed=1) != model.generate(IDS[0], temperature=1, seed=2)
    assert len(model.generate(IDS[0], solver="fehlberg2", tolerance=1.0)) == 6  # with the ample budget
    assert set(model.generate(IDS[0], allowed=[1, 2], banned=[2])) == {1}
    assert model.generate(IDS[0]) == free


@pytest.mark.slow
def test_samples_are_a_list_for_each_prompt(model):
    flat = requests.generate(model, IDS, samples=2, settings=DecodeConfig(budget=3, max_new_tokens=6, temperature=1.0))
    assert model.generate(IDS, samples=2, temperature=1.0) == [flat[:2], flat[2:]]
    assert model.generate(IDS[0], samples=2, temperature=1.0) == flat[:2]
    assert model.generate(IDS[0], samples=1) == [model.generate(IDS[0])]


@pytest.mark.slow
def test_one_class_for_all_or_one_for_each(model):
    zero, one = (model.generate(IDS, label=label) for label in (0, 1))
    assert zero != one
    assert model.generate(IDS, label=[0, 1]) == [zero[0], one[1]]
    assert model.score(IDS, IDS, label=1)[0].total == model.score(IDS, IDS, label=[1, 0])[0].total


@pytest.mark.slow
def test_likelihoods_of_one_answer_and_of_several(model, speaking):
    one = model.score(IDS[0], [7, 8], draws=4)
    assert isinstance(one, Likelihood)
    assert one.error > 0
    first, second = model.score(IDS[0], [[7, 8], [9]], draws=4)
    np.testing.assert_allclose(first.tokens, one.tokens, atol=1e-4)
    np.testing.assert_allclose(second.total, model.score(IDS[0], [9], draws=4).total, atol=1e-4)  # under the same noise
    pairs = model.score(IDS, [[7, 8], [9]], draws=4)
    wanted = requests.score(model, IDS, [[7, 8], [9]], draws=4)
    assert [pair.total for pair in pairs] == [pair.total for pair in wanted]
    ids = text_ids(["48"], speaking.tokenizer)[0]
    assert speaking.score("Hi", "48").total == speaking.score(HI, ids).total


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (IDS, {"buget": 3}, "unknown option 'buget': did you mean 'budget'?"),
        (IDS, {"sample": 3}, "unknown option 'sample': did you mean 'samples'?"),
        (IDS, {"budget": "3"}, "config.decode.budget must be of type int, got '3' of type str"),
        (IDS, {"budget": 4}, "a budget of 4 evaluations is unreachable for midpoint"),
        (IDS, {"solver": "rk5"}, "config.decode.solver must be one of 'euler'"),
        (IDS, {"label": [0]}, "guidance takes one class label per prompt, got 1 for 2 prompts"),
        (IDS, {"samples": 0}, "samples must be in [1, 1000000], got 0"),
        (IDS, {"seed": 2**32}, "seed must be in [0, 4294967296), got 4294967296"),
        (IDS, {"seed": -1}, "seed must be in"),
        (IDS, {"guidance": 2.0}, "guidance is the strength of a class, and no label is given"),
        (IDS, {"settings": DecodeConfig(budget=3, guidance=2.0)}, "and no label is given"),
        (IDS, {"anneal": True}, "config.decode.velocity_temperature fall to 0, but it is 0 already"),
        (IDS, {"velocity": "expectation"}, "'expectation' is the arg max where"),
        (IDS, {"budget": 1, "draws": 2}, "draws changes nothing at a budget of 1"),
        (IDS, {"budget": 1, "label": 0}, "label changes nothing at a budget of 1"),
        (IDS, {"tolerance": 0.1}, "tolerance is for adaptive solvers"),
        (IDS, {"stop": "x"}, "stop strings need a tokenizer"),
        ([], {}, "a prompt is empty"),
        ([[]], {}, "a prompt is empty"),
        ([[1, 96]], {}, "token 96 is not one of the 96 of the model"),
        ("Hi", {}, "the model folder has no tokenizer"),
        (HI, {}, "the model folder has no tokenizer"),
    ],
)
def test_bad_requests(model, prompts, options, message):
    with pytest.raises(InputError) as error:
        model.generate(prompts, **options)
    assert message in str(error.value)


def test_a_plain_language_model_has_no_options_of_a_path(speaking):
    with pytest.raises(InputError, match="solver is an option of a diffusion path, and this model has none"):
        speaking.generate("Hi", solver="euler")
    with pytest.raises(InputError, match=r"guidance 2.0 is the strength of a class"):
        speaking.generate("Hi", guidance=2.0)


@pytest.mark.parametrize("name", ["temperature", "top_p", "gate", "max_new_tokens"])
def test_a_likelihood_refuses_what_it_does_not_depend_on(model, name):
    with pytest.raises(InputError, match=f"a likelihood does not depend on {name}: leave it out"):
        model.score(IDS[0], [7], **{name: 1})


def test_a_likelihood_that_is_no_number_is_an_error(model):
    llm = model.model.llm
    broken = dataclasses.replace(llm, embed=llm.embed.at[IDS[1][0]].set(np.nan))
    alone = dataclasses.replace(model, model=Model.build(broken, None), defaults=DecodeConfig(budget=1))
    with pytest.raises(InputError, match=r"logits of sequences \[1\] were not numbers"):
        alone.score(IDS, [[7], [9]])


def test_something_that_is_no_prompt(model):
    with pytest.raises(InputError, match=r"is text, a list of messages or a list of token ids, got \[1, None\]"):
        model._encode([1, None])  # behind the types of `generate`, which tests check


def test_streams_and_scores_know_their_options_too(model):
    with pytest.raises(InputError, match="unknown option 'temprature': did you mean 'temperature'"):
        list(dataclasses.replace(model, tokenizer=byte_tokenizer()).stream(IDS[0], temprature=1.0))
    with pytest.raises(InputError, match="unknown option 'sovler': did you mean 'solver'"):
        model.score(IDS[0], [1], sovler="euler")
    with pytest.raises(InputError, match="the model folder has no tokenizer"):
        next(model.stream(IDS[0]))
    with pytest.raises(InputError, match="each prompt takes one answer of at least one token, got 1 for 2"):
        model.score(IDS, [[1]])


def test_no_option_has_two_meanings():
    assert not set(OTHER_OPTIONS) & {field.name for field in dataclasses.fields(DecodeConfig)}


def test_a_model_is_shown_without_its_weights(model):
    assert repr(model).startswith("LoadedModel(stop_ids=(95,), defaults=DecodeConfig(")


def test_the_advice_to_install_pytorch_is_not_shown(caplog):
    logger = logging.getLogger("transformers")  # which is made before transformers is imported
    logger.warning("PyTorch was not found. Models won't be available")
    logger.warning("another warning of %s", "transformers")
    assert [record.getMessage() for record in caplog.records] == ["another warning of transformers"]


def test_importing_the_package_imports_nothing_large():
    code = "import sys, l2d_jax; sys.exit(bool({'jax', 'numpy', 'flax', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'stream'"):
        _ = l2d_jax.stream
