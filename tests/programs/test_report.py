"""The report: tables, figures and a page that asks for nothing else, of training and of evaluations."""

import contextlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from l2d_jax import report
from l2d_jax.config.choices import suite_tasks
from l2d_jax.config.schema import DecodeConfig
from l2d_jax.evaluation.results import Results, Said, sample_line
from l2d_jax.evaluation.tasks.problem import Problem, Score
from l2d_jax.programs.report import short_names
from l2d_jax.reports import evaluation as evaluations
from l2d_jax.reports import evaluation_figures as figures
from tests.support.programs import call


def evaluation(
    folder: Path,
    task: str,
    budget: int,
    *scores: int,
    label: Any = None,
    guidance: float = 1.0,
    end: float = 1.0,
    speed: Any = None,
):
    """A finished evaluation with one problem for each score."""
    decode = {**vars(DecodeConfig(budget=budget, guidance=guidance)), "end": end}
    if end == 1:
        del decode["end"]
    name = f"midpoint-{budget}" + (f"-end_{end:g}" if end != 1 else "")
    name += "" if label is None else f"-label_{label}-{guidance:g}"
    results = Results(folder / task / name, {"task": task, "decode": decode, "asking": {"label": label}})
    for number, score in enumerate(scores):
        problem = Problem(f"{task}/{number}", ({"role": "user", "content": "?"},), "a", "a", "math")
        results.add([sample_line(problem, "?", [Said("a")], [Score(float(score), 1.0, None, None, "")])])
    results.finish(speed or {})


@pytest.fixture
def workdir(tmp_path):
    """With two validations and several evaluations."""
    records = []
    for step, loss in ((0, 2.0), (50, 1.0)):
        record = {"step": step, "validation/loss": loss, "validation/loss_by_t": [loss, loss / 2]}
        for kind in ("expected", "greedy", "exact"):
            for budget in (1, 15):
                name = f"validation/{kind}@{budget}"
                record |= {name: 0.5, f"{name}_interval": [0.4, 0.6], f"{name}_gain": [0.0, -0.1, 0.1]}
        records.append(record)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    evaluation(tmp_path / "eval", "gsm8k", 1, 0, 0, 1, 0)
    evaluation(tmp_path / "eval", "gsm8k", 15, 1, 0, 1, 1)
    for strength in (0.0, 2.0):
        evaluation(tmp_path / "eval", "mmlu", 15, 1, 0, label=1, guidance=strength)
    inside = {
        "t": [0, 1],
        "expected": [0.1, 0.2],
        "greedy": [0.2, 0.4],
        "evaluations": [12.5, 30.0],
        "solver": "fehlberg2",
    }
    (tmp_path / "eval/gsm8k/within.json").write_text(json.dumps(inside))
    Results(tmp_path / "eval/math/midpoint-1", {"task": "math"})  # not finished: left out
    return tmp_path


def test_the_whole_report(workdir):
    beside = workdir / "paper.json"
    beside.write_text(json.dumps({"the paper <1B>": {"gsm8k": 0.25}}))
    outcome = call(report.main, "--workdir", workdir, "--beside", beside)
    assert outcome.status == 0, outcome.err
    rows = [re.split(r"  +", line.strip()) for line in outcome.out.splitlines()]
    assert ["gsm8k", "midpoint-15", "0.750 [0.301, 0.954]", "1.000 [0.510, 1.000]", "4"] in rows
    assert ["gsm8k", "the paper <1B>", "0.250"] in rows
    assert ["budget", *("expected", "gain", "greedy", "gain", "exact", "gain")] in rows
    page = (workdir / "report.html").read_text()
    assert "the paper &lt;1B&gt;" in page
    assert page.count("<svg") == 4
    names = re.findall(r'id="([^"]+)"', page)
    assert len(names) == len(set(names)), "figures must not share names"
    assert {name[1:] for name in re.findall(r'href="(#[^"]+)"', page)} <= set(names)
    asked = re.findall(r"""(?:src|href)="(?!#)[^"]*"|url\((?!#)[^)]*\)|@import|<script|<link""", page)
    assert asked == [], "the page must ask for no other file"
    for name in ("report", "eval/budgets", "eval/within", "eval/guidance"):
        assert (workdir / f"{name}.png").exists()
        assert (workdir / f"{name}.svg").exists()


def test_evaluations_alone(tmp_path):
    evaluation(tmp_path, "gsm8k", 1, 0, 1)
    outcome = call(report.main, "--workdir", tmp_path)
    assert outcome.status == 0, outcome.err
    assert "<svg" not in (tmp_path / "report.html").read_text(), "one budget is no line"


