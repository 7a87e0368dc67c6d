"""Suites: their tasks and means, the order of the work, the estimate, and how a suite goes on."""

import contextlib
import doctest
import json
import math
from argparse import Namespace

import pytest

from l2d_jax.config.choices import suite_tasks, task_names
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.data.tokenizer import byte_tokenizer
from l2d_jax.decoding.loaded_model import LoadedModel
from l2d_jax.errors import LONGEST_LINE, InputError
from l2d_jax.evaluation import suite_run
from l2d_jax.evaluation.plan import EvaluationProtocol, TaskPlan
from l2d_jax.evaluation.results import Results, Said, sample_line
from l2d_jax.evaluation.suite import averages, suite_scores
from l2d_jax.evaluation.suite_rows import require_rows
from l2d_jax.evaluation.suite_run import PlanWork, answer_suite
from l2d_jax.evaluation.tasks.counts import ProblemCounts
from l2d_jax.evaluation.tasks.problem import EncodedProblem, Problem, Score
from l2d_jax.evaluation.tasks.task import find_task
from l2d_jax.statistics import Rate, mean_of_rates
from tests.support import tiny
from tests.support.task_rows import split_rows


def test_the_suites_are_the_paper_s_tasks_in_order():
    suites = suite_tasks()
    assert suites["paper"] == ["gsm8k", "math", "instructhumaneval", "mbpp", "mmlu", "mmlu_pro"] == task_names()[:6]
    assert suites["all"] == task_names()[:9]
    kinds = [find_task(name).kind for name in suites["paper"]]
    assert kinds == ["generate", "generate", "code", "code", "generate", "generate"]


def test_a_mean_gives_each_task_the_same_weight_and_waits_for_all_of_them():
    rates = {"gsm8k": Rate(0.2, 0.1, 0.4, 1000), "math": Rate(0.4, 0.3, 0.5, 10), "mmlu": Rate(0.5, 0.4, 0.6, 10)}
    scores = suite_scores(rates)
    assert list(scores) == ["gsm8k", "math", "mmlu", "Mathematics"]
    found = scores["Mathematics"]
    assert found.mean == pytest.approx(0.3)
    assert found.low == pytest.approx(0.3 - math.hypot(0.1, 0.1) / 2)
    assert found.high == pytest.approx(0.3 + math.hypot(0.2, 0.1) / 2)
    assert found.problems == 1010
    everything = suite_scores({task: Rate(0.5, 0.5, 0.5, 1) for task in suite_tasks()["all"]} | rates)
    assert everything["mean"].mean == pytest.approx((0.2 + 0.4 + 0.5 + 3 * 0.5) / 6)  # without the further tasks
    assert averages().keys() <= everything.keys()


def test_one_rate_is_its_own_mean_and_none_has_no_mean():
    rate = Rate(0.25, 0.125, 0.5, 8)
    assert mean_of_rates([rate]) == rate
    with pytest.raises(InputError, match="a mean needs at least one rate"):
        mean_of_rates([])


def test_the_docstring_of_durations():
    found = doctest.testmod(suite_run)
    assert (found.failed, found.attempted) == (0, 1)


