"""Damaged files of every kind: one clear line, the same values, or what a kind declares that none can notice.

`--fuzz 50000` runs so many cases in place of 2,000, and prints a row of outcomes for each kind.
"""

from collections import Counter

import pytest

from tests.support import fuzz
from tests.support.fuzzed_models import MODEL_KINDS
from tests.support.fuzzed_records import RECORD_KINDS

KINDS = MODEL_KINDS | RECORD_KINDS


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_no_damage_is_a_traceback_or_another_value(tmp_path, monkeypatch, request, capsys, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **options: pytest.fail("asked the hub"))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # it takes most of the time of small files
    asked = request.config.getoption("fuzz")
    found = fuzz.run(KINDS[name], tmp_path, cases=-(-(asked or 2000) // len(KINDS)), seed=0)
    counts = Counter(outcome for _, outcome, _ in found)
    if asked:
        with capsys.disabled():
            print(
                f"| {name} | {len(found)} | " + " | ".join(f"{counts[outcome]:,}" for outcome in fuzz.OUTCOMES) + " |"
            )
    wrong = [f"case {case}: {text}" for case, outcome, text in found if outcome == "WRONG"]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:20])


JSON_KINDS = [name for name, kind in KINDS.items() if kind.file.endswith(".json")]


@pytest.mark.slow
@pytest.mark.parametrize("name", JSON_KINDS)
def test_every_value_of_every_json_may_be_strange(tmp_path, monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *given, **options: pytest.fail("asked the hub"))
    monkeypatch.setattr("os.fsync", lambda descriptor: None)
    found = fuzz.run_all(KINDS[name], tmp_path)
    wrong = [f"{done}: {text}" for done, outcome, text in found if outcome == "WRONG"]
    assert not wrong, f"{len(wrong)} of {len(found)}:\n" + "\n".join(wrong[:40])
