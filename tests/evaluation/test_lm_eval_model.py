"""The model that lm-evaluation-harness asks, against the harness's own class for Hugging Face models."""

import dataclasses

import jax
import pytest
from jax._src import test_util
from tokenizers.processors import TemplateProcessing

from tests.support import tiny
from tests.support.programs import write_base

pytest.importorskip("lm_eval", reason="needs lm-evaluation-harness: the extra lm-eval")

from lm_eval.api.instance import Instance

from l2d_jax.config.schema import DecodeConfig, PathConfig
from l2d_jax.data.tokenizer import CHATML, byte_tokenizer
from l2d_jax.errors import InputError
from l2d_jax.evaluation.lm_eval_model import HarnessOptions, LmEvalModel, cut_text, noise_number, parse_generation
from l2d_jax.loading import load
from l2d_jax.model.l2d import Model
from l2d_jax.weights import model_folder
from tests.support.requests import score

POSITIONS = 96
BASE = DecodeConfig(budget=1, solver="euler")
PATH = DecodeConfig(budget=3, velocity_temperature=1.0)
SMALL = PathConfig(width=8, translation_width=8, frequency_width=8, condition_width=8, lora_rank=2, lora_alpha=2.0)
LONG = "The quick brown fox jumps over the lazy dog. " * 5  # 225 tokens
PAIRS = [
    ("2 + 2 =", " 4"),
    ("2 + 2 = ", "5"),  # the space goes to the continuation
    ("", "An answer without a question."),
    ("<|im_start|>user\nHi", "!"),
    (LONG, "End."),  # what exceeds the positions is left out
    (LONG, "x"),
    ("2 + 2 =", "\n"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    changes = {"max_position_embeddings": POSITIONS, "model_type": "llama"}
    return write_base(tmp_path_factory.mktemp("base") / "base", **changes)


@pytest.fixture(scope="module")
def base(folder, mesh):
    """The base alone."""
    return load(folder, mesh=mesh, dtype="float32")


@pytest.fixture(scope="module")
def loaded(base, mesh):
    """With a path that says something else."""
    path = tiny.randomise(model_folder.new_path(SMALL, base.model.llm, mesh, seed=0))
    path = dataclasses.replace(path, merge=jax.tree.map(lambda leaf: 10 * leaf, path.merge))
    return dataclasses.replace(base, model=Model.build(base.model.llm, path), defaults=PATH)


@pytest.fixture(scope="module")
def theirs(folder, base):
    """The harness's own class, on the same folder."""
    pytest.importorskip("torch", reason="the harness's own class computes with torch")
    from lm_eval.models.huggingface import HFLM

    return HFLM(str(folder), tokenizer=base.tokenizer, device="cpu", dtype="float32", batch_size=2)


def ours(loaded, settings, *, batch_size=3, **options):
    return LmEvalModel(loaded, options=HarnessOptions(settings, settings, batch_size=batch_size, **options))


def ask(kind, arguments):
    return [Instance(request_type=kind, doc={}, arguments=own, idx=0) for own in arguments]


def agree(one, other):
    for (total, is_greedy), (wanted, is_wanted) in zip(one, other, strict=True):
        assert total == pytest.approx(wanted, abs=1e-4)
        assert is_greedy == is_wanted


def generated(harness, contexts, **options):
    return harness.generate_until(ask("generate_until", [(context, options) for context in contexts]))


def test_likelihoods_are_those_of_the_harness(base, theirs):
    model = ours(base, BASE)
    contexts = ["Hi", "2 + 2 ="]
    likely = list(zip(contexts, [text[:5] for text in generated(model, contexts, max_gen_toks=20)], strict=True))
    requests = ask("loglikelihood", PAIRS + likely)
    found = model.loglikelihood(requests)
    agree(found, theirs.loglikelihood(requests))
    assert [is_greedy for _, is_greedy in found[-2:]] == [True, True]
    assert not all(is_greedy for _, is_greedy in found)


def test_whole_texts_are_those_of_the_harness(base, theirs):
    texts = ["Hi", LONG, LONG[: POSITIONS - 1], LONG[:POSITIONS], LONG[: POSITIONS + 1], LONG[: 2 * POSITIONS]]
    requests = ask("loglikelihood_rolling", [(text,) for text in texts])
    found = ours(base, BASE, batch_size=4).loglikelihood_rolling(requests)
    assert found == pytest.approx(theirs.loglikelihood_rolling(requests), abs=3e-4)  # of up to 225 tokens each


def test_answers_are_those_of_the_harness(base, theirs):
    contexts = ["2 + 2 =", "Hi", LONG, "<|im_start|>user\nHi"]
    whole = generated(ours(base, BASE), contexts, max_gen_toks=20)
    stop = whole[0][3:5]  # so that something is cut
    for options in ({"max_gen_toks": 20}, {"max_gen_toks": 20, "until": [stop, "<|im_end|>"]}):
        found = generated(ours(base, BASE), contexts, **options)
        assert found == [generated(theirs, [context], **options)[0] for context in contexts]
    assert found[0] == whole[0][: whole[0].index(stop)]


def test_a_first_token_is_added_where_the_text_has_none(base, theirs, monkeypatch):
    """As Llama's tokenizers do, whose chat templates write it themselves."""
    plain = ours(base, BASE).loglikelihood(ask("loglikelihood", PAIRS[:1]))
    tokenizer = byte_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.bos_token_id)]
    )
    model = ours(dataclasses.replace(base, tokenizer=tokenizer), BASE)
    assert model.prefix_token_id == theirs.prefix_token_id == tokenizer.bos_token_id
    assert model.tok_encode("a") == [tokenizer.bos_token_id, 97]
    assert model.tok_encode("<|im_start|>a") == [tokenizer.bos_token_id, 97]
    assert model.tok_encode("a", add_special_tokens=False) == [97]
    monkeypatch.setattr(theirs, "tokenizer", tokenizer)
    requests = ask("loglikelihood", PAIRS)
    found = model.loglikelihood(requests)
    agree(found, theirs.loglikelihood(requests))
    assert abs(found[0][0] - plain[0][0]) > 1e-2
    rolling = ask("loglikelihood_rolling", [("Hi",), (LONG,)])
    assert model.loglikelihood_rolling(rolling) == pytest.approx(theirs.loglikelihood_rolling(rolling), abs=3e-4)


