"""Sources: what a name stands for, and the cache of conversions."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import pytest

from l2d_jax.errors import InputError
from l2d_jax.weights import locate as sources
from l2d_jax.weights.locate import locate, read_base_name
from l2d_jax.weights.safetensors_file import SafetensorsFolder
from tests.support.tiny_gguf import write_gguf

# --- names ---


def test_a_folder_stands_for_itself(tmp_path: Path) -> None:
    assert locate(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["", "/no/such/folder", "./nothing", "a/b/c", "nothing", "org/"])
def test_a_name_that_can_be_nothing_is_refused_without_asking_the_hub(
    monkeypatch: pytest.MonkeyPatch, name: str, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "weights").mkdir()
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(InputError, match=r"neither a folder, nor a .gguf file, nor a hub id"):
        locate(name or str(tmp_path / "model.bin"))


def test_a_hub_id_is_downloaded_without_pickles_or_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import fnmatch

    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert locate("meta-llama/Llama-3.2-1B-Instruct") == tmp_path
    [(name, patterns)] = asked
    assert name == "meta-llama/Llama-3.2-1B-Instruct"

    def wanted(file: str) -> bool:
        return any(fnmatch.fnmatch(file, pattern) for pattern in patterns)

    assert all(map(wanted, ["model-00001-of-00002.safetensors", "model.safetensors.index.json", "tokenizer.json"]))
    assert all(map(wanted, ["config.json", "generation_config.json", "chat_template.jinja", "merges.txt"]))
    assert not any(map(wanted, ["pytorch_model.bin", "modeling_x.py", "original/consolidated.00.pth", "model.gguf"]))


def test_a_failed_download_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.errors

    for failure in (
        huggingface_hub.errors.LocalEntryNotFoundError("no network\nat all"),
        huggingface_hub.errors.HFValidationError("no id"),
        Exception("of an HTTP library"),
        OSError("no space"),
        RuntimeError("in the transfer"),
    ):

        def download(*_: object, failure: Exception = failure, **__: object) -> str:
            raise failure

        monkeypatch.setattr("huggingface_hub.snapshot_download", download)
        with pytest.raises(InputError, match=r"'org/name'.*give a local folder") as error:
            locate("org/name")
        assert "\n" not in str(error.value)


# --- the cache of conversions ---


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "x.gguf"
    write_gguf(path)
    folder = locate(str(path))
    assert folder.parent == tmp_path / "cache"
    assert SafetensorsFolder.open(folder).records["model.norm.weight"].dtype == ml_dtypes.bfloat16
    with monkeypatch.context() as context:
        context.setattr(sources, "convert_gguf", lambda *_, **__: pytest.fail("converted again"))
        assert locate(str(path)) == folder
    write_gguf(path, tied=False)
    other = locate(str(path))
    assert other != folder
    assert sorted((tmp_path / "cache").iterdir()) == sorted([folder, other])


def test_the_cache_is_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("L2D_JAX_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    write_gguf(tmp_path / "x.gguf")
    assert locate("~/x.gguf").parent == tmp_path / ".cache" / "l2d_jax"


def test_a_failed_conversion_leaves_nothing_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "x.gguf", pre="tekken")
    with pytest.raises(InputError, match="tekken"):
        locate(str(tmp_path / "x.gguf"))
    assert list((tmp_path / "cache").iterdir()) == []
    with pytest.raises(InputError, match=r"there is no file .*absent.gguf"):
        locate(str(tmp_path / "absent.gguf"))


def test_a_conversion_that_another_process_finished_first_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("L2D_JAX_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "x.gguf")
    convert_once = sources.convert_gguf

    def convert_while_another_does(path: Path, out: Path) -> None:
        convert_once(path, out)
        target = out.parent / out.name.removeprefix(".").split(".")[0]
        target.mkdir()
        convert_once(path, target)

    monkeypatch.setattr(sources, "convert_gguf", convert_while_another_does)
    folder = locate(str(tmp_path / "x.gguf"))
    assert list((tmp_path / "cache").iterdir()) == [folder]
    SafetensorsFolder.open(folder)


# --- the base that a file names ---


def test_a_hub_id_is_recorded_as_it_is_and_a_folder_by_two_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "base").mkdir(parents=True)
    (tmp_path / "random").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("random", "~/absent.gguf"):
        assert sources.base_record(name, tmp_path / "out") == {"base": name}
    for name in ("org/name", "hub:org/base"):
        hub_id = name.removeprefix("hub:")
        assert sources.base_record(name, tmp_path / "out") == {"base": hub_id, "base_on_hub": True}
    local = {"base": str(tmp_path.resolve() / "org" / "base"), "base_from_here": "../org/base"}
    assert sources.base_record("org/base", tmp_path / "out") == local
    (tmp_path / "x.gguf").touch()
    assert sources.base_record("x.gguf", tmp_path)["base_from_here"] == "x.gguf"


def test_the_record_of_a_hub_id_is_no_folder_and_that_of_a_folder_is_no_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the working directory holds, and whoever has registered the name of a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: f"downloaded {name}")
    (tmp_path / "runs" / "base").mkdir(parents=True)
    file = tmp_path / "path.json"

    def located(**record: Any) -> str:
        file.write_text(json.dumps(record))
        return str(locate(read_base_name(file)))

    assert located(base="runs/base", base_on_hub=True) == "downloaded runs/base"
    assert located(base="runs/base") == "runs/base"  # as former versions wrote it
    assert str(locate("runs/base")) == "runs/base"
    monkeypatch.chdir(tmp_path / "runs")
    with pytest.raises(InputError, match=r"there is no such folder here: give its folder .* if it is a hub id"):
        located(base="runs/base")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="has no folder smolm2: check the path, or give hub:runs/smolm2"):
        locate("runs/smolm2")
    assert str(locate("hub:runs/smolm2")) == "downloaded runs/smolm2"
