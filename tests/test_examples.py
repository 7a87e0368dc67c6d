"""The notebook and the scripts of examples/ run in a folder that is not the clone, with the package alone."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.programs import ROOT

EXAMPLES = ROOT / "examples"
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tour(tmp_path_factory):
    """What the cells of the notebook leave, in the order in which they stand."""
    notebook = json.loads((EXAMPLES / "tour.ipynb").read_text())
    space: dict[str, object] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("elsewhere"))
        patch.setenv("MPLBACKEND", "agg")
        patch.delenv("L2D_MODEL", raising=False)
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                assert cell["outputs"] == [], "clear the outputs before a commit"
                exec(compile("".join(cell["source"]), cell["id"], "exec"), space)
    return space


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Run a script with arguments; what it prints."""

    def run(name, *arguments):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_the_notebook_trains_answers_traces_and_scores(tour):
    assert (Path(tour["WORKDIR"]) / "export" / "path.safetensors").exists()
    assert [token.evaluations for token in tour["tokens"]] == [7] * len(tour["tokens"])
    assert tour["score"].total < 0


def test_answers_at_budgets(tour, run):
    printed = run("answer_at_budgets.py", "--model", tour["WORKDIR"], "--budget", 1, 3, "--max_new_tokens", 4)
    assert "budget 1 " in printed
    assert "budget 3 " in printed


def test_a_loop_of_ones_own_lowers_the_loss(run):
    losses = [float(line.split()[-2]) for line in run("train_loop.py", "--steps", 12).splitlines() if "loss" in line]
    assert losses[-1] < losses[0]


def test_a_solver_of_ones_own_comes_closer_with_more_evaluations(tour, run):
    printed = run("own_solver.py", "--model", tour["WORKDIR"])
    errors = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("ralston")]
    assert len(errors) == 3
    assert errors[-1] < errors[0]


def test_every_example_is_tested():
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == {
        "answer_at_budgets.py",
        "own_solver.py",
        "passes.py",
        "tour.ipynb",
        "train_loop.py",
    }
