"""Configs by name and by path, from any folder."""

import pytest

from l2d_jax.config.config_file import SHIPPED, find_variants, locate_config, read_config, shipped_configs
from l2d_jax.errors import InputError
from tests.support.programs import ROOT


def test_each_config_of_the_project_is_found_by_its_name(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    files = sorted((ROOT / "configs").glob("*.py"))
    assert shipped_configs() == [file.stem for file in files]
    for file in files:
        assert locate_config(file.stem).read_bytes() == file.read_bytes()
    assert read_config("qwen7b") == read_config(str(ROOT / "configs" / "qwen7b.py"))
    assert read_config("smollm2_135m:quickstart", {"train.steps": 3}).train.steps == 3
    assert find_variants("tiny") == find_variants(str(ROOT / "configs" / "tiny.py"))


def test_the_files_are_there_once():
    assert (ROOT / "l2d_jax" / "configs").is_symlink()
    assert SHIPPED.resolve() == ROOT / "configs"


def test_a_path_is_a_path_and_a_bare_name_is_a_config_of_the_package(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    own = (ROOT / "configs" / "tiny.py").read_text()
    (tmp_path / "qwen7b.py").write_text(own)
    (tmp_path / "qwen7b").write_text(own)
    assert read_config("qwen7b.py") == read_config("./qwen7b.py") == read_config("tiny")
    assert read_config("qwen7b") != read_config("tiny")
    monkeypatch.chdir(ROOT)
    assert read_config("configs/tiny.py") == read_config("tiny")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen7", "no config 'qwen7': did you mean qwen7b or "),
        ("smolm2:quickstart", "did you mean smollm2_135m"),
        ("nothing", "choose from gemma3_4b, llama1b"),
        ("", "choose from gemma3_4b, llama1b"),
        ("..", "no config '..'"),
        ("qwen7", f"looked for in {SHIPPED}" if len(str(SHIPPED)) < 80 else "looked for in "),
        ("qwen7", "the path of your own file has a slash or ends in .py"),
        ("configs/qwen7b.py", "no config file configs/qwen7b.py: give 'qwen7b' alone, which ships with the package"),
        ("mine.py", "no config file mine.py: give the path of a Python file with get_config()"),
        ("tiny:dens", "tiny has no variant 'dens': did you mean 'dense'?"),
    ],
)
def test_a_config_that_does_not_exist(monkeypatch, tmp_path, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as caught:
        read_config(name)
    assert message in str(caught.value)