def test_rows_are_looked_for_before_any_is_read(tmp_path):
    tasks = [find_task(name) for name in suite_tasks()["all"]]
    asked = {"data_dir": str(tmp_path), "prompts": "paper", "shots": None, "split": None}
    with pytest.raises(InputError, match=r"lacks rows of gsm8k .*, arc_challenge .*: put them there") as raised:
        require_rows(tasks, Namespace(**asked))
    assert all(f" {name} (" in str(raised.value) for name in suite_tasks()["all"]), "no task is cut off"
    assert len(str(raised.value)) <= LONGEST_LINE - len("error: ")
    for task in tasks:
        split_rows(tmp_path, task.name)
    require_rows(tasks, Namespace(**asked))
    require_rows(tasks, Namespace(**asked | {"data_dir": None}))
    (tmp_path / "mbpp" / "test.jsonl").unlink()
    with pytest.raises(InputError, match=r"no split 'test' in .*mbpp: it needs test.jsonl"):
        require_rows(tasks, Namespace(**asked))


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Two plans of six problems; each is answered in 10 s. `asked` has the call of each plan, and its problems."""
    clock, asked, shown = [0.0], [], []
    loaded = LoadedModel(tiny.model(), byte_tokenizer(), (), DecodeConfig())

    def work(name):
        problems = [EncodedProblem(_problem(f"{name}/{i}"), [1]) for i in range(6)]
        asks = {"batch_size": 10, "samples": 5, "seed": 0, "label": None, "prompts": "paper", "tagged": False}
        protocol = EvaluationProtocol(**asks, choices="generate", draws=1)
        plan = TaskPlan(find_task(name), problems, "digest", DecodeConfig(), protocol, ProblemCounts(6, 0))
        run = {"task": name, "decode": vars(DecodeConfig()), "asking": {"label": None}}
        return PlanWork(plan, "midpoint-15", lambda: Results(tmp_path / name, run))

    def evaluate_plan(loaded, plan, open_results, *, run, most=None, spent=None, bar=None):
        results = open_results()
        ids = [one.problem.id for one in plan.problems if one.problem.id not in results.samples][:most]
        asked.append((plan.task.name, most, ids))
        if plan.task.name == "math":
            raise InputError("logits were not numbers")
        for name in ids:
            clock[0] += 10
            results.add([sample_line(_problem(name), "?", [Said("a", 4)], [Score(1.0, 1.0, None, None, "")])])
            if bar is not None:
                bar.update(1)
        speed = {"problems": len(ids), "seconds": 10.0 * len(ids), "tokens": 0}
        speed = {key: value + (spent or {}).get(key, 0) for key, value in speed.items()}
        return {"speed": speed} if most is not None else results.finish(speed)

    @contextlib.contextmanager
    def run_seconds():
        found, began = [], clock[0]
        yield found
        found.append(clock[0] - began)

    def answer(*names):
        asked.clear()
        works = [work(name) for name in names]
        return answer_suite(loaded, works, lambda plan, figures: shown.append((plan.task.name, figures)))

    monkeypatch.setattr(suite_run, "evaluate_plan", evaluate_plan)
    monkeypatch.setattr(suite_run, "run_seconds", run_seconds)
    return Namespace(answer=answer, asked=asked, shown=shown, folder=tmp_path)


def _problem(name):
    return Problem(name, ({"role": "user", "content": "?"},), "a", "a", "math")


def test_the_first_problems_of_all_tasks_give_the_estimate(suite, capsys):
    assert suite.answer("gsm8k", "mmlu") == []
    assert [(name, most, len(ids)) for name, most, ids in suite.asked] == [
        ("gsm8k", 4, 4),
        ("mmlu", 4, 4),
        ("gsm8k", None, 2),
        ("mmlu", None, 2),
    ]
    lines = capsys.readouterr().out.splitlines()
    rate = "4 problems took 10.00 s each; 2 are left, about 20 s"
    assert lines[1] == f"  gsm8k midpoint-15: {rate}; the paper's 1319 would take 3 h 40 min"
    assert lines[2] == f"  mmlu midpoint-15: {rate}; the paper's 13666 would take 37 h 58 min"
    assert lines[3] == "about 40 s left; the paper's whole splits would take about 41 h 38 min"
    [(_, first), _] = suite.shown
    assert first["problems"] == first["speed"]["problems"] == 6
    assert first["speed"]["seconds"] == 60


def test_a_suite_goes_on_where_it_stopped(suite, capsys):
    suite.answer("gsm8k")
    samples = suite.folder / "gsm8k" / "samples.jsonl"
    assert suite.answer("gsm8k", "mmlu") == []
    assert {name for name, *_ in suite.asked} == {"mmlu"}, "a finished task is left alone, and so are its figures"
    assert "gsm8k midpoint-15: finished before" in capsys.readouterr().out
    kept = samples.read_text().splitlines(keepends=True)[:5]
    samples.write_text("".join(kept))  # as after a kill: the figures are of an earlier state
    suite.answer("gsm8k")
    assert suite.asked == [("gsm8k", 4, ["gsm8k/5"]), ("gsm8k", None, [])]
    results = suite.folder / "gsm8k" / "results.json"
    results.write_text(json.dumps({"run": json.loads(results.read_text())["run"]}))
    suite.answer("gsm8k")
    assert suite.asked == [("gsm8k", None, [])], "all problems have answers, and the figures are missing"


def test_a_task_that_fails_does_not_stop_the_others(suite, capsys):
    [first, again] = suite.answer("math", "gsm8k")
    assert str(first) == str(again) == "logits were not numbers"
    assert [name for name, _ in suite.shown] == ["gsm8k"]
    assert "math" not in capsys.readouterr().out
