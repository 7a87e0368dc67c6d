"""Token search on tasks, and options chosen on held-out problems, with a tiny model."""

import dataclasses
import json

import pytest

from l2d_jax import evaluate, sweep
from l2d_jax.decoding.requests import Prompt
from l2d_jax.decoding.search.beam_search import search
from l2d_jax.decoding.search.beams import SearchConfig, extend
from l2d_jax.decoding.stop_strings import to_text
from l2d_jax.errors import InputError
from l2d_jax.evaluation import tuning
from l2d_jax.evaluation.sandbox.submission import Verdict
from l2d_jax.loading import load
from l2d_jax.programs import evaluate as program
from tests.support.programs import call, write_base, write_model, write_tasks

BEAMS = ["--beams", 3, "--candidates", 2]
TUNED = {"length_power": 1.0, "repetition_penalty": 0.0, "final_temperature": 0.0}  # the defaults, to which ties go


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_base(tmp_path_factory.mktemp("base") / "base")


@pytest.fixture(scope="module")
def model(tmp_path_factory, base, mesh):
    return write_model(tmp_path_factory.mktemp("model") / "model", base, mesh, classes=4)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_tasks(tmp_path_factory.mktemp("data") / "data")


@pytest.fixture(scope="module")
def run(model, data):
    def run(out, *arguments, task="gsm8k", main=evaluate.main):
        common = ["--tasks", task, "--data_dir", data, "--out", out, "--shots", 1, "--max_new_tokens", 10]
        return call(main, "--model", model, "--dtype", "float32", *common, *arguments)

    return run


@pytest.fixture
def planned(run, tmp_path, monkeypatch):
    """The folder and the records of an evaluation, which stops before weights are read; or the line of its error."""

    def stop(*_, **__):
        raise InputError("stopped")

    monkeypatch.setattr(program, "load", stop)

    def planned(*arguments, task="gsm8k"):
        outcome = run(tmp_path / "out", *arguments, task=task)
        if outcome.error != "stopped":
            return outcome.error
        folders = sorted((tmp_path / "out" / task).iterdir())
        return {folder.name: json.loads((folder / "results.json").read_text())["run"] for folder in folders}

    return planned


def lines(folder):
    """The sample lines without passes, which depend on the order of evaluations, and so on the number of rows."""
    found = {line["id"]: line for line in map(json.loads, (folder / "samples.jsonl").read_text().splitlines())}
    for line in found.values():
        for sample in line["samples"]:
            assert sample.pop("passes") >= sample["tokens"]
    return found


def test_the_folder_and_the_record_say_how_it_searches(planned):
    found = planned(*BEAMS, "--length_power", 0.5, "--total_budget", 9, 24, "--repetition_penalty", 0)
    assert found.keys() == {f"midpoint-{n}-beams_3-candidates_2-length_power_0.5" for n in (3, 7)}
    for name, about in found.items():
        assert about["decode"]["budget"] == int(name.split("-")[1])  # of each beam
        config = SearchConfig(beams=3, candidates=2, length_power=0.5, temperature=1.0, max_new_tokens=10)
        assert about["search"] == dataclasses.asdict(config)


def test_without_a_search_nothing_new_is_recorded(planned):
    [about] = planned("--budget", 3).values()
    assert about.keys().isdisjoint({"search", "tune"})


