"""The house keeps its order: packages import downward, folders and files stay small, a public name has one home."""

import ast
import functools
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

from tests.conftest import LONGEST

PACKAGE = Path(__file__).parents[1] / "l2d_jax"
FLOORS = (  # each may import from those above it
    {"console", "errors", "files", "statistics"},
    {"storage"},
    {"config"},
    {"distributed", "data"},
    {"model"},
    {"weights", "decoding"},
    {"training"},
    {"loading"},
    {"serving", "evaluation", "performance", "parity"},
    {"reports"},
    {"command_line"},
    {"programs"},
)  # and then the command lines of the programs, which import from all
FLOOR = {name: number for number, names in enumerate(FLOORS) for name in names}
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "configs"]


def module(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module(path) for path in FILES}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(tree: ast.Module) -> set[str]:
    """The modules of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("l2d_jax"):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (names & MODULES) or {node.module}
    return found


@functools.cache
def all_imports() -> dict[str, set[str]]:
    return {module(path): imports(parsed(path)) for path in FILES}


def room(name: str) -> str:
    return name.removeprefix("l2d_jax").removeprefix(".").partition(".")[0]


def test_rooms_import_downward():
    # distributed and data, weights and decoding, and serving, evaluation, performance and parity share a floor.
    arrows = {(room(a), room(b)) for a, names in all_imports().items() for b in names if room(a) != room(b)}
    programs = len(FLOORS)
    upward = {(a, b) for a, b in arrows if FLOOR.get(b, programs) > FLOOR.get(a, programs)}
    assert upward == set()
    rooms = {name for names in FLOORS for name in names}
    assert {(a, b) for a, b in arrows if (b, a) in arrows and {a, b} <= rooms} == set()


def test_no_module_imports_itself_through_others():
    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for other in all_imports()[name] - {name}:
                visit(other, (*path, name))
            done.add(name)

    done: set[str] = set()
    for name in MODULES:
        visit(name, ())


@pytest.mark.parametrize("path", FILES, ids=module)
def test_files_stay_small(path):
    assert len(path.read_text().splitlines()) <= 300
    if path.name == "__init__.py" and path.parent != PACKAGE:  # hands on names only
        assert all(isinstance(node, ast.Expr | ast.ImportFrom) for node in parsed(path).body)


def test_folders_stay_small():
    counts = {folder: len(list(folder.glob("*.py"))) for folder in {path.parent for path in FILES}}
    assert counts.pop(PACKAGE) <= 22
    assert max(counts.values()) <= 20


def test_a_public_name_has_one_home():
    homes = defaultdict(set)
    for path in FILES:
        for node in parsed(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(module(path))
    of_programs = {"main", "make_parser", "run"}  # of each
    twice = {name: found for name, found in homes.items() if len(found) > 1 and name not in of_programs}
    assert len(twice) <= 8, twice


def test_the_longest_test_files_are_there():
    assert all((PACKAGE.parent / name).is_file() for name in LONGEST)


@pytest.mark.skipif(shutil.which("git") is None or not (PACKAGE.parent / ".git").exists(), reason="no git checkout")
def test_only_the_projects_own_files_are_kept():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=PACKAGE.parent, capture_output=True, text=True, check=True)
    files = [PACKAGE.parent / name for name in listed.stdout.split("\0") if name]
    top = {file.relative_to(PACKAGE.parent).parts[0] for file in files}
    folders = {"l2d_jax", "configs", "launch", "tests", "docs", "examples"}
    pages = {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CITATION.cff", "LICENSE"}
    assert {name for name in top if not name.startswith(".")} == folders | pages | {
        "requirements.txt",
        "pyproject.toml",
        "mkdocs.yml",
    }
    assert {file.name for file in files if file.is_file() and file.stat().st_size > 512 * 1024} == set()
