import io

import pytest

from l2d_jax import generate, train
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data import tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.decoding.refinement.solver import AMPLE
from l2d_jax.errors import InputError
from l2d_jax.loading import load
from l2d_jax.weights import base_model
from tests.support.programs import call, options, remove_template, remove_tokenizer, write_base, write_model


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A plain Hugging Face folder."""
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, base):
    """Of a run on that folder."""
    workdir = tmp_path_factory.mktemp("workdir")
    arguments = options(model__name=base, train__steps=1, validation__budgets=(1,), decode__max_new_tokens=9)
    assert call(train.main, *arguments, "--workdir", workdir).status == 0
    return workdir


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base, mesh):
    """A model folder with a path that says something else than its base."""
    return write_model(tmp_path_factory.mktemp("model") / "model", base, mesh)


def answer_of(outcome):
    assert (outcome.status, outcome.err) == (0, "")
    return outcome.out.removesuffix("\n")


PROMPT = ["--prompt", "2 + 2?", "--max_new_tokens", 10]
OFF = ["--parallel", "off"]  # one program; other tests compare the orders


@pytest.mark.slow
def test_a_prompt_is_answered(folder):
    text = answer_of(call(generate.main, "--model", folder, *PROMPT, "--budget", 3))
    ready = load(folder)
    settings = DecodeConfig(budget=3, max_new_tokens=10)
    prompt = tokenizer.prompt_ids([{"role": "user", "content": "2 + 2?"}], ready.tokenizer)
    [ids] = ready.generate([prompt], settings=settings)
    assert text == ready.tokenizer.decode(ids, skip_special_tokens=True)
    assert text


@pytest.mark.slow
def test_an_adaptive_solver_takes_what_it_needs(folder):
    text = answer_of(call(generate.main, "--model", folder, *PROMPT, "--solver", "fehlberg2"))
    settings = DecodeConfig(solver="fehlberg2", budget=AMPLE, max_new_tokens=10)
    messages = [{"role": "user", "content": "2 + 2?"}]
    assert text == "".join(load(folder).stream(messages, settings=settings))
    coarse = answer_of(call(generate.main, "--model", folder, *PROMPT, "--solver", "fehlberg2", "--tolerance", 10.0))
    few = answer_of(call(generate.main, "--model", folder, *PROMPT, "--solver", "fehlberg2", "--budget", 4))
    assert len({text, coarse, few}) > 1


@pytest.mark.slow
def test_a_budget_of_one_is_the_base(folder, base):
    one = answer_of(call(generate.main, "--model", folder, *PROMPT, "--budget", 1))
    assert one == answer_of(call(generate.main, "--model", base, *PROMPT))
    assert one != answer_of(call(generate.main, "--model", folder, *PROMPT, "--budget", 3))


def test_an_end_near_zero_is_the_base(folder):
    """At a t near 0 the path corrects nothing yet."""
    words = ["--model", folder, *PROMPT, "--budget"]
    plain = answer_of(call(generate.main, *words, 1))
    refined = [*words, 3, *OFF]
    assert answer_of(call(generate.main, *refined, "--end", 1e-6)) == plain
    assert answer_of(call(generate.main, *refined, "--end", 1)) == answer_of(call(generate.main, *refined)) != plain


def test_seed_and_temperature(folder):
    arguments = ["--model", folder, *PROMPT, "--budget", 3, *OFF, "--temperature", 1.0, "--seed"]
    one, again, other = (answer_of(call(generate.main, *arguments, seed)) for seed in (0, 0, 1))
    assert one == again
    assert one != other


@pytest.mark.slow
def test_every_kind_of_folder_opens(workdir, folder, base):
    """A workdir, its export, a model folder, a plain folder."""
    trained, exported, imported, plain = (load(f, dtype="float32") for f in (workdir, workdir / "export", folder, base))
    assert trained.defaults.max_new_tokens == 9  # as its config says
    assert trained.defaults.budget == 3
    assert exported.defaults.budget == imported.defaults.budget == 15
    assert plain.model.path is None
    assert plain.defaults.budget == 1
    settings = trained.defaults
    prompts = [[5, 6, 7]]
    answers = [model.generate(prompts, settings=settings) for model in (trained, exported)]
    assert answers[0] == answers[1]
    assert {ready.stop_ids for ready in (trained, exported, imported, plain)} == {(258,)}
    for ready in (trained, exported, imported, plain):
        assert ready.model.llm.embed.dtype == "float32"
    assert load(base).model.llm.embed.dtype == "bfloat16"
    assert load(workdir).model.llm.embed.dtype == "float32"  # as it was trained


@pytest.mark.slow
def test_a_workdir_answers(workdir):
    assert len(answer_of(call(generate.main, "--workdir", workdir, "--prompt", "2 + 2?")).encode()) <= 9 * 3


@pytest.mark.slow
def test_a_chat_remembers(folder, monkeypatch):
    """Two questions, then the end of input: the second answer has seen the first question and its answer."""
    seen = []
    stream = LoadedModel.stream

    def listening(ready, messages, **arguments):
        seen.append([dict(message) for message in messages])
        return stream(ready, messages, **arguments)

    monkeypatch.setattr(LoadedModel, "stream", listening)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hi\n 2 + 2? \n"))
    outcome = call(generate.main, "--model", folder, "--budget", 3, "--max_new_tokens", 4)
    assert (outcome.status, outcome.err) == (0, "")
    assert outcome.out.startswith("budget 3, midpoint; an empty line ends the chat\n> ")
    assert [[message["role"] for message in messages] for messages in seen] == [
        ["user"],
        ["user", "assistant", "user"],
    ]
    assert [message["content"] for message in seen[1]][::2] == ["Hi", "2 + 2?"]
    assert seen[1][1]["content"] in outcome.out


def test_an_empty_line_ends_a_chat(folder, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("\nunread\n"))
    outcome = call(generate.main, "--model", folder)
    assert outcome.status == 0
    assert outcome.out.count("> ") == 1


@pytest.mark.parametrize(
    ("which", "arguments", "message"),
    [
        ("base", ["--budget", 15], "a budget of 15 needs a diffusion path, and this model has none: use a budget of 1"),
        ("folder", ["--budget", 4], "a budget of 4 evaluations is unreachable for midpoint"),
        ("folder", ["--budget", 0], "must be in [1, 10000], got 0"),
        ("folder", ["--solver", "rk5"], "invalid choice: 'rk5'"),
        ("folder", ["--temperature", -1], "must be in [0, 1000], got -1.0"),
        ("folder", ["--max_new_tokens", 0], "must be in [1, 10000000], got 0"),
        ("folder", ["--prompt", "a" * 1000, "--max_new_tokens", 100], "new ones exceed the 1024 positions"),
        ("folder", ["--max_new_tokens", 1020], "new ones exceed the 1024 positions of the model"),
        ("folder", ["--bugdet", 3], "unrecognized arguments"),
        ("folder", ["--top_p", 2], "must be in [1e-06, 1], got 2.0"),
        ("folder", ["--stop", ""], "the stop string '' cannot occur"),
        ("folder", ["--label", 0], "class label 0 is unknown to this path: it knows none"),
        ("folder", ["--guidance", 2], "guidance 2.0 is the strength of a class"),
        ("folder", ["--budget", 1, "--gate", 1], "gate changes nothing at a budget of 1"),
        ("folder", ["--budget", 1, "--end", 0.5], "end changes nothing at a budget of 1"),
        ("folder", ["--solver", "bosh3", "--end", 0.999], "is later than 1 - 1/sigma"),
        ("folder", ["--budget", 1, 3, "--tolerance", 0.1], "tolerance is for adaptive solvers"),
        ("base", ["--solver", "euler"], "solver is an option of a diffusion path, and this model has none"),
        ("none", [], "neither a folder, nor a .gguf file, nor a hub id"),
    ],
)
def test_bad_requests_are_one_line_before_anything_is_loaded(request, monkeypatch, which, arguments, message):
    model = "./no/such/folder" if which == "none" else request.getfixturevalue(which)
    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    assert message in call(generate.main, "--model", model, "--prompt", "Hi", *arguments).error


@pytest.mark.parametrize(
    ("spoil", "message"), [(remove_tokenizer, "has no tokenizer"), (remove_template, "has no chat template")]
)
def test_text_needs_a_tokenizer_and_its_template(tmp_path, monkeypatch, spoil, message):
    base = write_base(tmp_path / "base")
    spoil(base)
    monkeypatch.setattr(base_model.BaseFiles, "load", None)
    assert message in call(generate.main, "--model", base, "--prompt", "Hi").error


@pytest.mark.slow
def test_folders_that_are_no_models(tmp_path, workdir):
    assert "is no workdir of training" in call(generate.main, "--workdir", tmp_path, "--prompt", "Hi").error
    assert "not allowed with" in call(generate.main, "--workdir", workdir, "--model", workdir).error
    assert "one of the arguments --workdir --model is required" in call(generate.main).error
    (tmp_path / "checkpoints").mkdir()
    assert "config.json" in call(generate.main, "--workdir", tmp_path, "--prompt", "Hi").error
    (tmp_path / "config.json").write_text((workdir / "config.json").read_text())
    assert "holds no good checkpoint" in call(generate.main, "--workdir", tmp_path, "--prompt", "Hi").error


def test_an_export_of_random_weights_says_what_to_do(tmp_path):
    (tmp_path / "path.json").write_text('{"base": "random", "path": {}}')
    with pytest.raises(InputError, match="which only a workdir can make again"):
        load(tmp_path)
    (tmp_path / "path.json").write_text('{"path": {}}')
    with pytest.raises(InputError, match=r"path.json must name the base that the path was trained on, got None"):
        load(tmp_path)
