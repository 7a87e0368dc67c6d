"""The evaluation of a tiny model on rows of the data sets' form: files, going on, and independence of the batches."""

import dataclasses
import json
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax import evaluate, loading, sweep
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.decoding import batching
from l2d_jax.decoding.refinement.solver import AMPLE
from l2d_jax.errors import InputError
from l2d_jax.evaluation import runner
from l2d_jax.evaluation.sandbox import grade
from l2d_jax.evaluation.tasks.problem import Prompts
from l2d_jax.evaluation.tasks.task import answer_part
from l2d_jax.loading import load
from l2d_jax.programs import evaluate as program
from l2d_jax.training import manifest
from l2d_jax.training.checkpoint import Checkpoints
from l2d_jax.weights import model_folder
from tests.support.programs import TINY, call, config, open_base, remove_template, write_base, write_model, write_tasks

REMEDY = "check the weights, or use float32"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def model(tmp_path_factory, base, mesh):
    return write_model(tmp_path_factory.mktemp("model") / "model", base, mesh)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def run(model, data):
    def run(out, *arguments, tasks="gsm8k"):
        common = ["--tasks", tasks, "--data_dir", data, "--out", out, "--shots", 1]
        common += ["--max_new_tokens", 12] if tasks != "mmlu" else []  # whose letters are ranked
        return call(evaluate.main, "--model", model, "--dtype", "float32", *common, *arguments)

    return run


def lines(folder):
    return {line["id"]: line for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines())}


@pytest.fixture
def recorded(model, data, tmp_path, monkeypatch):
    """What results.json records of an evaluation's settings, which it does before weights are read."""

    def stop(*_, **__):
        raise InputError("stopped")

    monkeypatch.setattr(program, "load", stop)

    def recorded(*arguments, task="gsm8k"):
        common = ["--model", model, "--out", tmp_path / "out", "--tasks", task, "--data_dir", data, "--name", "x"]
        outcome = call(evaluate.main, *common, *([] if task == "word_problems" else ["--shots", 1]), *arguments)
        if outcome.error != "stopped":
            return outcome.error
        return json.loads((tmp_path / f"out/{task}/x/results.json").read_text())["run"]["decode"] | {"out": outcome.out}

    return recorded


@pytest.mark.slow
def test_what_a_command_asks_for_wins_over_the_tasks_sampling(recorded):
    asked = {"velocity": "expectation", "velocity_temperature": 1.0, "temperature": 0.5, "max_new_tokens": 9}
    words = [f"--config.decode.{name}={value}" for name, value in asked.items()]
    found = recorded(*words, task="word_problems")
    assert asked.items() <= found.items()
    assert "; max_new_tokens 9, not 128; temperature 0.5, not 0.0; velocity_temperature 1.0, not 0.0" in found["out"]


def test_a_task_samples_as_it_does_where_nothing_is_asked(recorded):
    found = recorded()
    assert (found["temperature"], found["max_new_tokens"], found["budget"]) == (1.0, 256, 15)
    assert found["out"] == "gsm8k: 8 problems, 0 dropped for their length\n"


def test_a_model_that_thinks_at_length_is_sampled_and_judged_by_what_follows(recorded, tmp_path):
    found = recorded("--prompts", "reasoning", "--shots", 0, "--max_new_tokens", 99)
    assert (found["temperature"], found["top_p"], found["max_new_tokens"]) == (0.6, 0.95, 99)
    asking = json.loads((tmp_path / "out/gsm8k/x/results.json").read_text())["run"]["asking"]
    assert (asking["prompts"], asking["tagged"], asking["samples"]) == ("reasoning", True, 1)


def test_an_adaptive_solver_has_an_ample_budget_unless_one_is_named(recorded):
    assert recorded("--solver", "fehlberg2")["budget"] == AMPLE


@pytest.mark.parametrize("word", ["--budget", "--config.decode.budget"])
def test_a_named_budget_is_an_adaptive_solvers_most(recorded, word):
    assert recorded("--config.decode.solver=fehlberg2", word, 15)["budget"] == 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.decode.velocity=expectation"], "'expectation' is the arg max where"),
        (["--config.decode.anneal=True"], "it is 0 already"),
        (["--guidance", 2.0], "guidance 2.0 is the strength of a class"),
        (["--budget", 1, "--solver", "euler"], "solver changes nothing at a budget of 1"),
        (["--tolerance", 0.01], "tolerance is for adaptive solvers"),
        (["--budget", 1, "--temperature", 0, "--samples", 2], "2 samples of a problem of gsm8k are the same at temp"),
    ],
)
def test_what_cannot_be_done_as_it_is_asked_is_refused(recorded, arguments, message):
    assert message in recorded(*arguments)


