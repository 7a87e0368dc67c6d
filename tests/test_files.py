"""Files: JSON objects, and output folders that are complete or absent."""

import re
from pathlib import Path

import pytest

from l2d_jax.config.config_file import one_line
from l2d_jax.errors import InputError
from l2d_jax.files import cache_folder, output_folder, read_json, read_lines

# --- JSON ---


@pytest.mark.parametrize("text", ["", "{", "[1]", '"a"', '{"a": 1, "a": 2}', "\xff"])
def test_read_json_takes_objects_only(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=f"{re.escape(str(path))}: malformed JSON"):
        read_json(path)


def test_read_json(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a": {"b": [1]}}')
    assert read_json(tmp_path / "config.json") == {"a": {"b": [1]}}
    with pytest.raises(InputError, match=r"cannot read .*absent.json: No such file"):
        read_json(tmp_path / "absent.json")


# --- the cache ---


def test_one_cache_for_all_that_can_be_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("L2D_JAX_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "l2d_jax"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "l2d_jax"
    monkeypatch.setenv("L2D_JAX_CACHE", "~/ours")
    assert cache_folder() == tmp_path / "ours"


# --- output folders ---


def test_an_output_folder_appears_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "new" / "out"
    with output_folder(target) as folder:
        (folder / "a").write_text("a")
        assert not target.exists()
        assert folder.parent == target.parent  # so that the rename is one step
    assert [path.name for path in target.iterdir()] == ["a"]
    assert [path.name for path in target.parent.iterdir()] == ["out"]


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    def fail() -> None:
        with output_folder(tmp_path / "out") as folder:
            (folder / "a").write_text("a")
            raise failure

    with pytest.raises(failure):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_is_taken_and_others_are_refused(tmp_path: Path) -> None:
    empty, full, file = tmp_path / "empty", tmp_path / "full", tmp_path / "file"
    empty.mkdir()
    full.mkdir()
    (full / "precious").write_text("a")
    file.write_text("a")
    with output_folder(empty) as folder:
        (folder / "a").write_text("a")
    assert (empty / "a").exists()
    for path in (full, file):
        with pytest.raises(InputError, match=f"new or empty folder, and {re.escape(str(path))}"), output_folder(path):
            pytest.fail("the body must not run")
    assert (full / "precious").exists()


def test_a_parent_that_cannot_hold_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a")
    with pytest.raises(InputError, match=r"cannot create a folder in .*file"), output_folder(tmp_path / "file" / "out"):
        pytest.fail("the body must not run")


# --- damage ---


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
        (b'{"a": \xed\xa0\x80}', "byte 6 is not UTF-8"),
        (b'{"a":' + b"[" * 100_000, "nested too deep"),
        (b'{"' + b"k" * 5000 + b'": 1, "' + b"k" * 5000 + b'": 2}', "repeated key 'kkk"),
        (b'{"a": ' + b"9" * 5000 + b"}", "limit"),
    ],
)
def test_malformed_json_is_a_short_line(tmp_path: Path, text: bytes, message: str) -> None:
    (tmp_path / "x.json").write_bytes(text)
    with pytest.raises(InputError, match=message) as error:
        read_json(tmp_path / "x.json")
    assert len(str(error.value)) - len(str(tmp_path)) < 250


def test_many_damaged_lines_are_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "x.jsonl"
    file.write_text('{"a": 1}\n' + "{\n" * 500 + '{"a": 2}\n{"a": 3')
    assert [record["a"] for _, record in read_lines(file, (dict[str, int],), lambda records: {})] == [1, 2]
    [warning] = capsys.readouterr().err.splitlines()
    assert warning.startswith(f"warning: line 2 of {file} is damaged and left out, and 499 more: ")


def test_an_error_is_one_line_of_at_most_300_characters() -> None:
    line = one_line(InputError("the rule\n" + "y" * 5000 + ": the remedy"))
    assert len(line) <= 300
    assert line.startswith("the rule yyy")
    assert line.endswith("yyy: the remedy")
