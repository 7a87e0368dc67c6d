"""What is installed: the package with its configs and data files, and the command `l2d`, in any folder."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.programs import ROOT

pytestmark = pytest.mark.slow
BUILD = "import sys, setuptools.build_meta as build; print(getattr(build, f'build_{sys.argv[1]}')(sys.argv[2]))"


def build(source: Path, kind: str, out: Path) -> Path:
    """Build a wheel or an sdist as pip does; its file."""
    command = [sys.executable, "-c", BUILD, kind, str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=True)
    return out / built.stdout.splitlines()[-1]


@pytest.mark.parametrize("through", ["clone", "sdist"])
def test_a_wheel_is_whole(tmp_path, through):
    pytest.importorskip("setuptools", minversion="80")
    source = tmp_path / "clone"
    source.mkdir()
    for name in ("l2d_jax", "configs"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "requirements.txt", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    if through == "sdist":
        shutil.unpack_archive(build(source, "sdist", tmp_path), tmp_path / "unpacked", filter="data")
        [source] = (tmp_path / "unpacked").iterdir()
    site = tmp_path / "site"
    with zipfile.ZipFile(build(source, "wheel", tmp_path)) as wheel:
        wheel.extractall(site)
    files = (file for file in (ROOT / "l2d_jax").rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    kept = {file.relative_to(ROOT / "l2d_jax") for file in files}  # without the link to configs/
    kept |= {Path("configs", file.name) for file in (ROOT / "configs").glob("*.py")}
    assert {file.relative_to(site / "l2d_jax") for file in (site / "l2d_jax").rglob("*") if file.is_file()} == kept
    [points] = site.glob("*.dist-info/entry_points.txt")
    assert "l2d = l2d_jax.__main__:main" in points.read_text()
    code = "import sys; from l2d_jax.__main__ import main; sys.argv[0] = 'l2d'; main()"
    command = [sys.executable, "-c", code, "train", "--config", "smollm2_135m:quickstart", "--dry_run"]
    ran = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(site), "JAX_PLATFORMS": "cpu"}, capture_output=True
    )
    assert ran.returncode == 0, ran.stderr
    assert b"trainable parameters                                       11,422,656" in ran.stdout