def test_an_earlier_end_is_recorded(recorded):
    assert recorded("--config.decode.end=0.984375", "--solver", "rk4", "--budget", 17)["end"] == 0.984375
    assert "end changes nothing at a budget of 1" in recorded("--budget", 1, "--config.decode.end=0.5")


def test_results_of_versions_without_an_end_go_on(recorded):
    names = vars(DecodeConfig()).keys() - {"parallel", "end"} | {"out"}
    assert recorded().keys() == recorded("--config.decode.end=1").keys() == names


def test_ranked_options_have_no_sampling(recorded):
    words = ["--choices", "likelihood", "--temperature", 0.5]
    assert "temperature is for generated answers" in recorded(*words, task="mmlu")


@pytest.mark.parametrize(("task", "choices", "broken"), [("gsm8k", "generate", 7), ("mmlu", "likelihood", 5)])
def test_broken_answers_are_never_recorded(data, tmp_path, monkeypatch, task, choices, broken):
    """One problem's logits are not numbers: the others are kept, and each run says and does the same."""
    folder = write_base(tmp_path / "base", tie_word_embeddings=False)

    def load(*arguments, **options):  # files with such a weight are refused before
        loaded = loading.load(*arguments, **options)
        llm = loaded.model.llm
        llm = dataclasses.replace(llm, embed=llm.embed.at[ord(str(broken))].set(np.nan))
        return dataclasses.replace(loaded, model=dataclasses.replace(loaded.model, llm=llm))

    monkeypatch.setattr(program, "load", load)
    words = ["--tasks", task, "--data_dir", data, "--out", tmp_path / "out", "--shots", 0, "--choices", choices]
    words += ["--max_new_tokens", 1] if choices == "generate" else []
    for _ in range(2):
        outcome = call(evaluate.main, "--model", folder, "--dtype", "float32", *words, "--name", "x")
        assert outcome.error == f"logits of sequences [{broken}] were not numbers, which ended them there: {REMEDY}"
        found, count = lines(tmp_path / "out" / task / "x"), 8 if task == "gsm8k" else 6
        assert found.keys() == {f"{task}/test/{i}" for i in range(count) if i != broken}


@pytest.mark.slow
def test_an_evaluation_goes_on_where_it_stopped(run, tmp_path):
    outcome = run(tmp_path / "a", "--budget", 1, 3, "--batch_size", 4)
    assert outcome.status == 0, outcome.err
    assert "gsm8k: 8 problems, 0 dropped for their length" in outcome.out
    assert [line.split(":")[0] for line in outcome.out.splitlines()[1:]] == ["gsm8k midpoint 1", "gsm8k midpoint 3"]
    assert outcome.out.count("problems; 8 answered in ") == outcome.out.count(" tokens/s\n") == 2
    plain, refined = (lines(tmp_path / "a/gsm8k" / name) for name in ("midpoint-1", "midpoint-3"))
    assert plain.keys() == refined.keys() == {f"gsm8k/test/{i}" for i in range(8)}
    assert any(plain[name]["samples"] != refined[name]["samples"] for name in plain)
    figures = json.loads((tmp_path / "a/gsm8k/midpoint-3/results.json").read_text())
    assert figures["problems"] == figures["speed"]["problems"] == 8
    assert figures["strict"]["accuracy"]["mean"] == np.mean([line["samples"][0]["strict"] for line in refined.values()])

    file = tmp_path / "a/gsm8k/midpoint-3/samples.jsonl"
    kept = file.read_text().splitlines(keepends=True)[:3]
    file.write_text("".join(kept) + '{"id"')
    again = run(tmp_path / "a", "--budget", 3, "--batch_size", 3)
    assert again.status == 0, again.err
    assert lines(file.parent) == refined
    assert json.loads((file.parent / "results.json").read_text())["speed"]["problems"] == 5


