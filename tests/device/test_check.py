"""A device check reports whatever happens in its parts, and its comparisons notice what they are for."""

import argparse
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from l2d_jax.model import attention as attention_module
from tests.device import answers, attention, check, machine, numerics, published, quickstart
from tests.device.options import TINY, Options, add_options, make_options
from tests.device.table import FAILED, LEFT_OUT, MEASURED, OK, REFUSED, Row, Rows, read_rows, render
from tests.support.programs import ROOT

PART = check.Part("numerics", limit=50)  # 150 in a rehearsal


@pytest.fixture
def options(tmp_path: Path) -> Options:
    for name in ("rows", "logs"):
        (tmp_path / name).mkdir()
    return Options(tmp_path, rehearse=True, **TINY)


@pytest.fixture
def rows(options: Options) -> Rows:
    return Rows("numerics", options.rows_file("numerics"))


def test_rows_are_written_as_they_are_found(rows: Rows):
    rows.add("speed", "3 ms", "2 x LM", seconds=0.003)
    rows.judge("error", 1e-6, 1e-4, beside="the CPU")
    rows.judge("nan", math.nan, 1e-4, beside="the CPU")
    with rows.guard("broken"):
        raise ValueError("first line\nsecond line")
    with rows.file.open("a") as file:
        file.write('{"part": "cut o')
    found = read_rows(rows.file)
    assert [row.status for row in found] == [MEASURED, OK, FAILED, FAILED]
    assert found[0] == Row("numerics", "speed", "3 ms", "2 x LM", figures={"seconds": 0.003})
    assert found[-1].result == "ValueError: first line"
    assert read_rows(rows.file.with_name("none")) == []


def test_the_table_names_a_part_once_and_cuts_long_texts():
    lines = render([Row("a", "x", "1\n2"), Row("a", "y", "2 " * 80), Row("b", "z", "3", "LM", OK)]).splitlines()
    assert lines[0].split() == ["part", "what", "result", "status", "divided", "by,", "or", "compared", "with"]
    assert [line.split()[0] for line in lines if not line.startswith("-")] == ["part", "a", "y", "b"]
    assert max(map(len, lines)) < 160
    assert " ..." in lines[3]


def test_options_survive_and_a_rehearsal_is_tiny(tmp_path: Path):
    parser = argparse.ArgumentParser()
    add_options(parser)
    parser.add_argument("--rehearse", action="store_true")
    fields = set(Options.__dataclass_fields__) - {"folder", "overrides"}
    assert set(vars(parser.parse_args([]))) == fields
    given = make_options(parser.parse_args(["--rehearse", "--batches", "3", "5"]), tmp_path, ("--config.a=1",))
    assert given == Options(tmp_path, rehearse=True, overrides=("--config.a=1",), **TINY | {"batches": (3, 5)})
    assert Options.load(given.dump()) == given
    assert make_options(parser.parse_args([]), tmp_path, ()) == Options(tmp_path)


