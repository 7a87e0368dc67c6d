"""A suite of a tiny model, from the command line to the tables of the report."""

import json
import re

import pytest

from l2d_jax import evaluate, report
from l2d_jax.evaluation.sandbox.submission import Verdict
from l2d_jax.programs import evaluate as program
from tests.support.programs import call, write_base, write_model
from tests.support.task_rows import split_rows, varied, write

TASKS = ["gsm8k", "math", "instructhumaneval", "mbpp", "mmlu", "mmlu_pro"]
MEANS = ["Mathematics", "Coding", "General knowledge", "mean"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in TASKS:
        split_rows(folder, name)
    for name in ("instructhumaneval", "mbpp"):  # whose problems have the ids of their rows
        write(folder, name, "test", [varied(name, 100 + i) | {"task_id": f"{name}/{i}"} for i in range(3)])
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
    words = ["--suite", "paper", "--data_dir", data, "--shots", 0, "--samples", 1, "--max_new_tokens", 2, "--limit", 2]
    words += ["--dtype", "float32"]
    plain, paths = tmp_path / "plain", tmp_path / "paths"
    commands = (["--model", base, "--out", plain], ["--model", model, "--out", paths, "--budget", 1, 3])
    for command in commands:
        outcome = call(evaluate.main, *command, *words)
        assert outcome.status == 0, outcome.err
    assert (
        len(re.findall(r"^  \w+ midpoint-[13]: 2 problems took .* s each; 0 are left", outcome.out, re.MULTILINE)) == 12
    )
    assert re.search(r"^about .* left; the paper's whole splits would take about ", outcome.out, re.MULTILINE)
    header, first, second = [row for row in rows(outcome.out) if row[0] in ("model", "paths")][-3:]
    assert header == ["model", "evaluation", *TASKS]
    assert (first[:2], second[:2]) == (["paths", "midpoint-1"], ["paths", "midpoint-3"])
    found = json.loads((paths / "suite.json").read_text())
    assert found["suite"] == "paper"
    assert found["trained parameters"]["midpoint-1"] == 0 < found["trained parameters"]["midpoint-3"]
    for row, budget in zip(found["rows"], (1, 3), strict=True):
        assert row["evaluation"] == f"midpoint-{budget}"
        assert list(row["scores"]) == TASKS + MEANS
        assert row["scores"]["Coding"]["mean"] > 0
        scores = [row["scores"][task]["mean"] for task in TASKS]
        assert row["scores"]["mean"]["mean"] == pytest.approx(sum(scores) / 6)
    assert row["evaluations per token"] == 3

    again = call(evaluate.main, *commands[1], *words)
    assert again.status == 0, again.err
    assert again.out.count("finished before") == 12
    assert json.loads((paths / "suite.json").read_text()) == found

    beside = tmp_path / "beside.json"
    beside.write_text(json.dumps({"L2D": {"gsm8k": 0.5, "math": 0.25, "trained parameters": 7e7}}))
    outcome = call(report.main, "--workdir", plain, paths, "--beside", beside)
    assert outcome.status == 0, outcome.err
    shown = [row for row in rows(outcome.out) if row[0] in ("plain", "paths", "L2D")]
    assert shown[3] == ["L2D", "0.375", "70,000,000"]
    assert [row[:2] for row in shown[4:7]] == [["plain", "euler-1"], ["paths", "midpoint-1"], ["paths", "midpoint-3"]]
    assert shown[7] == ["L2D", "0.500", "0.250"]
    for folder in (plain, paths):
        assert "70,000,000" in (folder / "report.html").read_text()