@pytest.mark.slow
def test_another_evaluation_is_refused_before_weights_are_read(run, tmp_path, monkeypatch):
    assert run(tmp_path, "--budget", 1).status == 0
    monkeypatch.setattr(program, "load", None)
    error = run(tmp_path, "--budget", 1, "--seed", 1).error
    assert "holds another evaluation (asking.seed was 0, is 1)" in error


@pytest.mark.slow
def test_results_whose_rounding_depends_on_the_batch_keep_to_one_size(run, tmp_path):
    """In float32 another size may go on, where memory was short."""
    for dtype in ("bfloat16", "float32"):
        out = tmp_path / dtype
        assert run(out, "--budget", 1, "--limit", 2, "--dtype", dtype, "--batch_size", 2).status == 0
        again = run(out, "--budget", 1, "--limit", 2, "--dtype", dtype, "--batch_size", 1)
        if dtype == "float32":
            assert again.status == 0, again.err
            assert json.loads((out / "gsm8k/midpoint-1/results.json").read_text())["speed"]["batch_size"] == 1
        else:
            assert "another evaluation (asking.batch_size was 2, is 1)" in again.error


@pytest.mark.slow
def test_a_checkpoint_that_is_saved_meanwhile_is_not_taken(base, data, tmp_path, mesh, monkeypatch):
    """What a training run does between the moment a step is chosen and the moment its weights are read."""
    settings = config(model__name=base, train__checkpoint_every=1)
    path = model_folder.new_path(settings.path, open_base(settings.model, mesh).llm, mesh, seed=0)
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text(json.dumps(settings.to_dict()))
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=3)
    checkpoints.save(3, {"path": path})
    assert checkpoints.latest() == 3
    verified = []

    def choose(found):
        step = loading.newest_step(found)
        checkpoints.save(4, {"path": path})
        assert checkpoints.latest() == 4
        verified.clear()
        monkeypatch.setattr(manifest, "verify", verified.append)
        return step

    monkeypatch.setattr(program, "newest_step", choose)
    words = ["--data_dir", data, "--max_new_tokens", 4, "--shots", 1, "--limit", 2, "--budget", 3, "--tasks", "gsm8k"]
    outcome = call(evaluate.main, "--workdir", tmp_path, *words)
    assert outcome.status == 0, outcome.err
    assert json.loads((tmp_path / "eval/gsm8k/midpoint-3/results.json").read_text())["run"]["step"] == 3
    assert verified == [], "the files of a checkpoint are read and hashed once"


@pytest.mark.slow
def test_answers_do_not_depend_on_batches(run, tmp_path):
    for size in (3, 8):
        assert run(tmp_path / str(size), "--budget", 3, "--batch_size", size).status == 0
    few, many = (lines(tmp_path / f"{size}/gsm8k/midpoint-3") for size in (3, 8))
    for line in (*few.values(), *many.values()):
        for sample in line["samples"]:
            assert sample.pop("passes") >= sample["tokens"]
    assert few == many


@pytest.mark.slow
def test_several_samples(run, tmp_path):
    outcome = run(tmp_path, "--budget", 3, "--samples", 5, "--limit", 2, "--temperature", 2.0)
    assert outcome.status == 0, outcome.err
    figures = json.loads((tmp_path / "gsm8k/midpoint-3/results.json").read_text())
    assert figures["strict"]["pass"].keys() == {"1", "5"}
    for line in lines(tmp_path / "gsm8k/midpoint-3").values():
        assert len({sample["text"] for sample in line["samples"]}) > 1


@pytest.mark.slow
def test_each_problem_has_its_category(base, mesh, data, tmp_path):
    model = write_model(tmp_path / "model", base, mesh, classes=4)
    words = ["--data_dir", data, "--out", tmp_path / "out", "--max_new_tokens", 6, "--shots", 1, "--budget", 3]
    words += ["--model", model, "--dtype", "float32", "--tasks", "gsm8k", "--limit", 3, "--guidance", 2.0]
    own, same, other = ("label_category-2", "label_0-2", "label_2-2")  # GSM8K is math, the first
    for label in ("category", 0, 2):
        assert call(evaluate.main, *words, "--label", label).status == 0
    found = {name: lines(tmp_path / f"out/gsm8k/midpoint-3-{name}") for name in (own, same, other)}
    assert found[own] == found[same] != found[other]
    assert "class label 4 is unknown to this path" in call(evaluate.main, *words, "--label", 4).error
    assert (
        'must be "category" or a class: the number must be of type int'
        in call(evaluate.main, *words, "--label", "maths").error
    )