def test_what_is_tuned_is_in_the_name_and_the_record(planned):
    words = ["--label", "category", "--budget", 3, "--tune", "guidance", "search", "--tune_problems", 4]
    [(name, about)] = planned(*BEAMS, *words).items()
    assert name == "midpoint-3-label_category-tuned-beams_3-candidates_2-tuned"
    tune = about["tune"]
    assert (tune["split"], tune["problems"]) == ("train", 4)
    assert tune["grid"].keys() == {"guidance", *TUNED}
    assert min(tune["grid"]["guidance"]) == 0.5
    assert max(tune["grid"]["guidance"]) == 3.0
    for name, values in tune["grid"].items():
        assert values[0] == {"guidance": 1.0, **TUNED}[name]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--candidates", 2], "--candidates is an option of token search: give --beams too"),
        (["--final_temperature", 1], "--final_temperature is an option of token search: give --beams too"),
        (["--total_budget", 60], "--total_budget is an option of token search: give --beams too"),
        ([*BEAMS, "--choices", "likelihood"], "--choices likelihood generates no answer, so --beams changes nothing"),
        ([*BEAMS, "--budget", 3, "--total_budget", 9], "--budget is per beam, --total_budget is for all beams"),
        ([*BEAMS, "--total_budget", 2], "a total of 2 evaluations per token is less than one for each of 3 beams"),
        (
            [*BEAMS, "--total_budget", 9, "--config.decode.budget=3"],
            "--total_budget and --config.decode.budget are both given",
        ),
        ([*BEAMS, "--batch_size", 2], "--batch_size 2 does not hold the 3 beams of a search: use 3 or more"),
        ([*BEAMS, "--config.decode.top_k=3"], "set top_k to 0 and top_p to 1, got 3 and 1.0"),
        (["--beams", 3, "--candidates", 1], "one candidate a step never makes 3 beams"),
        (["--beams", 3, "--candidates", 1000], "search.candidates 1000 exceed the 320 tokens"),
        (["--beams", 300, "--batch_size", 1000000, "--max_new_tokens", 900], "lower --batch_size, --beams"),
        ([*BEAMS, "--budget", 1, "--temperature", 0, "--samples", 2], "2 samples of a problem of gsm8k are the same"),
        (["--tune", "search"], "--tune search needs a search: give --beams too"),
        (["--tune", "guidance"], "--tune guidance needs a class: give --label too"),
        (["--tune_problems", 3], "--tune_problems is the number of problems for --tune"),
        ([*BEAMS, "--tune", "search", "--length_power", 1], "--tune search chooses --length_power"),
        (["--label", 1, "--tune", "guidance", "--guidance", 2], "--tune guidance chooses the guidance"),
        (["--label", 1, "--tune", "guidance", "--split", "train"], "gsm8k has no held-out part for --tune"),
        (["--tune", "everything"], "invalid choice: 'everything'"),
    ],
)
def test_what_cannot_be_done_is_refused(planned, arguments, message):
    found = planned(*arguments)
    assert isinstance(found, str), found
    assert message in found


def test_a_held_out_part_has_every_category_and_no_example(planned):
    words = ["--label", "category", "--tune", "guidance", "--budget", 3]
    [about] = planned(*words, task="mmlu").values()
    assert (about["tune"]["split"], about["tune"]["problems"]) == ("dev", 4)  # of six, two are examples
    assert "mmlu has no held-out part for --tune" in planned(*words, "--shots", 5, task="mmlu")


def test_a_sweep_chooses_nothing(run, tmp_path):
    assert "--tune" in run(tmp_path, "--tune", "guidance", "--label", 1, main=sweep.main).error


@pytest.mark.slow
def test_a_task_is_searched(run, model, tmp_path):
    """Each answer is that of a search for its problem alone; a part of the results goes on."""
    outcome = run(tmp_path, *BEAMS, "--budget", 3, "--batch_size", 7, "--final_temperature", 0.5)
    assert outcome.status == 0, outcome.err
    assert "gsm8k midpoint 3, 3 beams: strict" in outcome.out
    folder = tmp_path / "gsm8k/midpoint-3-beams_3-candidates_2-final_temperature_0.5"
    found, ready = lines(folder), load(model, dtype="float32")
    assert len(found) == 8
    config = SearchConfig(beams=3, candidates=2, final_temperature=0.5, max_new_tokens=10)
    settings = dataclasses.replace(ready.defaults, budget=3)
    for number in range(8):
        line = found[f"gsm8k/test/{number}"]
        ids = ready.tokenizer(line["prompt"], add_special_tokens=False)["input_ids"]
        result = search(ready, Prompt(number, ids), settings=settings, config=config)
        [sample] = line["samples"]
        assert sample["text"] == to_text(result.answer, ready.tokenizer)
        assert (sample["tokens"], sample["evaluations"]) == (result.tokens, result.evaluations)
    figures = json.loads((folder / "results.json").read_text())
    assert figures["evaluations per token"] > 2 * 3  # of all beams
    assert figures["passes per token"] > figures["evaluations per token"] / 3

    file = folder / "samples.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    again = run(tmp_path, *BEAMS, "--budget", 3, "--batch_size", 16, "--final_temperature", 0.5)
    assert again.status == 0, again.err
    assert lines(folder) == found


