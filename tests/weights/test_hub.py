"""The hub, by a fake of its HTTP interface, in other processes: the library reads its environment as it is imported."""

from pathlib import Path

import pytest

from tests.support.fake_hub import fake_hub

READ = "from l2d_jax.weights import hub; "


@pytest.mark.slow
def test_a_folder_goes_to_the_hub_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "model.safetensors").write_bytes(b"x" * 1000)
    (folder / "run.py").write_text("print()")
    with fake_hub() as hub:
        upload = READ + f"from pathlib import Path; print(hub.upload(Path({str(folder)!r}), 'org/name'))"
        done = hub.python(upload, tmp_path / "home")
        assert done.stdout.strip() == f"{hub.address}/org/name", done.stderr
        [(first, files)] = hub.commits["org/name"]
        assert files == {file.name: file.read_bytes() for file in folder.iterdir()}
        hub.add("org/name", {"config.json": b'{"a": 2}'})
        for name, text in (("org/name", '{"a": 2}'), (f"org/name@{first}", '{"a": 1}')):
            found = hub.python(READ + f"print(hub.download({name!r}, hub.FILES))", tmp_path / "home").stdout.strip()
            assert Path(found, "config.json").read_text() == text
        assert {file.name for file in Path(found).iterdir()} == {"config.json", "model.safetensors"}  # no code


@pytest.mark.slow
@pytest.mark.parametrize(
    ("call", "token", "message"),
    [
        ("hub.download('org/name@gone', hub.FILES)", "hf_writer", "org/name has no revision gone on the hub: name one"),
        ("hub.upload(Path('configs'), 'org/name')", "hf_reader", "'org/name' could not be written on the hub"),
        ("hub.upload(Path('configs'), 'org/name')", "hf_reader", "set HF_TOKEN to a token that may write there"),
    ],
)
def test_what_the_hub_refuses(tmp_path: Path, call: str, token: str, message: str) -> None:
    with fake_hub() as hub:
        hub.add("org/name", {"config.json": b"{}"})
        done = hub.python(f"{READ}from pathlib import Path; {call}", tmp_path / "home", token=token)
    assert message in done.stderr
    assert "InputError" in done.stderr