def test_a_process_ends_with_all_that_it_started(tmp_path: Path):
    log, began = tmp_path / "log", time.monotonic()
    script = "sleep 60 & echo $! ; wait"
    assert check.run_within(["bash", "-c", script], dict(os.environ), log, limit=0.5) is None
    assert time.monotonic() - began < 10
    time.sleep(0.1)
    state = Path(f"/proc/{log.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
    assert check.run_within(["bash", "-c", "echo no; exit 3"], {}, log, limit=10) == 3
    assert check.ended(3, log) == "exit status 3: no"
    assert check.ended(-9, log) == "killed by SIGKILL: no"


@pytest.mark.parametrize(
    ("status", "left", "last"),
    [
        (0, 200.0, Row("numerics", "one", "1", status=OK)),
        (1, 200.0, Row("numerics", "the rest", "exit status 1: last", status=FAILED)),
        (-11, 200.0, Row("numerics", "the rest", "killed by SIGSEGV: last", status=FAILED)),
        (None, 200.0, Row("numerics", "the rest", "took longer than 150 s", status=FAILED)),
        (None, 20.0, Row("numerics", "the rest", "the 8 minutes were over", status=LEFT_OUT)),
        (0, 5.0, Row("numerics", "-", "the 8 minutes were over", status=LEFT_OUT)),
    ],
)
def test_a_part_that_ends_early_keeps_its_rows(monkeypatch, options: Options, status, left, last):
    def run(command: Any, variables: Any, log: Path, *, limit: float) -> int | None:
        assert limit == min(left, 3 * PART.limit)
        Rows("numerics", options.rows_file("numerics")).add("one", "1", status=OK)
        log.write_text("first\nlast\n")
        return status

    monkeypatch.setattr(check, "run_within", run)
    options.rows_file("numerics").write_text("of an earlier check\n")
    found = check.run_part(PART, options, left=left, minutes=8)
    assert found[-1] == last
    assert len(found) == 1 + (status != 0)


def test_a_part_without_rows_has_failed(monkeypatch, options: Options):
    monkeypatch.setattr(check, "run_within", lambda *_, limit: 0)
    (options.folder / "logs" / "numerics.txt").touch()
    assert check.run_part(PART, options, left=99, minutes=8) == [Row("numerics", "-", "exit status 0", status=FAILED)]


@pytest.mark.parametrize(
    ("statuses", "wanted"), [([OK, MEASURED, LEFT_OUT], 0), ([OK, FAILED, OK], 1), ([REFUSED, OK, OK], 2)]
)
def test_the_exit_status(monkeypatch, capsys, options: Options, statuses, wanted):
    results = iter(statuses)

    def run(part: Any, *_: Any, **__: Any) -> list[Row]:
        status = next(results)
        return [Row(part.name, REFUSED if status == REFUSED else "x", "there is none", status=status)]

    monkeypatch.setattr(check, "run_part", run)
    assert check.check(options, check.PARTS[:3], minutes=8, is_kept=True) == wanted
    shown = capsys.readouterr()
    if wanted == 2:
        assert (shown.out, shown.err) == ("", "error: there is none\n")
        return
    assert [line.split()[0] for line in shown.out.splitlines()[1:] if "there is none" in line] == [
        part.name for part in check.PARTS[:3]
    ]
    assert (options.folder / check.RESULTS).exists()


def test_ctrl_c_leaves_a_table(monkeypatch, capsys, options: Options):
    def run(*_: Any, **__: Any) -> list[Row]:
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "run_part", run)
    assert check.check(options, check.PARTS, minutes=8, is_kept=False) == 1
    assert "interrupted" in capsys.readouterr().out


def test_pytorch_has_no_jax_on_the_gpu(monkeypatch, options: Options):
    monkeypatch.setenv("JAX_PLATFORMS", "cuda,cpu")
    real = replace(options, rehearse=False)
    found = {part.name: check.environment(part, real)["JAX_PLATFORMS"] for part in check.PARTS}
    assert {name for name, platforms in found.items() if platforms == "cpu"} == {"PyTorch decoding", "PyTorch training"}
    assert {check.environment(part, options)["JAX_PLATFORMS"] for part in check.PARTS} == {"cpu"}


def test_a_machine_without_a_gpu_is_refused(rows: Rows, options: Options):
    machine.run(rows, replace(options, rehearse=False))
    [row] = read_rows(rows.file)
    assert row.what == REFUSED
    assert row.result.startswith(f"this check needs a GPU, and jax {jax.__version__} finds cpu only: install")