def test_likelihoods_of_the_path(loaded):
    options = [" 4", " 7"]
    requests = ask("loglikelihood", [("2 + 2 =", option) for option in options])
    found, reseeded = (ours(loaded, PATH, draws=4, batch_size=2, seed=seed).loglikelihood(requests) for seed in (0, 1))
    prompts, answers = [list(b"2 + 2 =")] * 2, [list(option.encode()) for option in options]
    numbers = [noise_number(prompts[0])] * 2  # the options of a question are compared under the same noise
    wanted = score(loaded, prompts, answers, settings=PATH, draws=4, numbers=numbers)
    agree(found, [(one.total, False) for one in wanted])
    assert abs(found[0][0] - reseeded[0][0]) > 1e-3


def test_nothing_depends_on_batches_or_on_other_requests(loaded):
    pairs, texts = (
        ask("loglikelihood", [*PAIRS[:2], ("Hi", "!"), ("Hi", "?")]),
        ask("loglikelihood_rolling", [("Hi",), ("Bye.",)]),
    )
    wide, narrow = (ours(loaded, PATH, draws=4, batch_size=size) for size in (3, 2))  # of which the last is not full
    found = wide.loglikelihood(pairs)
    agree(narrow.loglikelihood(pairs[::-1]), found[::-1])
    agree(narrow.loglikelihood(pairs[1:2]), found[1:2])
    assert narrow.loglikelihood_rolling(texts) == pytest.approx(wide.loglikelihood_rolling(texts), abs=1e-4)
    drawing = {"max_gen_toks": 6, "temperature": 1.0, "do_sample": True}
    contexts = ["2 + 2 =", "Hi", "Hi", "Bye."]
    answers = generated(wide, contexts, **drawing)
    assert answers[1] != answers[2]  # a repeated request is another draw
    assert generated(narrow, contexts, **drawing) == answers
    assert generated(narrow, contexts[3:], **drawing) == answers[3:]


def test_few_programs(loaded):
    model = ours(loaded, PATH, draws=4, batch_size=2)
    model.loglikelihood(ask("loglikelihood", [("abc", " d")]))
    with test_util.count_jit_and_pmap_lowerings() as count:
        model.loglikelihood(ask("loglikelihood", [("abc" * n, " d" * (1 + n % 4)) for n in range(1, 9)]))
    assert count() == 0


