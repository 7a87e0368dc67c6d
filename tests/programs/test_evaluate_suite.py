"""A suite of a tiny model, from the command line to the tables of the report."""

import json
import re

import pytest

from l2d_jax import evaluate, report
from l2d_jax.evaluation.sandbox.submission import Verdict
from l2d_jax.programs import evaluate as program
from tests.support.programs import call, write_base, write_model
from tests.support.task_rows import split_rows

TASKS = ["gsm8k", "math", "instructhumaneval", "mbpp", "mmlu", "mmlu_pro"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in TASKS:
        split_rows(folder, name)
    return folder


def rows(text):
    return [re.split(r"  +", line.strip()) for line in text.splitlines()]


def test_the_programs_of_a_suite_are_run_only_if_that_is_allowed(data, tmp_path):
    base = write_base(tmp_path / "base")
    outcome = call(evaluate.main, "--model", base, "--suite", "paper", "--data_dir", data, "--out", tmp_path / "out")
    assert outcome.error.startswith("instructhumaneval, mbpp runs programs that the model writes: allow it with")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_suite_gives_one_table(data, tmp_path, mesh, monkeypatch):
    base = write_base(tmp_path / "base")
    model = write_model(tmp_path / "model", base, mesh)
    monkeypatch.setattr(program, "choose_run", lambda *_, **__: lambda programs: [Verdict(True, "")] * len(programs))
    words = ["--suite", "paper", "--data_dir", data, "--shots", 0, "--max_new_tokens", 2, "--dtype", "float32"]
    words += ["--samples", 2, "--temperature", 1.0]
    outs = {"plain": tmp_path / "plain", "paths": tmp_path / "paths"}
    commands = {
        "plain": ["--model", base, "--out", outs["plain"], *words, "--samples", 1],
        "paths": ["--model", model, "--out", outs["paths"], *words, "--budget", 1, 3, "--samples", 1],
    }
    for command in commands.values():
        outcome = call(evaluate.main, *command)
        assert outcome.status == 0, outcome.err
    assert outcome.out.count("of the paper's split would take") == 12
    assert re.search(r"^about .* left; the paper's whole splits would take about ", outcome.out, re.MULTILINE)
    [*_, header, first, second, _, _] = [row for row in rows(outcome.out) if row[0] in ("model", "paths")] + [0, 0]
    assert header == ["model", "evaluation", *TASKS]
    assert (first[:2], second[:2]) == (["paths", "midpoint-1"], ["paths", "midpoint-3"])
    found = json.loads((outs["paths"] / "suite.json").read_text())
    assert found["suite"] == "paper"
    assert found["trained parameters"]["midpoint-1"] == 0 < found["trained parameters"]["midpoint-3"]
    for row, budget in zip(found["rows"], (1, 3), strict=True):
        assert row["evaluation"] == f"midpoint-{budget}"
        assert list(row["scores"]) == [*TASKS, "Mathematics", "Coding", "General knowledge", "mean"] or set(
            row["scores"]
        ) == {*TASKS, "Mathematics", "Coding", "General knowledge", "mean"}
        assert row["scores"]["Coding"]["mean"] == 1
        means = [row["scores"][task]["mean"] for task in TASKS]
        assert row["scores"]["mean"]["mean"] == pytest.approx(sum(means) / 6)
        assert row["evaluations per token"] == (0 if budget == 1 else 3) or row["evaluations per token"] >= 1

    again = call(evaluate.main, *commands["paths"])
    assert again.status == 0
    assert again.out.count("finished before") == 12
    assert json.loads((outs["paths"] / "suite.json").read_text()) == found

    beside = tmp_path / "beside.json"
    beside.write_text(json.dumps({"L2D": {"gsm8k": 0.5, "math": 0.25, "mean": 0.375, "trained parameters": 7e7}}))
    outcome = call(report.main, "--workdir", *outs.values(), "--beside", beside)
    assert outcome.status == 0, outcome.err
    shown = rows(outcome.out)
    assert ["L2D", "0.375", "0.375", "70,000,000"] in shown
    assert [row[:2] for row in shown if row[0] in ("plain", "paths")][-3:] == [
        ["plain", "midpoint-1"] if ["plain", "midpoint-1"] in [row[:2] for row in shown] else ["plain", "euler-1"],
        ["paths", "midpoint-1"],
        ["paths", "midpoint-3"],
    ]
    for out in outs.values():
        page = (out / "report.html").read_text()
        assert "The paper's tasks" in page or "The paper&#39;s tasks" in page
        assert "70,000,000" in page
