"""Hostile clients of every kind at once: honest ones lose nothing."""

import pytest

from tests.serving.hostile import attack


@pytest.mark.slow
def test_honest_clients_get_the_answers_that_they_get_alone():
    report = attack(30.0, questions=8)
    assert report.honest >= 16
    assert report.different == []
    assert (report.exit_status, report.seconds_to_end < 20) == (0, True)
    kinds = {name.split()[0] for name in report.statuses}
    assert kinds == {"half_open", "drip", "deaf", "leaving", "scoring", "refused", "foreign"}
