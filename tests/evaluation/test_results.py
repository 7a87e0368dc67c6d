"""The folder of an evaluation: figures from lines, going on after an interruption, and what is refused."""

import json

import pytest

from l2d_jax.errors import InputError
from l2d_jax.evaluation.results import Results, Said, sample_line, summarise
from l2d_jax.evaluation.tasks.problem import Problem, Score

RUN = {"task": "t", "budget": 3}


def line(name, *scores, subject=None):
    problem = Problem(name, ({"role": "user", "content": "?"},), "right", "right", "math", subject)
    judged = [Score(float(score), 1.0, "x", None, "" if score else "wrong") for score in scores]
    return sample_line(problem, "prompt of " + name, [Said("said", 4, 12)] * len(scores), judged)


def test_an_interrupted_evaluation_goes_on(tmp_path):
    first = Results(tmp_path / "a", RUN)
    first.add([line("t/0", 1), line("t/1", 0)])
    with (tmp_path / "a" / "samples.jsonl").open("a") as file:
        file.write('{"id": "t/2", "samp')
    again = Results(tmp_path / "a", RUN)
    assert list(again.samples) == ["t/0", "t/1"]
    again.add([line("t/2", 1)])
    figures = again.finish({"seconds": 1.0})
    assert figures == json.loads((tmp_path / "a" / "results.json").read_text())
    assert figures["problems"] == 3
    assert figures["strict"]["accuracy"]["mean"] == pytest.approx(2 / 3)
    assert figures["relaxed"]["accuracy"]["mean"] == 1
    assert figures["run"] == RUN
    ids = [json.loads(text)["id"] for text in (tmp_path / "a" / "samples.jsonl").read_text().splitlines()]
    assert ids == ["t/0", "t/1", "t/2"]


def test_another_evaluation_is_refused(tmp_path):
    Results(tmp_path, RUN).add([line("t/0", 1)])
    with pytest.raises(InputError, match=r"holds another evaluation \(budget was 3, is 15\): give it another --name"):
        Results(tmp_path, RUN | {"budget": 15})
    assert list(Results(tmp_path, RUN).samples) == ["t/0"]


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write to .*: choose another --out"):
        Results(tmp_path / "file" / "a", RUN)


def test_figures_by_subject_and_by_samples():
    lines = [
        line("t/0", 1, 0, 0, 0, 0, subject="a"),
        line("t/1", 1, 1, 1, 1, 1, subject="a"),
        line("t/2", *[0] * 5, subject="b"),
    ]
    figures = summarise({one["id"]: one for one in lines})["strict"]
    assert figures["accuracy"]["mean"] == pytest.approx(1.2 / 3)
    assert {k: round(found["mean"], 3) for k, found in figures["pass"].items()} == {"1": 0.4, "5": 0.667}
    assert {name: found["mean"] for name, found in figures["subjects"].items()} == {"a": 0.6, "b": 0.0}


def test_evaluations_per_token_are_of_the_lines_that_count_them():
    lines = {"t/0": line("t/0", 1, 0), "t/1": line("t/1", 1)}
    for sample in lines["t/1"]["samples"]:  # written by an earlier version
        del sample["tokens"], sample["evaluations"], sample["passes"]
    lines["t/0"]["samples"][0]["evaluations"] = 20
    assert summarise(lines)["evaluations per token"] == (20 + 12) / 8
    assert summarise({"t/1": lines["t/1"]})["evaluations per token"] is None


def test_text_that_is_no_unicode_is_written():
    problem = Problem("t/0", ({"role": "user", "content": "?"},), "right", "right", "math")
    written = sample_line(problem, "p", [Said("a\ud800b")], [Score(0.0, 0.0, None, None, "broken unicode")])
    assert json.loads(json.dumps(written))["samples"][0]["text"] == "a?b"


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"{" + text,
        lambda text: b"[1]\n",
        lambda text: text.replace(b'"id"', b'"di"'),
        lambda text: text.replace(b'"strict": 1.0', b'"strict": NaN'),
        lambda text: text.replace(b'"strict": 1.0', b'"strict": 7'),
        lambda text: text.replace(b"prompt of", b"prompt \xff"),
        lambda text: text.replace(b"t/1", b"t/0"),
    ],
)
def test_problems_of_damaged_lines_are_answered_again(tmp_path, capsys, damage):
    """Of two lines with one id, neither can be told to be the problem's."""
    Results(tmp_path, RUN).add([line("t/0", 1), line("t/1", 1), line("t/2", 1)])
    file = tmp_path / "samples.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    damaged = damage(lines[1])
    assert damaged != lines[1]
    file.write_bytes(b"".join([lines[0], damaged, lines[2]]))
    repeats = b"t/0" in damaged
    again = Results(tmp_path, RUN)
    assert list(again.samples) == (["t/2"] if repeats else ["t/0", "t/2"])
    [warning] = capsys.readouterr().err.splitlines()
    assert f"line {1 if repeats else 2} of {file} is damaged and left out" in warning
    again.add([line("t/1", 1), *([line("t/0", 1)] if repeats else [])])
    assert again.finish({})["problems"] == 3
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"run": 3}', "\xff"])
def test_damaged_results_are_one_line(tmp_path, text):
    Results(tmp_path / "a", RUN).add([line("t/0", 1)])
    (tmp_path / "a" / "results.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"results.json does not say what was evaluated: give another --name, or rem"):
        Results(tmp_path / "a", RUN)