@pytest.mark.slow
def test_the_same_report_is_the_same_page(workdir):
    pages = []
    for _ in range(2):
        assert call(report.main, "--workdir", workdir).status == 0
        pages.append((workdir / "report.html").read_bytes())
    assert pages[0] == pages[1]


def test_nothing_to_report(tmp_path):
    assert "has no validation and no evaluation" in call(report.main, "--workdir", tmp_path).error
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 1.0}\n')
    assert "has no validation in metrics.jsonl" in call(report.main, "--workdir", tmp_path).error


@pytest.fixture
def drawn(monkeypatch):
    """The lines that are drawn: places and means, by figure, axis and label."""
    found: dict[str, dict[str, dict[str, dict[float, float]]]] = {}
    plain = figures.saved_figure

    @contextlib.contextmanager
    def saved_figure(panels, file):
        with plain(panels, file) as axes:
            yield axes
            lines = found.setdefault(file.stem, {})
            for panel in axes:
                shown = zip(*panel.get_legend_handles_labels(), strict=True)
                points = {label: dict(zip(*handle[0].get_data(), strict=True)) for handle, label in shown}
                lines[panel.get_ylabel()] = points
                assert panel.get_xlabel() != ""

    monkeypatch.setattr(figures, "saved_figure", saved_figure)
    return found


def test_free_answers_against_the_end_begin_with_the_language_model(tmp_path, drawn):
    evaluation(tmp_path, "gsm8k", 1, 0, 0, 0, 0)
    evaluation(tmp_path, "gsm8k", 15, 1, 1, 1, 0)
    for end, scores in ((0.2, (1, 0, 0, 0)), (0.6, (1, 1, 0, 0))):
        evaluation(tmp_path, "gsm8k", 15, *scores, end=end)
    evaluation(tmp_path, "mmlu", 15, 1, 1)  # at one end alone
    assert figures.draw_ends(evaluations.collect(tmp_path), tmp_path / "ends.png")
    line = {"gsm8k": {0.0: 0.0, 0.2: 0.25, 0.6: 0.5, 1.0: 0.75}}
    assert drawn["ends"]["strict accuracy of free answers"] == line
    assert drawn["ends"].keys() == {"strict accuracy of free answers", "relaxed accuracy of free answers"}
    figures.draw_budgets(evaluations.collect(tmp_path), tmp_path / "budgets.png")
    assert drawn["budgets"]["strict accuracy"] == {"gsm8k": {0: 0.0, 1: 0.75}}, "an end is no budget"


def test_guidance_by_category_is_the_mean_of_tasks(tmp_path, drawn):
    accuracies = {"gsm8k": (0, 2, 3), "math": (2, 2, 1), "mbpp": (0, 0, 4), "own": (1, 1, 1)}
    for task, counts in accuracies.items():
        for strength, count in zip((0.0, 1.5, 3.0), counts, strict=True):
            scores = [1] * count + [0] * (4 - count)
            evaluation(tmp_path, task, 15, *scores, label="category", guidance=strength)
    evaluation(tmp_path, "gsm8k", 3, 1, 1, 1, 1, label="category", guidance=1.5)  # another budget at one strength
    assert figures.draw_guidance(evaluations.collect(tmp_path), tmp_path / "guidance.png")
    tasks, categories = drawn["guidance"].values()
    assert tasks["gsm8k"] == {0.0: 0.0, 1.5: 0.5, 3.0: 0.75}
    assert len(tasks) == 4
    assert categories == {
        "Mathematics (gsm8k, math)": {0.0: 0.25, 1.5: 0.5, 3.0: 0.5},
        "Coding (mbpp)": {0.0: 0.0, 1.5: 0.0, 3.0: 1.0},
    }
    assert [*drawn["guidance"]] == ["strict accuracy, by task", "strict accuracy, by category"]


def test_the_interval_of_a_mean_of_tasks_is_narrower(tmp_path):
    one, other = (0.5, 0.2, 0.9), (0.3, 0.3, 0.6)
    mean, low, high = figures._mean([one, other])
    assert (mean, low, high) == pytest.approx((0.4, 0.4 - 0.15, 0.4 + 0.25))
    assert figures._mean([one]) == pytest.approx(one)