@pytest.mark.slow
def test_the_likeliest_letter(run, model, tmp_path):
    outcome = run(tmp_path, "--budget", 1, "--choices", "likelihood", "--batch_size", 4, tasks="mmlu")
    assert outcome.status == 0, outcome.err
    assert "answered in" in outcome.out
    assert "tokens/s" not in outcome.out + outcome.err  # none is written
    ready = load(model, dtype="float32")
    found = lines(tmp_path / "mmlu/midpoint-1-likelihood")
    assert len(found) > 3
    for line in found.values():
        ids = jnp.asarray([ready.tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]])
        hidden, _ = ready.model.llm(ids, jnp.arange(ids.shape[1])[None])
        logits = np.asarray(ready.model.llm.logits(hidden[0, -1]))
        assert line["samples"][0]["text"] == max("ABCD", key=lambda letter: logits[ord(letter)])
    figures = json.loads((tmp_path / "mmlu/midpoint-1-likelihood/results.json").read_text())
    assert figures["strict"]["subjects"].keys() == {"signs", "sums"}
    reasons = "the paper has 13666, which is not compared: --shots 1, another tokenizer"
    assert figures["counts"] == {"problems": 6, "too long": 0, "paper": 13666, "comparison": reasons}


def test_the_command_line_knows_all_prompts():
    [action] = [action for action in evaluate.make_parser()._actions if action.dest == "prompts"]
    assert tuple(action.choices) == get_args(Prompts)


@pytest.mark.parametrize("prompt", ["", "<|assistant|><think>\n", "<think> so"])
def test_a_thought_that_the_prompt_opens_and_nothing_closes_is_no_answer(prompt):
    opened = runner.thought_opened(prompt)
    assert opened == ("<think>" if prompt.endswith("\n") else "")
    assert answer_part(f"{opened}#### 2") == ("" if opened else "#### 2")
    assert answer_part(f"{opened}hm</think>#### 2") == "#### 2"


@pytest.mark.slow
def test_a_base_model_is_evaluated_though_it_has_no_chat_template(data, tmp_path, monkeypatch):
    """It is asked with the release's template for base models, and stops before it asks the next question itself."""
    base, stops = write_base(tmp_path / "base"), []

    def complete(*arguments, **options):
        stops.append(options["stops"])
        return batching.complete(*arguments, **options)

    monkeypatch.setattr(runner, "complete", complete)
    remove_template(base)
    words = ["--model", base, "--dtype", "float32", "--tasks", "gsm8k", "--data_dir", data, "--out", tmp_path / "out"]
    words += ["--shots", 1, "--max_new_tokens", 12, "--limit", 2, "--budget", 1]
    assert "('base_llama' for a base model)" in call(evaluate.main, *words).error
    outcome = call(evaluate.main, *words, "--chat_template", "base_llama")
    assert outcome.status == 0, outcome.err
    assert stops == [["### Question ###"]]
    for line in lines(tmp_path / "out/gsm8k/euler-1").values():
        assert line["prompt"].startswith("### Question ###\n")
        assert line["prompt"].endswith("\n### Answer ###\n")
        assert line["prompt"].count("### Answer ###\n") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "shots", "folder"), [("paper", 1, "midpoint-1"), ("thoughts", 0, "midpoint-1-thoughts")]
)
def test_programs_are_run_in_isolation(run, tmp_path, prompts, shots, folder):
    words = ["--budget", 1, "--limit", 1, "--samples", 1, "--prompts", prompts, "--shots", shots]
    outcome = run(tmp_path, *words, "--allow_code_execution", tasks="mbpp")
    if grade.unavailable():
        assert outcome.error == grade.unavailable()
        return
    assert outcome.status == 0, outcome.err
    [line] = lines(tmp_path / "mbpp" / folder).values()
    assert ("Think step by step" in line["prompt"]) == (prompts == "thoughts")
    assert line["samples"][0]["strict"] == 0
    assert line["samples"][0]["reason"]


