"""The pages: what they link to, name and show exists."""

import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from l2d_jax.config.config_file import find_variants
from l2d_jax.config.schema import defaults
from tests.support.programs import ROOT, call

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
QUESTIONS = ("training", "variants", "generation", "evaluation", "study", "exactness", "reliability", "pods")
QUESTIONS += ("tpu_estimates", "speed", "architecture", "serving", "publishing", "parallel")
SHARED_OPTIONS = {"--help"}


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(page: Path) -> Iterator[str]:
    """Code of a page, block by block and span by span, with its continued lines joined and its variables put in."""
    text = page.read_text()
    for block in re.findall(r"```\n(.*?)```", text, re.DOTALL):
        block = block.replace("\\\n", " ")
        for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE):
            block = block.replace(f"${name}", value)
        yield from (line for line in block.splitlines() if not re.match(r'\w+="', line))
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield " ".join(span.split())


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each program of the package that a page shows, with its arguments."""
    for span in spans(page):
        if found := re.search(r"python -m l2d_jax\.([\w.]+)(.*)", span):
            yield found[1], shlex.split(found[2].rstrip(")"), comments=True)


@cache
def options(program: str, *command: str) -> frozenset[str]:
    """What `--help` lists."""
    outcome = call(importlib.import_module(f"l2d_jax.{program}").main, *command, "--help")
    assert outcome.status == 0
    return frozenset(re.findall(r"--\w+", outcome.out))


def exists(reference: str, names: dict[str, object]) -> bool:
    """Whether the defaults have this option or section."""
    node: object = names
    for name in reference.split("."):
        if not isinstance(node, dict) or name not in node:
            return False
        node = node[name]
    return True


def test_the_readme_is_short_and_every_question_has_a_page():
    assert len(PAGES[0].read_text().splitlines()) <= 200
    assert {page.stem for page in PAGES[1:]} == set(QUESTIONS)
    for page in PAGES[1:]:
        assert re.match(r"# .*\?\n", page.read_text()), page.name
        assert f"docs/{page.name}" in PAGES[0].read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = (page.parent / name).resolve() if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def test_every_picture_is_shown():
    links = (name for page in PAGES for name in re.findall(r"\]\(([^)]+)\)", page.read_text()))
    shown = {Path(name).name for name in links if "images/" in name}
    assert {file.name for file in (ROOT / "docs" / "images").iterdir()} == shown


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page):
    for span in spans(page):
        for name in re.findall(r"(?:^|[\s/(=])((?:l2d_jax|tests|configs|launch|docs)/[\w./]*\w)(?=[\s`:,)]|$)", span):
            assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_known(page):
    for program, arguments in commands(page):
        if program == "PROGRAM":
            continue
        command = arguments[:1] if program == "convert" else []
        for argument in arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and not name.startswith("--config."):
                assert name in options(program, *command) | SHARED_OPTIONS, (program, name)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_options_and_variants_of_configs_are_known(page):
    names = defaults().to_dict()
    for span in spans(page):
        for reference in re.findall(r"(?:^|[\s-])config\.([a-z_]+(?:\.[a-z_0-9]+)?)(?=$|[\s=)])", span):
            assert reference == "json" or exists(reference, names), reference
        for file, variants in re.findall(r"(configs/\w+\.py):([a-z0-9_,]+)", span):
            assert set(variants.split(",")) - {""} <= set(find_variants(str(ROOT / file))), (file, variants)


def test_the_architecture_page_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`(\w+/\w+)`", text):
        assert (ROOT / "l2d_jax" / f"{name}.py").exists(), name
    for room, line in re.findall(r"^\| `(\w+)/` \|(.*)\|$", text, re.MULTILINE):
        modules = {file.stem for file in (ROOT / "l2d_jax" / room).glob("*.py")} - {"__init__"}
        named = set(re.findall(r"`(\w+)`", line))
        assert modules <= named, (room, modules - named)
        assert named - modules <= {"Config"}, (room, named - modules)