@pytest.mark.slow
def test_programs_are_searched(run, tmp_path, monkeypatch):
    """Each sample is a search; a batch of four sequences holds one of them, with three beams."""
    programs = []

    def judge(submissions):
        programs.extend(submissions)
        return [Verdict(passed=False, reason="not run") for _ in submissions]

    monkeypatch.setattr(program, "choose_run", lambda tasks, is_allowed: judge)
    words = ["--budget", 1, "--limit", 1, "--samples", 6, "--allow_code_execution", "--batch_size", 4]
    outcome = run(tmp_path, *BEAMS, *words, task="mbpp")
    assert outcome.status == 0, outcome.err
    [line] = lines(tmp_path / "mbpp/midpoint-1-beams_3-candidates_2").values()
    assert len(line["samples"]) == 6
    assert 1 < len({sample["text"] for sample in line["samples"]}) <= len(programs)


@pytest.mark.slow
def test_options_are_chosen_once(run, tmp_path, monkeypatch):
    words = [*BEAMS, "--label", "category", "--budget", 3, "--tune", "guidance", "search", "--tune_problems", 2]
    words += ["--limit", 2]
    tried, real = [], tuning._strict

    def strict(texts, problems, grade):
        """A score that the second strength and the fourth scoring reach first."""
        tried.append(len(problems))
        real(texts, problems, grade)
        return float(len(tried) >= 2 and len(tried) != 7 and len(tried) != 8 and len(tried) != 9)

    monkeypatch.setattr(tuning, "_strict", strict)
    before = extend._cache_size()
    outcome = run(tmp_path, *words)
    assert outcome.status == 0, outcome.err
    assert extend._cache_size() - before <= 2  # of two lengths of prompts
    assert "gsm8k: guidance 0.5, length_power 1, repetition_penalty 1, final_temperature 0 for math: " in outcome.out
    assert "strict 1.000, with the defaults 0.000, on 2 problems of train" in outcome.out
    assert len(tried) == 6 + 6 * 3
    folder = tmp_path / "gsm8k/midpoint-3-label_category-tuned-beams_3-candidates_2-tuned"
    figures = json.loads((folder / "results.json").read_text())
    chosen = figures["tuning"]["chosen"]
    assert chosen == {"math": {**TUNED, "guidance": 0.5, "repetition_penalty": 1.0}}
    assert len(figures["tuning"]["runs"]) == len(tried)
    found = lines(folder)

    fixed = [*BEAMS, "--label", "category", "--budget", 3, "--limit", 2, "--guidance", 0.5, "--repetition_penalty", 1]
    assert run(tmp_path, *fixed, "--name", "fixed").status == 0
    assert lines(tmp_path / "gsm8k/fixed") == found

    monkeypatch.setattr(tuning, "_strict", None)  # the choice is kept
    file = folder / "samples.jsonl"
    file.write_text(file.read_text().splitlines(keepends=True)[0])
    again = run(tmp_path, *words)
    assert again.status == 0, again.err
    assert lines(folder) == found
    assert json.loads((folder / "results.json").read_text())["tuning"]["chosen"] == chosen
    (folder / "results.json").write_text(json.dumps({"run": figures["run"], "tuning": {"chosen": 3}}))
    assert "tuning of" in run(tmp_path, *words).error


@pytest.mark.slow
def test_ties_go_to_the_defaults(run, tmp_path):
    """No answer of a random model is right."""
    assert run(tmp_path, *BEAMS, "--budget", 1, "--tune", "search", "--tune_problems", 1, "--limit", 1).status == 0
    figures = json.loads((tmp_path / "gsm8k/midpoint-1-beams_3-candidates_2-tuned/results.json").read_text())
    assert figures["tuning"]["chosen"] == {"math": TUNED}