def test_a_chat_template_writes_its_own_tokens(base):
    model = ours(base, BASE)
    history = [{"role": "user", "content": "Hi"}]
    assert model.apply_chat_template(history) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    begun = [*history, {"role": "assistant", "content": "The answer"}]
    assert model.apply_chat_template(begun, add_generation_prompt=False).endswith("assistant\nThe answer")
    strict = byte_tokenizer()
    strict.chat_template = (
        "{%- if messages[0].role == 'system' -%}{{ raise_exception('no system') }}{%- endif -%}" + CHATML
    )
    strict = ours(dataclasses.replace(base, tokenizer=strict), BASE)
    assert strict.apply_chat_template([{"role": "system", "content": "Be kind."}, *history]).startswith(
        "<|im_start|>user"
    )
    strict.tokenizer.chat_template = "{{ raise_exception('no') }}"
    with pytest.raises(InputError, match="the chat template refuses a prompt of the task: no"):
        strict.apply_chat_template(history)


def test_what_a_task_asks_of_answers():
    options = HarnessOptions(DecodeConfig(budget=3, temperature=0.7, top_k=5), BASE)
    settings, until = parse_generation({"until": ["\n", ""], "do_sample": False, "temperature": 0.0}, options)
    assert until == ("\n",)
    assert settings == DecodeConfig(budget=3, max_new_tokens=256)
    drawn, _ = parse_generation(
        {"until": "\n", "do_sample": True, "temperature": 0.5, "top_p": 0.9, "max_gen_toks": 7}, options
    )
    assert drawn == DecodeConfig(budget=3, temperature=0.5, top_p=0.9, max_new_tokens=7)
    assert parse_generation({"max_gen_toks": 7}, dataclasses.replace(options, max_new_tokens=5))[0].max_new_tokens == 5
    with pytest.raises(InputError, match="the task's generation option num_beams is not known here"):
        parse_generation({"num_beams": 4}, options)


def test_an_answer_is_cut_at_the_first_text():
    assert cut_text("one, two. three", ["three", ",", "."]) == "one"
    assert cut_text("one", ["two"]) == "one"


def says(base, token, first, **changes):
    """A model that says `token` where it would have said the character `first`."""
    llm = base.model.llm
    loud = dataclasses.replace(llm, embed=llm.embed.at[token].set(1.5 * llm.embed[ord(first)]))
    return ours(dataclasses.replace(base, model=dataclasses.replace(base.model, llm=loud), **changes), BASE)


def test_special_tokens_end_answers(base):
    """Which no answer contains as text; here the model says the one that the task names at once."""
    [text] = generated(ours(base, BASE), ["Hi"], max_gen_toks=20)
    model = says(base, base.tokenizer.bos_token_id, text[0])
    assert generated(model, ["Hi"], max_gen_toks=20) != [""]
    assert generated(model, ["Hi"], max_gen_toks=20, until=["\n<|im_start|>"]) != [""]  # only cuts
    assert generated(model, ["Hi"], max_gen_toks=20, until=["<|im_start|>"]) == [""]


def test_what_stands_before_a_stop_in_its_token_stays(base):
    [text] = generated(ours(base, BASE), ["Hi"], max_gen_toks=20)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["yes!"])
    model = says(base, tokenizer.convert_tokens_to_ids("yes!"), text[0], tokenizer=tokenizer)
    assert generated(model, ["Hi"], max_gen_toks=20, until=["!"]) == ["yes"]


def test_bad_input(base):
    with pytest.raises(InputError, match="the model folder has no tokenizer"):
        ours(dataclasses.replace(base, tokenizer=None), BASE)
    with pytest.raises(InputError, match="96 new tokens leave no room for a prompt in the 96 positions"):
        generated(ours(base, BASE), ["Hi"], max_gen_toks=POSITIONS)
    with pytest.raises(InputError, match="a continuation of 225 tokens exceeds the 96 positions"):
        ours(base, BASE).loglikelihood(ask("loglikelihood", [("Hi", LONG)]))
    nameless = byte_tokenizer()
    nameless.eos_token = None
    with pytest.raises(InputError, match="the tokenizer has no eos_token"):
        ours(dataclasses.replace(base, tokenizer=nameless), BASE)
