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
import json, resource, runpy, sys
from tests.support.marks import slow
sys.argv = ["l2d", *sys.argv[2:]] if sys.argv[1] == "l2d_jax" else sys.argv[1:]
name = {name!r}
try:
    runpy.run_module(name, run_name="__main__", alter_sys=False)
except SystemExit as end:
    used = resource.getrusage(resource.RUSAGE_SELF)
    large = sorted({{module.partition(".")[0] for module in sys.modules}} & set({large!r}))
    print(json.dumps([end.code or 0, large, used.ru_utime + used.ru_stime]), file=sys.stderr)
"""


def start(module, *arguments):
    """Exit status, large libraries that were imported, seconds of CPU time, and both streams, of a new process."""
    command = [sys.executable, "-c", STATUS.format(name=module, large=LARGE), module, *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, env=environment)
    *lines, last = ended.stderr.splitlines()
    return *json.loads(last), ended.stdout, "\n".join(lines)


def quick(module, *arguments):
    """The status and the streams of a start that must be quick; the second of two, if the first compiles bytecode."""
    for _ in range(2):
        status, large, seconds, out, err = start(module, *arguments)
        assert large == []
        if seconds < SECONDS:
            return status, out, err
    raise AssertionError(f"{module} {arguments} took {seconds:.1f} s of CPU time")


@pytest.mark.parametrize("program", starter.PROGRAMS)
def test_help_is_quick_and_names_the_command(program):
    status, out, err = quick(f"l2d_jax.{program}", "--help")
    assert (status, err) == (0, "")
    assert out.startswith(f"usage: python -m l2d_jax.{program} ")


def test_a_mistyped_option_or_program_is_answered_quickly():
    status, _, err = quick("l2d_jax.train", "--config", TINY, "--config.trian.steps=3")
    assert (status, err) == (2, "error: unknown option config.trian: did you mean 'train'?")
    status, _, err = quick("l2d_jax.train", "--config", TINY, "--workdri", "x")
    assert (status, err) == (2, "error: unknown argument '--workdri' (--help lists the options)")
    status, _, err = quick("l2d_jax.generate", "--model", "x", "--bugdet", "3")
    assert (status, err) == (2, "error: unrecognized arguments: --bugdet 3 (--help lists the options)")
    status, _, err = quick("l2d_jax", "trian")
    assert (status, err) == (2, "error: no program 'trian': did you mean 'train'? (l2d --help lists them)")


def test_l2d_lists_the_programs():
    status, out, _ = quick("l2d_jax")
    assert status == 0
    assert quick("l2d_jax", "--help")[1] == out
    assert re.findall(r"^  (\w+) ", out, re.MULTILINE) == list(starter.PROGRAMS)
    status, out, _ = quick("l2d_jax", "train", "--help")
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
    [
        "import l2d_jax; l2d_jax.load",
        *slow("import l2d_jax; l2d_jax.LoadedModel"),
        "from l2d_jax.programs import generate, evaluate, train",
        "import l2d_jax.configs.tiny",
    ],
)
def test_an_import_prints_nothing(code):
    """Above all not that transformers has found no PyTorch, which nothing here needs."""
    environment = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_NO_ADVISORY_WARNINGS"}
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(ROOT)})
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")


@pytest.mark.parametrize(
    ("program", "unused"),
    [
        ("report", ["jax", "transformers", "datasets"]),
        ("generate", ["orbax", "datasets", "grain", "matplotlib"]),
        pytest.param("serve", ["orbax", "datasets", "grain", "matplotlib"], marks=pytest.mark.slow),
        ("convert", ["orbax", "datasets", "grain", "matplotlib", "diffrax"]),
        ("train", ["matplotlib", "scipy", "sympy"]),
        pytest.param("evaluate", ["orbax", "grain", "matplotlib", "sympy"], marks=pytest.mark.slow),
    ],
)
def test_a_program_does_not_import_what_it_may_not_need(program, unused):
    """A workdir needs orbax, an answer of MATH SymPy, a figure matplotlib: each is imported where it is needed."""
    code = f"import sys, l2d_jax.programs.{program}; print(sorted(set({unused}) & set(sys.modules)))"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    assert subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout == "[]\n"
