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

README, DOCS = ROOT / "README.md", ROOT / "docs"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted(DOCS.rglob("*.md"))]
CONFIGS = {file.stem: file for file in (ROOT / "configs").glob("*.py")}
SHARED_OPTIONS = {"--help"}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def spans(page: Path) -> Iterator[str]:
    """Code of a page, block by block and span by span, with its continued lines joined and its variables put in."""
    text = page.read_text()
    for block in re.findall(r"^```(?:bash|sh|console|text)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        block = block.replace("\\\n", " ")
        for name, value in re.findall(r'^(\w+)="(.*)"$', block, re.MULTILINE):
            block = block.replace(f"${name}", value)
        yield from (line for line in block.splitlines() if not re.match(r'\w+="', line))
    for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        yield " ".join(span.split())


def commands(page: Path) -> Iterator[tuple[str, list[str]]]:
    """Each program that a page shows, as `l2d PROGRAM` or `python -m l2d_jax.PROGRAM`, with its arguments."""
    for span in spans(page):
        if found := re.search(r"(?:python -m l2d_jax\.|(?:^|[\s(])l2d )([A-Za-z][\w.]*)(.*)", span):
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


def test_the_readme_is_short():
    assert len(README.read_text().splitlines()) <= 120


def test_every_page_has_a_title_and_a_place_on_the_site():
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = {str(page.relative_to(DOCS)): page for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(pages)
    for name, page in pages.items():
        [title] = re.findall(r"^# (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
        assert len(title) <= 80, name


@pytest.mark.parametrize("page", PAGES, ids=name)
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


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_files_that_are_named_exist(page):
    for span in spans(page):
        folders = "l2d_jax|tests|configs|launch|docs|examples"
        for file in re.findall(rf"(?:^|[\s(=])((?:{folders})/[\w./]*\w)(?=[\s`:,)]|$)", span):
            assert (ROOT / file).exists(), file


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_commands_are_known(page):
    for program, arguments in commands(page):
        if program == "PROGRAM":
            continue
        command = arguments[:1] if program == "convert" else []
        for argument in arguments:
            option = argument.partition("=")[0]
            if option.startswith("--") and not option.startswith("--config."):
                assert option in options(program, *command) | SHARED_OPTIONS, (program, option)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_options_and_variants_of_configs_are_known(page):
    names = defaults().to_dict()
    for span in spans(page):
        for reference in re.findall(r"(?:^|[\s-])config\.([a-z_]+(?:\.[a-z_0-9]+)?)(?=$|[\s=)])", span):
            assert reference == "json" or exists(reference, names), reference
        for config, variants in re.findall(rf"\b({'|'.join(CONFIGS)})(?:\.py)?:([a-z0-9_,]+)", span):
            assert set(variants.split(",")) - {""} <= set(find_variants(str(CONFIGS[config]))), (config, variants)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_configs_that_commands_name_exist(page):
    for _, arguments in commands(page):
        text = " ".join(arguments)
        for config in re.findall(r"--config[ =]([a-z0-9_]+)(?=[: ]|$)", text):
            assert config in CONFIGS, config


def test_the_architecture_page_names_every_module():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for name in re.findall(r"`(\w+/\w+)`", text):
        assert (ROOT / "l2d_jax" / f"{name}.py").exists(), name
    for folder, line in re.findall(r"^\| `(\w+)/` \|(.*)\|$", text, re.MULTILINE):
        modules = {file.stem for file in (ROOT / "l2d_jax" / folder).glob("*.py")} - {"__init__"}
        named = set(re.findall(r"`(\w+)`", line))
        assert modules <= named, (folder, modules - named)
        assert named - modules <= {"Config"}, (folder, named - modules)
