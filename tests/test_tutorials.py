"""The tutorial on own data: its config is read, and its rows are divided, as the page says."""

import re

from l2d_jax.config.config_file import read_config
from l2d_jax.data import sources
from tests.support.programs import ROOT

PAGE = (ROOT / "docs" / "tutorials" / "own_data.md").read_text()


def test_the_config_of_the_tutorial_trains_on_sixteen_rows_and_holds_out_four(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # where the page's commands run
    [code] = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "commands.py"
    file.write_text(code)
    config = read_config(str(file), {})
    [training], held_out = sources.read_parts(config.data, config.data.train_split)
    assert (len(training), held_out) == (16, 4)
    assert read_config(f"{file}:lora", {}).train.method == "lora"


def test_rows_that_the_tutorial_shows_are_rows_of_the_file():
    rows = (ROOT / "examples" / "data" / "twenty_rows.jsonl").read_text().splitlines()
    [shown] = re.findall(r"devices of a house:\n\n```\n(.*?)```", PAGE, re.DOTALL)
    assert len(rows) == 20
    assert set(shown.splitlines()) <= set(rows)