@pytest.mark.slow
def test_the_script_refuses_in_one_line():
    variables = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    command = ["bash", str(ROOT / "launch" / "device_check.sh")]
    done = subprocess.run(command, env=variables | {"L2D_PYTHON": sys.executable}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this check needs a GPU, and jax ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("case", [case for case in attention.CASES if case.slots < 1000], ids=lambda case: case.name)
def test_attention_in_numpy_is_ours(case: attention.Case):
    case = case._replace(rows=2, slots=48, width=16, heads=(4, 2), window=case.window and case.window // 3)
    arrays, places = attention.inputs(case)
    real = places["q_positions"] >= 0
    pairs = zip(attention.ours(case, arrays, places, "float32"), attention.exact(case, arrays, places), strict=False)
    assert max(numerics.spread(a[real], b[real]) for a, b in pairs) < attention.BOUNDS["float32"]


def test_a_mask_that_is_wrong_in_one_row_is_noticed(monkeypatch):
    case = attention.CASES[0]
    arrays, places = attention.inputs(case)
    wanted = attention.exact(case, arrays, places)[0]
    mask = attention_module.causal_mask
    monkeypatch.setattr(attention_module, "causal_mask", lambda *given: mask(*given).at[0, 100, 50:].set(False))
    found = attention.ours(case, arrays, places, "float32")[0]
    assert numerics.spread(found, wanted) > 2 * attention.BOUNDS["bfloat16"]


def test_errors_are_relative_to_the_exact_value():
    exact = np.array([3.0, -4.0])
    assert numerics.largest(exact + np.array([0, 0.4]), exact) == pytest.approx(0.1)
    assert numerics.spread(exact * 1.1, exact) == pytest.approx(0.1)


def test_one_token_that_differs_fails(rows: Rows):
    numerics.judge_tokens(rows, {3: [[1, 2], [3, 4]]}, {3: [[1, 2], [3, 5]]})
    answers.count(rows, "lanes", [[1, 2]], [[1, 2, 3]], "alone", is_judged=True)
    answers.count(rows, "lanes", [[1, 2]], [[1, 2, 3]], "alone", is_judged=False)
    answers.count(rows, "lanes", [[1, 2]], [[1, 2]], "alone", is_judged=True)
    assert [row.status for row in read_rows(rows.file)] == [FAILED, FAILED, MEASURED, OK]
    assert [row.figures["differ"] for row in read_rows(rows.file)] == [1, 1, 1, 0]


def test_errors_in_bfloat16_are_judged_beside_the_cpus(rows: Rows):
    exact = {"logits": np.ones(4), "loss": np.array(1.0)}
    near, found = {"logits": np.full(4, 1.01)}, {"logits": np.full(4, 1.03)}
    numerics.judge_rounded(rows, found, exact, near, name="bfloat16")
    numerics.judge_rounded(rows, found, exact, near, name="float32", finer=4.0)
    assert [(row.what, row.status) for row in read_rows(rows.file)] == [
        ("bfloat16: logits", OK),
        ("float32: logits", FAILED),
    ]


def test_computing_on_a_device_is_for_its_platform():
    device = jax.devices()[0]
    with numerics.on(device, "highest"):
        assert jnp.ones(2).devices() == {device}
        assert jax.config.jax_default_matmul_precision == "highest"
        assert jax.sharding.get_abstract_mesh().abstract_device.platform == device.platform


@pytest.mark.parametrize("part", ["PyTorch decoding", "PyTorch training"])
def test_pytorch_that_is_not_there_is_left_out(monkeypatch, options: Options, part):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    rows = Rows(part, options.rows_file(part))
    published.run(rows, options)
    assert read_rows(rows.file) == [Row(part, "-", "torch is not installed", status=LEFT_OUT)]


def test_figures_of_pytorch_are_divided_by_ours(options: Options):
    theirs = {"seconds per token": 0.3, "batch": 1, "budget": 15}
    assert published.beside_ours(options, theirs) == "JAX was not measured"
    rows = Rows("decoding", options.rows_file("decoding"))
    for order, seconds in (("one by one", 0.1), ("as a stream", 0.03)):
        rows.add("x", "y", **theirs | {"order": order, "seconds per token": seconds})
    rows.add("x", "y", **theirs | {"order": "one by one", "budget": 1})
    assert published.beside_ours(options, theirs) == (
        "/ JAX above: one by one 3.00 x (100.00 ms), as a stream 10.00 x (30.00 ms)"
    )


def test_the_quickstart_needs_a_model(monkeypatch, tmp_path: Path, options: Options, rows: Rows):
    monkeypatch.setattr(quickstart, "ROOT", tmp_path)
    quickstart.run(rows, options)
    assert [row.status for row in read_rows(rows.file)] == [LEFT_OUT]
    (tmp_path / "runs" / "smollm2").mkdir(parents=True)
    assert quickstart.find_base(options) == str(tmp_path / "runs" / "smollm2")
    assert quickstart.find_base(replace(options, smollm2="here")) == "here"
