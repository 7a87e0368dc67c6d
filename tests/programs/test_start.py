"""How programs start: what they are called, and how soon they answer where no large library is needed."""

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib

import pytest

import l2d_jax
from l2d_jax import __main__ as starter
from l2d_jax.config import choices
from l2d_jax.decoding.refinement import solver
from l2d_jax.evaluation.tasks.task import TASKS
from l2d_jax.performance.topologies import GENERATIONS
from l2d_jax.weights.export import FORMATS
from tests.support.marks import slow
from tests.support.programs import ROOT, TINY, call

# Each takes a good part of a second to import. Parsing a command line and reading a config take none of them.
LARGE = (
    "jax",
    "flax",
    "optax",
    "orbax",
    "diffrax",
    "grain",
    "transformers",
    "datasets",
    "torch",
    "scipy",
    "matplotlib",
)
LARGE += ("pandas", "pyarrow", "huggingface_hub", "starlette", "uvicorn", "tensorboardX")
SECONDS = 1.0  # of CPU time, user and system; about 0.2 where bytecode is kept

STATUS = """
import contextlib, io, json, resource, runpy, sys
ended, before = [], 0.0
for name, *arguments in json.loads(sys.argv[1]):
    sys.argv = ["l2d" if name == "l2d_jax" else name, *arguments]
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(name, run_name="__main__", alter_sys=False)
        except SystemExit as end:
            status = end.code or 0
    used = resource.getrusage(resource.RUSAGE_SELF)
    large = sorted({{module.partition(".")[0] for module in sys.modules}} & set({large!r}))
    ended.append([status, large, used.ru_utime + used.ru_stime - before])
    ended[-1] += [stream.buffer.getvalue().decode() for stream in (out, err)]
    before = used.ru_utime + used.ru_stime
print(json.dumps(ended))
"""


def start(*commands):
    """Of each: exit status, large libraries imported by then, seconds of CPU time, and both streams.

    One new process runs all of them. The first one's seconds have the start of Python, and what all import.
    """
    command = [sys.executable, "-c", STATUS.format(large=LARGE), json.dumps([[*map(str, one)] for one in commands])]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert ended.stderr == ""
    return json.loads(ended.stdout)


def quick(*commands):
    """The status and the streams of starts that must be quick; the second of two, if the first compiles bytecode."""
    for _ in range(2):
        ended = start(*commands)
        assert [large for _, large, *_ in ended] == [[]] * len(commands)
        seconds = [used for _, _, used, *_ in ended]
        if seconds[0] + max([0, *seconds[1:]]) < SECONDS:
            return [(status, out, err.rstrip()) for status, _, _, out, err in ended]
    raise AssertionError(f"{commands} took {seconds} s of CPU time")


def test_help_is_quick_and_names_the_command():
    ended = quick(*((f"l2d_jax.{program}", "--help") for program in starter.PROGRAMS))
    for program, (status, out, err) in zip(starter.PROGRAMS, ended, strict=True):
        assert (status, err) == (0, "")
        assert out.startswith(f"usage: python -m l2d_jax.{program} ")


def test_a_mistyped_option_or_program_is_answered_quickly():
    ended = quick(
        ("l2d_jax.train", "--config", TINY, "--config.trian.steps=3"),
        ("l2d_jax.train", "--config", TINY, "--workdri", "x"),
        ("l2d_jax.generate", "--model", "x", "--bugdet", "3"),
        ("l2d_jax", "trian"),
    )
    assert [(status, err) for status, _, err in ended] == [
        (2, "error: unknown option config.trian: did you mean 'train'?"),
        (2, "error: unknown argument '--workdri' (--help lists the options)"),
        (2, "error: unrecognized arguments: --bugdet 3 (--help lists the options)"),
        (2, "error: no program 'trian': did you mean 'train'? (l2d --help lists them)"),
    ]


def test_l2d_lists_the_programs():
    alone, asked, train = quick(("l2d_jax",), ("l2d_jax", "--help"), ("l2d_jax", "train", "--help"))
    status, out, _ = alone
    assert status == 0
    assert asked[1] == out
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(starter.PROGRAMS)
    status, out, _ = train
    assert status == 0
    assert out.startswith("usage: l2d train ")
    assert all("l2d_jax.programs" not in line for line in out.splitlines())


def test_every_program_is_listed():
    files = {file.stem for file in (ROOT / "l2d_jax").glob("[a-z]*.py") if "__main__" in file.read_text()}
    assert files - {"command_line"} == set(starter.PROGRAMS)
    assert {file.stem for file in (ROOT / "l2d_jax" / "programs").glob("[a-z]*.py")} == set(starter.PROGRAMS)
    for name in starter.PROGRAMS:
        parser = importlib.import_module(f"l2d_jax.{name}").make_parser()
        assert parser.prog == f"python -m l2d_jax.{name}"


def test_the_version_is_that_of_the_project():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert l2d_jax.__version__ == declared
    assert call(starter._main, "--version").out == f"l2d_jax {declared}\n"
    assert {"load", "LoadedModel", "InputError", "RunError", "__version__"} <= set(dir(l2d_jax))


def test_choices_are_what_the_code_behind_them_has():
    assert tuple(solver.SOLVERS) == choices.SOLVER_NAMES
    assert tuple(solver.FIXED) == choices.FIXED_SOLVERS
    assert tuple(solver.ADAPTIVE) == choices.ADAPTIVE_SOLVERS
    assert tuple(FORMATS) == choices.EXPORT_FORMATS
    assert choices.task_names() == list(TASKS)
    assert choices.tpu_names() == list(GENERATIONS)


@pytest.mark.parametrize(
    "code",
    ["import l2d_jax.configs.tiny", *slow("import l2d_jax; l2d_jax.load", "import l2d_jax; l2d_jax.LoadedModel")],
)
def test_an_import_prints_nothing(code):
    assert imported(code) == ""


@pytest.mark.parametrize(
    "unused",
    [
        {"l2d_jax.programs.report": ["jax", "transformers", "datasets"]},
        {
            "l2d_jax.programs.convert": ["orbax", "datasets", "grain", "matplotlib", "diffrax", "torch"],
            "l2d_jax; l2d_jax.load": ["orbax", "datasets", "grain", "matplotlib", "torch"],
            "l2d_jax.programs.generate": ["orbax", "datasets", "grain", "matplotlib", "torch"],
            "l2d_jax.programs.serve": ["orbax", "datasets", "grain", "matplotlib", "torch"],
            "l2d_jax.programs.train": ["matplotlib", "scipy", "sympy", "torch"],
            "l2d_jax.programs.verify": ["matplotlib", "sympy", "torch"],
            "l2d_jax.programs.evaluate": ["matplotlib", "sympy", "torch"],
        },
        *slow({"l2d_jax.programs.evaluate": ["orbax", "grain", "matplotlib", "sympy"]}),
    ],
    ids=lambda unused: " ".join(name.rpartition(".")[2] for name in unused),
)
def test_a_program_does_not_import_what_it_may_not_need(unused):
    """A workdir needs orbax, an answer of MATH SymPy, a figure matplotlib: each is imported where it is needed.

    One process imports programs in turn, those that need less first, and prints nothing of its own.
    """
    shown = (f"import {name}; print(sorted(set({names}) & set(sys.modules)))" for name, names in unused.items())
    assert imported("\n".join(["import sys", *shown])) == "[]\n" * len(unused)


def imported(code):
    """What a process prints; above all not that transformers has found no PyTorch, which nothing here needs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout
