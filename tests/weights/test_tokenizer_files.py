"""A model with a tokenizer or a chat template from elsewhere: found, checked, and known by its fingerprint."""

import json

import pytest

from l2d_jax.config.schema import ModelConfig
from l2d_jax.data.tokenizer import CHATML, byte_tokenizer, next_question, prompt_ids, turn_texts
from l2d_jax.errors import InputError
from l2d_jax.weights import base_model
from l2d_jax.weights.export import copy_texts
from l2d_jax.weights.locate import BaseAndAdapters
from l2d_jax.weights.tokenizer_files import read_chat_template, write_tokenizer
from tests.support.programs import remove_template, remove_tokenizer, write_base

OTHER = CHATML.replace("<|im_end|>", "<|pad|>")
NAMED = {"default": OTHER, "tool_use": "{{ tools }}" + OTHER}
MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def base(tmp_path):
    return write_base(tmp_path / "base")


@pytest.fixture
def other(tmp_path):
    """A folder with a tokenizer that has another chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = OTHER
    tokenizer.save_pretrained(tmp_path / "other")
    return tmp_path / "other"


def found(base, **options):
    return base_model.find_base(ModelConfig(name=str(base), **{name: str(value) for name, value in options.items()}))


def text(files):
    return files.tokenizer.decode(prompt_ids(MESSAGES, files.tokenizer))


def test_each_kind_of_chat_template_is_found(tmp_path, base, other):
    file, plain = tmp_path / "mine.jinja", text(found(base))
    file.write_text(OTHER)
    for named in (file, other, other / "tokenizer_config.json"):
        files = found(base, chat_template=named)
        assert text(files) == plain.replace("<|im_end|>", "<|pad|>")
        assert files.stop_ids == (258, 256)
        assert base_model.find_tokenizer(ModelConfig(name=str(base), chat_template=str(named))).chat_template == OTHER
        before, after = found(base).fingerprint, files.fingerprint
        assert {name for name in before if before[name] != after[name]} == {"tokenizer"}


@pytest.mark.parametrize("kind", ["jinja", "config", "list", "processor"])
def test_templates_are_read_as_transformers_writes_them(tmp_path, kind):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = NAMED if kind in ("jinja", "list") else OTHER
    if kind == "processor":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": OTHER}))
    else:
        tokenizer.save_pretrained(tmp_path, save_jinja_files=kind == "jinja")
    assert read_chat_template(str(tmp_path)) == (NAMED if kind in ("jinja", "list") else OTHER)


def test_another_tokenizer_in_a_folder_without_any(base, other):
    remove_tokenizer(base)
    for file in base.glob("*.jinja"):
        file.unlink()
    assert found(base).tokenizer is None
    assert text(found(base, tokenizer=other)) == "<|im_start|>user\nHi<|pad|>\n<|im_start|>assistant\n"
    assert text(found(base, tokenizer=other / "tokenizer.json")).count("<|pad|>") == 1
    with pytest.raises(
        InputError, match=r"has no tokenizer, to which config.model.chat_template would belong: name one"
    ):
        found(base, chat_template=other)


def test_random_weights_take_them_too(other):
    architecture = {"architectures": ["LlamaForCausalLM"], "vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2}
    architecture |= {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-5}
    config = ModelConfig("random", tokenizer=str(other), architecture=architecture)
    assert base_model.find_base(config).tokenizer.chat_template == OTHER


def test_ids_of_the_model_that_are_words_elsewhere_end_nothing(base, other):
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [65, 257]}))
    assert found(base).stop_ids == (65, 257, 258)
    assert found(base, tokenizer=other).stop_ids == (257, 258, 256)


@pytest.mark.parametrize("find", [base_model.find_base, base_model.find_tokenizer])
def test_what_does_not_fit_is_one_line(tmp_path, base, other, find):
    def error(**options):
        with pytest.raises(InputError) as caught:
            find(ModelConfig(name=str(base), **options))
        assert len(str(caught.value)) <= 300
        return str(caught.value)

    large = byte_tokenizer()
    large.add_tokens([f"<{number}>" for number in range(600)])
    large.save_pretrained(tmp_path / "large")
    assert "has the id 858, and the model a vocabulary of" in error(tokenizer=str(tmp_path / "large"))
    assert error(tokenizer=str(tmp_path / "none")).startswith("config.model.tokenizer: ")
    (tmp_path / "empty").mkdir()
    assert "holds nothing: add the model's own" in error(tokenizer=str(tmp_path / "empty"))
    assert "which has no chat template: give a .jinja file" in error(chat_template=str(tmp_path / "empty"))
    (tmp_path / "a.jinja").write_bytes(b"\xff")
    assert "a.jinja is not UTF-8 at byte 0: fix it" in error(chat_template=str(tmp_path / "a.jinja"))
    (other / "chat_template.jinja").unlink()
    (other / "tokenizer_config.json").write_text('{"chat_template": [5]}')
    assert "chat_template must be text, or a list of names and templates, got [5]" in error(chat_template=str(other))


def test_a_copy_takes_the_place_of_what_was_there(tmp_path, base):
    """Every template comes along, and none stays that a file of the copy would be hidden by."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = NAMED
    tokenizer.save_pretrained(base)
    (tmp_path / "out").mkdir()
    copy_texts(BaseAndAdapters(base, ()), tmp_path / "out")
    assert read_chat_template(str(tmp_path / "out")) == NAMED
    tokenizer.chat_template = "a\r\nb"
    write_tokenizer(tmp_path / "out", tokenizer)
    assert read_chat_template(str(tmp_path / "out")) == "a\r\nb"
    assert not list((tmp_path / "out").rglob("*.jinja"))


ROUNDS = [("user", "1 + 1?"), ("assistant", "2"), ("user", "2 + 2?"), ("assistant", "4")]
CHAT = [{"role": role, "content": content} for role, content in ROUNDS]
ASKED = "### Question ###\n1 + 1?\n### Answer ###\n2\n### Question ###\n2 + 2?\n### Answer ###\n"


def test_the_releases_template_for_base_models(base):
    """Written by hand after its `base_llama`: no special token but the one that ends the answer that is learnt."""
    remove_template(base)
    tokenizer = found(base, chat_template="base_llama").tokenizer
    assert tokenizer.decode(prompt_ids(CHAT[:3], tokenizer)) == ASKED
    assert turn_texts(CHAT, tokenizer)[1] == (ASKED, "4<|im_end|>")
    assert turn_texts([{"role": "system", "content": "x"}, *CHAT], tokenizer)[1] == (ASKED, "4<|im_end|>")
    opened = [*CHAT[:3], {"role": "assistant", "content": "It is "}]
    assert tokenizer.decode(prompt_ids(opened, tokenizer)) == f"{ASKED}It is"
    assert next_question(tokenizer) == "### Question ###"
    assert found(base, chat_template="base_llama").stop_ids == (258,)


def test_special_tokens_end_the_answers_of_other_templates():
    assert next_question(byte_tokenizer()) == ""
