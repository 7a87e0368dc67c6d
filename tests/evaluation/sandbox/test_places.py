import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from l2d_jax.errors import RunError
from l2d_jax.evaluation.sandbox import places
from tests.support.programs import ROOT

MEMORY = 2**28


@pytest.fixture
def folder(monkeypatch, tmp_path):
    """A folder of files that no grader outside this test uses, without control groups, whose names all share."""
    monkeypatch.setattr(places, "_folder", lambda: tmp_path)
    monkeypatch.setattr(places, "bounded_group", lambda *_: contextlib.nullcontext())
    return tmp_path


def accounts(taken):
    return {account for place in taken for account in place.accounts}


@pytest.mark.usefixtures("folder")
def test_two_graders_share_no_account():
    def taken(count):
        return places.taken_places(count, with_accounts=True, memory=MEMORY)

    with taken(3) as one, taken(2) as other:
        assert (len(one), len(other)) == (3, 2)
        assert len(accounts(one) | accounts(other)) == 10
        kept = accounts(one)
    with taken(3) as again:
        assert accounts(again) == kept


@pytest.mark.usefixtures("folder")
def test_where_few_places_are_free_those_are_taken(monkeypatch):
    monkeypatch.setattr(places, "PLACES", 2)
    with places.taken_places(5, with_accounts=False, memory=MEMORY) as all_of_them:
        assert [place.accounts for place in all_of_them] == [(None, None)] * 2
        with (
            pytest.raises(RunError, match=r"all 2 places of .* are taken by other graders: wait until one ends"),
            places.taken_places(1, with_accounts=False, memory=MEMORY),
        ):
            pass


def test_a_killed_grader_leaves_its_places(folder):
    source = f"""
import contextlib
from pathlib import Path
from l2d_jax.evaluation.sandbox import places
places.bounded_group = lambda *_: contextlib.nullcontext()
places._folder = lambda: Path({str(folder)!r})
with places.taken_places(1, with_accounts=True, memory={MEMORY}):
    print(flush=True)
    input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", source], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        other.stdout.readline()
        with places.taken_places(1, with_accounts=True, memory=MEMORY) as [second]:
            pass
        other.kill()
        other.wait()
    with places.taken_places(1, with_accounts=True, memory=MEMORY) as [first]:
        assert (first.accounts, second.accounts) == ((64000, 64001), (64002, 64003))


def test_the_folder_of_another_user_is_refused(monkeypatch):
    user = os.geteuid() + 54321
    monkeypatch.setattr(places.os, "geteuid", lambda: user)
    try:
        with pytest.raises(RunError, match=f"/tmp/l2d_jax-{user} is not a folder of user {user}: remove it"):
            places._folder()
    finally:
        Path(f"/tmp/l2d_jax-{user}").rmdir()