@pytest.mark.parametrize("row", [{"gsm8k": 25.0}, {"gsm8k": "much"}, [1]])
def test_rows_of_others_are_shares(workdir, row):
    (workdir / "paper.json").write_text(json.dumps({"the paper": row}))
    outcome = call(report.main, "--workdir", workdir, "--beside", workdir / "paper.json")
    assert "paper.json: the paper" in outcome.error
    assert outcome.error.endswith(": give each label its accuracies from 0 to 1, by task")


@pytest.fixture
def suites(tmp_path):
    """A workdir with a whole suite at two budgets, and a folder of --out with two categories."""
    for number, task in enumerate(suite_tasks()["paper"]):
        for budget in (1, 15):
            scores = [1] * (number % 3) + [0] * (4 - number % 3)
            evaluation(tmp_path / "a" / "eval", task, budget, *scores, speed={"problems": 2, "seconds": 30.0})
    for task in ("gsm8k", "math", "instructhumaneval", "mbpp", "mmlu"):
        evaluation(tmp_path / "b", task, 15, 1, 1, 0, 0)
    counted = {"suite": "paper", "trained parameters": {"midpoint-1": 0, "midpoint-15": 73344256}}
    (tmp_path / "a" / "eval" / "suite.json").write_text(json.dumps(counted))
    return tmp_path


AGAIN = "remove it, and give the command of evaluate again"


def table(text, column):
    """The rows below the last header that has this column."""
    rows = [re.split(r"  +", line.strip()) for line in text.splitlines()]
    first = max(number for number, row in enumerate(rows) if column in row)
    below = itertools.takewhile(lambda row: len(row) > 1 and row[0] != "model", rows[first + 1 :])
    return rows[first], [*below]


def test_a_suite_has_one_table_of_all_folders(suites):
    beside, skipped = suites / "paper.json", {"gsm8k": 0.5, "math": None}
    best = {"mean": 0.4, "trained parameters": 73344256, "evaluations per token": 118}
    beside.write_text(json.dumps({"its best": best, "nothing": {"arc_easy": 0.9}, "a part": skipped, "empty": {}}))
    outcome = call(report.main, "--workdir", suites / "a", suites / "b", "--beside", beside)
    assert outcome.status == 0, outcome.err
    assert outcome.out.count("The paper's tasks") == 1
    header, means = table(outcome.out, "Mathematics")
    categories = ["Mathematics", "Coding", "General knowledge"]
    assert header == ["model", "evaluation", *categories, "mean", "trained", "evaluations", "seconds"]
    first, second, third, best = means
    assert first[:2] == ["a", "midpoint-1"]
    assert [cell.split()[0] for cell in first[2:6]] == ["0.125", "0.250", "0.375", "0.250"]
    assert first[6:] == ["0", "360"], "six tasks of four problems, at 15 s a problem"
    assert second[1] == "midpoint-15"
    assert second[6:] == ["73,344,256", "360"]
    assert [cell.split()[0] for cell in third] == ["b", "midpoint-15", "0.500", "0.500"], "MMLU alone is no category"
    assert best == ["its best", "0.400", "73,344,256", "118.00"]
    header, tasks = table(outcome.out, "mmlu_pro")
    assert header[2:] == suite_tasks()["paper"]
    assert tasks[-1] == ["a part", "0.500"]
    for folder in ("a", "b"):
        page = (suites / folder / "report.html").read_text()
        assert page.count("73,344,256") == 2


def test_folders_of_one_name_are_told_apart(suites):
    outcome = call(report.main, "--workdir", suites / "a", suites / "b" / ".." / "b", suites / "b")
    assert outcome.status == 0, outcome.err
    assert short_names([Path("x/eval"), Path("y/eval")]) == ["x/eval", "y/eval"]
    assert short_names([Path("x/a"), Path("y/b")]) == ["a", "b"]


def test_a_damaged_suite_is_one_line(suites):
    (suites / "a" / "eval" / "suite.json").write_text('{"trained parameters": {"midpoint-1": -1}}')
    error = call(report.main, "--workdir", suites / "a").error
    assert error.endswith(
        "suite.json: trained parameters.midpoint-1 must be greater than or equal to 0, got -1: " + AGAIN
    )


@pytest.mark.parametrize("row", [{"trained parameters": -1}, {"evaluations per token": -0.5}])
def test_counts_of_others_are_not_negative(workdir, row):
    (workdir / "paper.json").write_text(json.dumps({"the paper": row}))
    outcome = call(report.main, "--workdir", workdir, "--beside", workdir / "paper.json")
    assert outcome.error.endswith(": give counts of 0 or more")