@pytest.mark.parametrize(
    ("arguments", "tasks", "message"),
    [
        ([], "gsm9k", "unknown task 'gsm9k': did you mean 'gsm8k'?"),
        ([], "gsm8k,mbpp", "mbpp runs programs that the model writes: allow it with --allow_code_execution"),
        (["--budget", 4], "gsm8k", "a budget of 4 evaluations is unreachable for midpoint"),
        (["--samples", 17], "gsm8k", "--batch_size 16 does not hold the 17 samples of a problem: use 17 or more"),
        (["--choices", "likelihood"], "gsm8k", "gsm8k/test/0 has no options to rank: use --choices generate"),
        (["--label", 1], "gsm8k", "class"),
        (["--max_new_tokens", 1000], "gsm8k", "exceed the 1024 positions of the model"),
        (["--config", TINY], "gsm8k", "and the config's model is another, random"),
        (["--split", "dev"], "gsm8k", "no split 'dev'"),
        (["--limit", 0], "gsm8k", "the number must be in [1, 1000000000], got 0"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, arguments, tasks, message):
    assert message in run(tmp_path / "a", *arguments, tasks=tasks).error
    assert not (tmp_path / "a").exists()


@pytest.mark.slow
def test_the_solvers_of_the_papers_ablations_reach_a_task(run, tmp_path):
    """Estimates that are sampled or expected, adaptive steps, the largest budget side by side, and an earlier end."""
    words = ["--limit", 2, "--temperature", 0, "--max_new_tokens", 3]
    sampled = "--config.decode.velocity_temperature=1"
    ways = {
        "euler-4": ["--solver", "euler", "--budget", 4],
        "euler-4-sampled": ["--solver", "euler", "--budget", 4, sampled],
        "euler-4-expected": ["--solver", "euler", "--budget", 4, sampled, "--config.decode.velocity=expectation"],
        "fehlberg2-512": ["--solver", "fehlberg2", "--tolerance", 0.1],
        "midpoint-127": ["--budget", 127, "--config.decode.parallel=on"],
        "rk4-5-end_0.984375": ["--solver", "rk4", "--budget", 5, "--config.decode.end=0.984375"],
    }
    taken = {}
    for name, options in ways.items():
        chosen = ["--name", name] if name.startswith("euler") else []
        outcome = run(tmp_path, *words, *options, *chosen)
        assert outcome.status == 0, outcome.err
        figures = json.loads((tmp_path / f"gsm8k/{name}/results.json").read_text())
        taken[name] = figures["evaluations per token"]
        assert figures["passes per token"] <= taken[name] + 2
    assert 2 < taken.pop("fehlberg2-512") < 512, "as many as the tolerance takes"
    assert taken == {name: int(name.split("-")[1]) for name in taken}
    decoded = {
        name: json.loads((tmp_path / f"gsm8k/{name}/results.json").read_text())["run"]["decode"] for name in ways
    }
    assert decoded["euler-4-expected"]["velocity"] == "expectation"
    assert decoded["euler-4-sampled"]["velocity_temperature"] == 1.0
    assert decoded["rk4-5-end_0.984375"]["end"] == 0.984375


@pytest.mark.slow
def test_a_sweep_draws_the_figures(model, data, tmp_path):
    words = ["--tasks", "gsm8k", "--data_dir", data, "--out", tmp_path, "--max_new_tokens", 4, "--shots", 1]
    words += ["--limit", 2, "--budget", 1, 3, "--ends", 0.5, 1]
    outcome = call(sweep.main, "--model", model, "--dtype", "float32", *words)
    assert outcome.status == 0, outcome.err
    folders = {file.parent.name for file in tmp_path.glob("gsm8k/*/results.json")}
    assert folders == {"midpoint-1", "midpoint-3", "midpoint-3-end_0.5"}
    inside = json.loads((tmp_path / "gsm8k/within.json").read_text())
    assert inside["t"] == [0.0, 1.0]  # midpoint's grid at a budget of 3
    assert len(inside["evaluations"]) == 2
    assert min(inside["evaluations"]) > 2
    for name in ("budgets", "ends", "within"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert "<svg" in (tmp_path / f"{name}.svg").read_text()
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "midpoint-3" in page


def test_a_sweep_needs_a_path(base, data, tmp_path):
    words = ["--tasks", "gsm8k", "--data_dir", data, "--out", tmp_path, "--shots", 1]
    assert "this model has none" in call(sweep.main, "--model", base, "--budget", 1, 3, *words).error


def test_results_need_a_place(model):
    assert "--model, or a hub id, needs --out DIR" in call(evaluate.main, "--model", model, "--tasks", "gsm8k").error
