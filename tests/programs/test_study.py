"""Models compared on the same held-out answers: what is measured, kept, shown and refused."""

import json
import re

import numpy as np
import pytest

from l2d_jax import study
from l2d_jax.programs import study as program
from tests.support.programs import SMALLER, TINY, call, write_base, write_model

KINDS = ("corrected@midpoint-3/", "broken@midpoint-3/")


@pytest.fixture(scope="module")
def run(tmp_path_factory, mesh):
    folder = tmp_path_factory.mktemp("models")
    base = write_base(folder / "base")
    model = write_model(folder / "model", base, mesh)
    small = SMALLER | {"data.validation_examples": 3, "validation.exact_batch_size": 4}
    options = [f"--config.{name}={value}" for name, value in small.items()]

    def run(out, *arguments, models=(f"base={base}", f"path={model}")):
        common = ["--config", TINY, "--out", out, "--budgets", 1, 4, "--solvers", "midpoint", "euler", "fehlberg2"]
        return call(study.main, *common, "--models", *models, *arguments, *options)

    return run


@pytest.mark.slow
def test_a_study(run, tmp_path, monkeypatch):
    ways = ("--answers", 2, "--samples", 2)
    outcome = run(tmp_path, *ways)
    assert outcome.status == 0, outcome.err
    rows = [line.split() for line in outcome.out.splitlines() if line.lstrip().startswith(("base ", "path "))]
    settings = [row[2:4] for row in rows[1:5]]
    assert rows[0][2] == "1"  # the language model has no solver
    assert settings[:3] == [["1", rows[1][3]], ["midpoint", "3"], ["euler", "4"]]  # the nearest that each can spend
    assert settings[3][0] == "fehlberg2"
    known = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in ("base", "path")}
    sums = {name: one["tally"]["sums"] for name, one in known.items()}
    assert sums["path"]["greedy@1"] == sums["base"]["greedy@1"]  # a budget of 1 is the language model
    assert sums["path"]["loss@midpoint-3"] != sums["path"]["loss@1"]
    assert len(known["base"]["tally"]["counts"]) == 3
    assert known["base"]["trained"] == 0 < known["path"]["trained"]
    assert known["path"]["settings"][-1]["evaluations"] > 1
    assert known["base"]["tally"]["sums"].keys() == {f"{kind}@1" for kind in ("loss", "expected", "greedy")}
    changed = [np.sum([values for name, values in sums["path"].items() if name.startswith(kind)]) for kind in KINDS]
    gain = np.sum(sums["path"]["greedy@midpoint-3"]) - np.sum(sums["path"]["greedy@1"])
    assert changed[0] - changed[1] == pytest.approx(2 * gain)  # each token is in a bin of entropy and one of position
    tried = {
        name: [(way["kind"], way["budget"], way["tries"]) for way in one["answers"]] for name, one in known.items()
    }
    assert tried["base"] == [("greedy", 1, 1), ("majority", 1, 2)]
    assert tried["path"] == [("greedy", 1, 1), ("greedy", 3, 1), ("majority", 3, 2)]
    assert [known["path"]["answers"][0][name] for name in ("right", "tokens", "flops")] == [
        known["base"]["answers"][0][name] for name in ("right", "tokens", "flops")
    ]
    assert "majority of 2 at 3" in outcome.out
    assert (tmp_path / "answers.png").stat().st_size > 10_000
    assert "What refinement does to tokens: path" in outcome.out
    assert (tmp_path / "path-corrections.png").stat().st_size > 10_000
    page = (tmp_path / "study.html").read_text()
    assert "oracle" in page
    assert "<svg" in page
    assert not re.search(r'(src|href)="http|url\(http|@import', page)  # nothing is asked for
    assert (tmp_path / "study.png").stat().st_size > 10_000

    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")}
    monkeypatch.setattr(program, "load", None)  # what is known, and what is refused, needs no weights
    again = run(tmp_path, *ways)
    assert again.status == 0
    assert "measuring" not in again.out
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.json")} == written
    other = run(tmp_path, *ways, "--split", "test")
    assert "base.json was measured with another data: remove it, or take another --out" in other.error


@pytest.mark.parametrize(
    ("models", "arguments", "line"),
    [
        (["base"], [], "'base' is not NAME=MODEL, such as base=Qwen/Qwen2.5-7B-Instruct"),
        (["a=x", "a=y"], [], "each model needs a different name, got a, a"),
        (["a=x"], ["--budgets", "0"], "--budgets: the number must be in [1, 10000], got 0"),
        (["a=x"], ["--solvers", "runge"], "invalid choice: 'runge'"),
        (["a=x"], ["--config.decode.solver=euler"], "--config.decode.solver changes nothing here: use --solvers"),
        (["a=x"], ["--config.decode.temperature=1"], "--config.decode.temperature changes nothing here"),
        (["a=x"], ["--config.decode.gate=1"], "--config.decode.gate belong to free answers: give --answers too"),
        (["a=x"], ["--beams", 2], "--beams belong to free answers"),
        (["a=x"], ["--solvers", "bosh3"], "whatever the --budgets: leave them out"),
        (["a=x"], ["--solvers", "bosh3", "euler", "--answers", 2], "name another solver before bosh3"),
        (["a=x"], ["--solvers", "euler", "--config.decode.tolerance=0.1"], "is for adaptive solvers"),
    ],
)
def test_bad_input_is_one_line(run, tmp_path, models, arguments, line):
    assert line in run(tmp_path, *arguments, models=models).error
