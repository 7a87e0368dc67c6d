"""Files: JSON objects, what is no regular file, and files that are written whole."""

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from l2d_jax.config.config_file import one_line
from l2d_jax.errors import InputError
from l2d_jax.files import cache_folder, open_file, read_json, read_lines, write_whole
from tests.support.odd_files import ODD, make_odd

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


# --- what is no regular file ---


@pytest.mark.parametrize("kind", ODD)
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = make_odd(tmp_path / "x.json", kind)
    with pytest.raises(OSError):  # noqa: PT011 (of several kinds)
        open_file(path)
    with pytest.raises(InputError, match=rf"cannot read {path}: \w+"):
        read_json(path)


# --- writing ---


def test_files_that_others_write_too_are_whole(tmp_path: Path) -> None:
    """Threads in place of processes: a lock belongs to an open file, not to its process."""
    path, texts = tmp_path / "x", [str(i) * 10_000 for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda text: [write_whole(path, text) for _ in range(20)], texts))
    assert path.read_text() in texts
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_killed_process_left_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "x.partial").write_text("a longer text than the new one")
    write_whole(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "new"
    assert list(tmp_path.iterdir()) == [tmp_path / "x"]
